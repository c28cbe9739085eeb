"""What the commands of this folder have in common."""

import sys
from collections.abc import Mapping
from typing import TypeVar

import typer
from rich.console import Console
from rich.text import Text

from hacrl_fed.errors import HacrlFedError, UserError

T = TypeVar("T")


def named(table: Mapping[str, T], name: str, kind: str) -> T:
    """The entry of a table. Raises UserError where there is none of the name."""
    if name not in table:
        raise UserError(f"there is no {kind} {name!r}: take of {', '.join(table)}")
    return table[name]


def run_app(app: typer.Typer) -> None:
    """Runs a command; an error of ours is one sentence and its exit code."""
    try:
        app()
    except HacrlFedError as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error)))
        sys.exit(error.exit_code)
