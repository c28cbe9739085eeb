"""The grid of learning rates, with seeds that the study does not use.

Who starts a run does not know how much its peers will have to teach, so a rate is judged by three regimes: where sharing
pays, where it hardly does, and where the peer is useless. Judged by the first alone, sharing methods take a rate that harms
them in the others.
"""

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

_PLAN = Plan(first_prompt=300)  # past those that the study measures on
_REGIMES = ("complementary", "strong_weak", "frozen_peer")
_TIE = 0.01


def tune(variants: Sequence[Variant], out: Path, workers: int, console: Console) -> dict[str, float]:
    """Runs what is missing of the grid, prints it, writes tuning.json, and returns each variant's best learning rate.

    A rate's score is the mean of final greedy accuracy and area under the curve, over agents, seeds and regimes.
    """
    regimes = [REGIMES[name] for name in _REGIMES]
    cells = {
        (variant.name, lr): [
            (regime, trainings(regime, variant, lr, seed, _PLAN)) for regime in regimes for seed in TUNING_SEEDS
        ]
        for variant in variants
        for lr in TUNING_GRID
    }
    run_missing([unit for cell in cells.values() for _, runs in cell for unit in runs.values()], out, workers, console)
    scores: dict[str, dict[float, float]] = {}
    for (name, lr), cell in cells.items():
        means = [outcome_of(regime, runs, out).mean for regime, runs in cell]
        scores.setdefault(name, {})[lr] = fmean(
            value for mean in means for value in (mean["final"], mean["auc"]) if value is not None
        )
    best = {name: best_rate(by_lr) for name, by_lr in scores.items()}
    table = Table("method", *(f"{lr:g}" for lr in TUNING_GRID), "best", title="mean of final greedy accuracy and AUC")
    for name, by_lr in scores.items():
        table.add_row(name, *(f"{by_lr[lr]:.3f}" for lr in TUNING_GRID), f"{best[name]:g}")
    console.print(table)
    grid = {name: {f"{lr:g}": score for lr, score in by_lr.items()} for name, by_lr in scores.items()}
    write_json(out / "tuning.json", {"regimes": _REGIMES, "seeds": TUNING_SEEDS, "grid": grid, "best": best})
    return best


def best_rate(scores: Mapping[float, float]) -> float:
    """The largest rate whose score is within 0.01 of the highest.

    Where a method has learned all that it can at every rate, noise would choose: often a rate that is too small elsewhere.
    """
    highest = max(scores.values())
    return max(lr for lr, score in scores.items() if score >= highest - _TIE)
