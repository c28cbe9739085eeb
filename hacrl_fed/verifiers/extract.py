"""What of a completion is taken as its answer."""

import re

from hacrl_fed.config import Extract

# A comma groups three digits; a full stop only counts before a digit, so that it may end a sentence.
_NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)?(?:\.\d+)?(?<=\d)")
_BOXED = "\\boxed{"


def extract_answer(completion: str, how: Extract) -> str | None:
    """The answer in a completion, stripped, or None where it has none.

    "whole": all of it. "last_number": the last decimal number, without the commas that group its digits. "boxed":
    what the last ``\\boxed{...}`` holds; it has none where that one's braces do not balance.
    """
    if how == "whole":
        return completion.strip()
    if how == "last_number":
        return _last_number(completion)
    return _last_boxed(completion)


def _last_number(completion: str) -> str | None:
    numbers = [match.group() for match in _NUMBER.finditer(completion) if match.group()]
    return numbers[-1].replace(",", "").removeprefix("+") if numbers else None


def _last_boxed(completion: str) -> str | None:
    start = completion.rfind(_BOXED)
    if start < 0:
        return None
    start += len(_BOXED)
    depth = 1
    for position in range(start, len(completion)):
        character = completion[position]
        if character in "{}" and not _is_escaped(completion, position):
            depth += 1 if character == "{" else -1
            if depth == 0:
                return completion[start:position].strip()
    return None


def _is_escaped(text: str, position: int) -> bool:
    backslashes = position - len(text[:position].rstrip("\\"))
    return backslashes % 2 == 1
