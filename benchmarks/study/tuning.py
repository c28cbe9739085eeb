"""The grid of learning rates, on the complementary regime with seeds that the study does not use."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.table import Table

from study.regimes import REGIMES
from study.units import Plan, trainings, write_json
from study.variants import TUNING_GRID, TUNING_SEEDS, Variant
from study.work import outcome_of
from study.workers import run_missing

_PLAN = Plan(steps=20)
_TIE = 0.01


def tune(variants: Sequence[Variant], out: Path, workers: int, console: Console) -> dict[str, float]:
    """Runs what is missing of the grid, prints it, writes tuning.json, and returns each variant's best learning rate.

    A rate's score is the mean of final greedy accuracy and area under the curve, over agents and seeds.
    """
    regime = REGIMES["complementary"]
    cells = {
        (variant.name, lr): [trainings(regime, variant, lr, seed, _PLAN) for seed in TUNING_SEEDS]
        for variant in variants
        for lr in TUNING_GRID
    }
    run_missing([unit for cell in cells.values() for runs in cell for unit in runs.values()], out, workers, console)
    scores: dict[str, dict[float, float]] = {}
    for (name, lr), cell in cells.items():
        means = [outcome_of(regime, runs, out).mean for runs in cell]
        scores.setdefault(name, {})[lr] = fmean(
            value for mean in means for value in (mean["final"], mean["auc"]) if value is not None
        )
    best = {name: best_rate(by_lr) for name, by_lr in scores.items()}
    table = Table("method", *(f"{lr:g}" for lr in TUNING_GRID), "best", title="mean of final greedy accuracy and AUC")
    for name, by_lr in scores.items():
        table.add_row(name, *(f"{by_lr[lr]:.3f}" for lr in TUNING_GRID), f"{best[name]:g}")
    console.print(table)
    grid = {name: {f"{lr:g}": score for lr, score in by_lr.items()} for name, by_lr in scores.items()}
    write_json(out / "tuning.json", {"regime": regime.name, "seeds": TUNING_SEEDS, "grid": grid, "best": best})
    return best


def best_rate(scores: Mapping[float, float]) -> float:
    """The largest rate whose score is within 0.01 of the highest.

    A method that alone learns all that there is to learn has a flat grid, where noise would choose: often a rate that is
    too small for the other regimes, which would then flatter sharing.
    """
    highest = max(scores.values())
    return max(lr for lr, score in scores.items() if score >= highest - _TIE)
