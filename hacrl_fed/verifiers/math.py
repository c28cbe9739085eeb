"""Mathematical equality, by math-verify (github.com/huggingface/Math-Verify).

Its own time limits rest on SIGALRM, which fails outside a main thread: they are off, and ``VerifierPool`` limits the
time instead. Its fallback to the plain string is off as well, since a string equals no expression.
"""

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from hacrl_fed.config import Extract
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.extract import extract_answer

if TYPE_CHECKING:
    from hacrl_fed.tasks.base import Prompt


@dataclass(frozen=True, slots=True)
class MathVerifier:
    """Reward 1 where the extracted answer equals the gold answer as an expression, else 0.

    With extract "whole", math-verify looks for the answer in the whole completion by its own rules.
    """

    extract: Extract

    name: ClassVar[str] = "math"
    isolated: ClassVar[bool] = True

    @property
    def settings(self) -> dict[str, Any]:
        return {"extract": self.extract}

    def prepare(self) -> None:
        _parse("1")

    def verify(self, prompt: "Prompt", completion: str) -> Verdict:
        from math_verify import verify

        gold = _parse_expression(prompt.answer)
        if not gold:
            return Verdict(None, f"math-verify cannot read the gold answer {prompt.answer!r}")
        answer = extract_answer(completion, self.extract)
        if answer is None:
            return Verdict(0.0, f"no answer found ({self.extract})")
        parsed = _parse(answer) if self.extract == "whole" else _parse_expression(answer)
        if not parsed:
            return Verdict(0.0, "no expression found")
        equal = verify(list(gold), list(parsed), timeout_seconds=None, raise_on_error=True)
        return Verdict(1.0, "equal") if equal else Verdict(0.0, "not equal")


@dataclass(frozen=True, slots=True)
class GoldParser:
    """Reward 1 where math-verify can read the text as a gold answer, else None."""

    name: ClassVar[str] = "math-gold"
    isolated: ClassVar[bool] = True
    settings: ClassVar[dict[str, Any]] = {}

    def prepare(self) -> None:
        _parse("1")

    def verify(self, prompt: "Prompt", completion: str) -> Verdict:
        if not _parse_expression(completion):
            return Verdict(None, f"math-verify cannot read {completion!r}")
        return Verdict(1.0, "readable")


@functools.lru_cache(maxsize=4096)
def _parse_expression(expression: str) -> tuple[Any, ...]:
    # Bare LaTeX is read by its last number only, unless it stands where an answer is expected.
    return tuple(_parse(f"\\boxed{{{expression}}}"))


def _parse(text: str) -> Sequence[Any]:
    from math_verify import parse

    # It warns once a process that its own time limit is off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    parsed: Sequence[Any] = parse(text, fallback_mode="no_fallback", parsing_timeout=None, raise_on_error=True)
    return parsed
