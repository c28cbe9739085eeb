"""The study's tasks: digit maps, and digit maps whose verifier accepts a second answer form as well."""

from dataclasses import dataclass
from typing import Any, ClassVar

from hacrl_fed.tasks import digit_maps
from hacrl_fed.tasks.base import Prompt, Task
from hacrl_fed.verifiers.base import Verdict
from study.regimes import TaskName


def load(name: TaskName) -> Task:
    """The task; both have the same prompts and the same held-out ones."""
    task = digit_maps.load()
    return task if name == task.id else Task(name, task.train, task.held_out, TwoFormsVerifier())


def foreign_form(answer: str) -> str:
    """The same answer in the second form: ``by c9: 3>6 9>0 #60`` becomes ``c9 3:6 9:0 so 60``."""
    procedure, _, rest = answer.removeprefix("by ").partition(": ")
    working, _, result = rest.partition(" #")
    return f"{procedure} {working.replace('>', ':')} so {result}"


@dataclass(frozen=True, slots=True)
class TwoFormsVerifier:
    """Reward 1 where the whole completion is the gold answer in either form, white space around aside, else 0."""

    name: ClassVar[str] = "two-forms"
    isolated: ClassVar[bool] = False

    @property
    def settings(self) -> dict[str, Any]:
        return {}

    def prepare(self) -> None:
        """Nothing is needed."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        answer = completion.strip()
        if answer == prompt.answer or answer == foreign_form(prompt.answer):
            return Verdict(1.0, "equal")
        return Verdict(0.0, "not equal")
