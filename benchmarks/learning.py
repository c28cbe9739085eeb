"""Where sharing rollouts wins, ties and loses: a study with tiny models that anyone can regenerate on a CPU.

    python benchmarks/learning.py --regime complementary --methods hacpo,naive,gspo_x2 --seeds 0,1,2
    python benchmarks/learning.py --regime all
    python benchmarks/learning.py --tune

It runs what is missing under --out and reports what is there, so the same command resumes after Ctrl-C. Results depend on
the code too: take a new folder after changing it.
"""

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, TypeVar

import typer
from rich.console import Console
from rich.text import Text

from hacrl_fed.errors import HacrlFedError, InterruptedRunError, UserError
from hacrl_fed.run_folder import locked
from study.plots import plot_regime
from study.regimes import REGIMES, Regime
from study.report import as_json, as_markdown, print_regime
from study.tuning import tune
from study.units import Plan, write_json
from study.variants import COMPARED, TUNING_SEEDS, VARIANTS, Variant
from study.work import outcomes_of

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_SEEDS = "0,1,2,3,4"

T = TypeVar("T")


@app.command(help=__doc__)
def learning(
    regime: Annotated[
        list[str] | None, typer.Option(help=f"A regime, or all; may be given several times: {', '.join(REGIMES)}.")
    ] = None,
    methods: Annotated[str, typer.Option(help=f"Comma-separated, of {', '.join(VARIANTS)}.")] = ",".join(COMPARED),
    seeds: Annotated[str | None, typer.Option(help="Comma-separated whole numbers.", show_default=_SEEDS)] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of a run.", show_default=str(Plan().steps))] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes at once, of one thread each.")] = 2,
    out: Annotated[Path, typer.Option(help="Folder of models, results, plots and results.json.")] = Path(
        "runs/learning"
    ),
    tune_: Annotated[bool, typer.Option("--tune", help="Run the grid of learning rates instead.")] = False,
) -> None:
    # As wide as the tables are: a pipe has no width of its own.
    console = Console(width=None if sys.stdout.isatty() else 220)
    variants = [_named(VARIANTS, name, "method") for name in methods.split(",")]
    if tune_ and (regime or seeds or steps):
        raise UserError("--tune has regimes, seeds and steps of its own: leave --regime, --seeds and --steps out")
    regimes = [] if tune_ else _regimes(regime or [])
    chosen = _seeds(seeds or _SEEDS)
    with locked(out), _interruptible():
        if tune_:
            tune(variants, out, workers, console)
        else:
            _study(regimes, variants, chosen, Plan(steps=steps or Plan().steps), out, workers, console)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into a stop that ends the workers and says how to resume."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell has jobs in its background ignore it.
    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError("interrupted; the same command resumes") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _study(
    regimes: list[Regime],
    variants: list[Variant],
    seeds: list[int],
    plan: Plan,
    out: Path,
    workers: int,
    console: Console,
) -> None:
    outcomes = outcomes_of(regimes, variants, seeds, plan, out, workers, console)
    for regime in regimes:
        print_regime(regime, outcomes[regime.name], console)
        plot_regime(regime, outcomes[regime.name], out / f"{regime.name}.png")
    write_json(out / "results.json", as_json(regimes, variants, plan, outcomes))
    (out / "results.md").write_text(as_markdown(regimes, outcomes), encoding="utf-8")
    console.print(f"\nresults and plots are in {out}", soft_wrap=True)


def _regimes(names: list[str]) -> list[Regime]:
    if not names:
        raise UserError(f"name a --regime, or all: {', '.join(REGIMES)}")
    chosen = [_named(REGIMES, name, "regime") for name in dict.fromkeys(names) if name != "all"]
    return list(REGIMES.values()) if "all" in names else chosen


def _named(table: dict[str, T], name: str, kind: str) -> T:
    if name not in table:
        raise UserError(f"there is no {kind} {name!r}: take of {', '.join(table)}")
    return table[name]


def _seeds(text: str) -> list[int]:
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers with commas between, such as 0,1,2, not {text!r}") from None
    if len(set(seeds)) < len(seeds) or not all(0 <= seed < 1 << 32 for seed in seeds):
        raise UserError(f"--seeds must differ and be from 0 to 2^32 - 1, not {text!r}")
    if taken := sorted(set(seeds) & set(TUNING_SEEDS)):
        raise UserError(f"--seeds must leave out those that learning rates were tuned on, {taken[0]} among them")
    return seeds


def main() -> None:
    """Runs the command; an error of ours is one sentence and its exit code."""
    try:
        app()
    except HacrlFedError as error:
        Console(stderr=True, soft_wrap=True).print(Text(str(error)))
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
