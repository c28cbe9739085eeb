"""String equality."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hacrl_fed.config import Extract
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.extract import extract_answer

if TYPE_CHECKING:
    from hacrl_fed.tasks.base import Prompt


@dataclass(frozen=True, slots=True)
class ExactVerifier:
    """Reward 1 where the extracted answer equals the gold answer, white space around both aside, else 0."""

    extract: Extract

    name: ClassVar[str] = "exact"
    isolated: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        return {"extract": self.extract}

    def prepare(self) -> None:
        """Nothing is needed."""

    def verify(self, prompt: "Prompt", completion: str) -> Verdict:
        answer = extract_answer(completion, self.extract)
        if answer is None:
            return Verdict(0.0, f"no answer found ({self.extract})")
        return Verdict(1.0, "equal") if answer == prompt.answer.strip() else Verdict(0.0, "not equal")
