"""Scores of reasoning-gym's own data sets."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hacrl_fed.config import Extract
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.extract import extract_answer

if TYPE_CHECKING:
    from hacrl_fed.tasks.base import Prompt


@dataclass(frozen=True, slots=True)
class ReasoningGymVerifier:
    """The data set's ``score_answer``, from 0 to 1, of the extracted answer; a prompt's payload is its entry."""

    dataset: str
    params: Mapping[str, bool | int | float | str]
    extract: Extract

    name: ClassVar[str] = "reasoning_gym"
    isolated: ClassVar[bool] = True

    @property
    def settings(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "params": dict(self.params), "extract": self.extract}

    def prepare(self) -> None:
        self._scorer()

    def verify(self, prompt: "Prompt", completion: str) -> Verdict:
        answer = extract_answer(completion, self.extract)
        if answer is None:
            return Verdict(0.0, f"no answer found ({self.extract})")
        score = float(self._scorer().score_answer(answer, entry=prompt.payload))
        return Verdict(score, f"score {score:g}")

    def _scorer(self) -> Any:
        return _dataset(self.dataset, json.dumps(dict(self.params)))


@functools.cache
def _dataset(name: str, params: str) -> Any:
    from reasoning_gym import create_dataset

    return create_dataset(name, **json.loads(params))
