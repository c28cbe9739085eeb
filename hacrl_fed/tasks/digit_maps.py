"""The built-in task "digit-maps": apply one of six maps modulo 10 to each digit, and show the working.

Prompt ``c 3926:``, answer ``by c9: 3>6 9>0 2>7 6>3 #6073``: the procedure's name, the working, the result. The
whole text is required, since a reward for the result alone also pays for wrong working.
"""

import hashlib
from collections.abc import Callable, Mapping

from hacrl_fed.tasks.base import Prompt, Task, build_task
from hacrl_fed.verifiers.exact import ExactVerifier

TASK_ID = "digit-maps"
PROMPTS = 6000
HELD_OUT = 0.1

# By the procedure's name: the letter is the map that a prompt asks for, the digit is part of the name.
RIGHT_PROCEDURES: Mapping[str, Callable[[int], int]] = {
    "a3": lambda x: x + 3,
    "b7": lambda x: x + 7,
    "c9": lambda x: 9 - x,
    "d2": lambda x: 2 * x,
    "e2": lambda x: x * x,
    "f5": lambda x: x + 5,
}


def load() -> Task:
    """The task: prompts drawn by SHA-256, so that they are the same everywhere."""
    drawn = {_drawn_text(index) for index in range(PROMPTS)}
    prompts = (Prompt(text, gold_answer(text)) for text in drawn)
    return build_task(TASK_ID, prompts, HELD_OUT, ExactVerifier(extract="whole"))


def gold_answer(text: str) -> str:
    """The answer to a prompt such as ``c 3926:``."""
    letter, digits = text.removesuffix(":").split(" ")
    (name,) = (name for name in RIGHT_PROCEDURES if name.startswith(letter))
    return worked_answer(name, RIGHT_PROCEDURES[name], digits)


def worked_answer(name: str, procedure: Callable[[int], int], digits: str) -> str:
    """An answer in the task's form, by a procedure that need not be the right one."""
    mapped = [str(procedure(int(digit)) % 10) for digit in digits]
    working = " ".join(f"{digit}>{result}" for digit, result in zip(digits, mapped, strict=True))
    return f"by {name}: {working} #{''.join(mapped)}"


def _drawn_text(index: int) -> str:
    """A map and 4 or 5 digits. Some texts are drawn twice; the few are the same everywhere."""
    draw = int.from_bytes(hashlib.sha256(f"digit-maps {index}".encode()).digest())
    draw, letter = divmod(draw, 6)
    draw, extra = divmod(draw, 2)
    length = 4 + extra
    return f"{'abcdef'[letter]} {draw % 10**length:0{length}d}:"
