"""What HACPO's theorems (arXiv 2603.02604, first version) promise, and what the implementation keeps of it, by simulation.

    python benchmarks/theory.py [--seed N] [--out DIR] [--plot FILE]

Every figure comes from the library's own functions, and is deterministic by seed.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from theory_baseline import (
    Estimate,
    EstimatedRatioRow,
    FloorRow,
    RuleRow,
    TrueRatioRow,
    equal_prompts,
    estimated_ratio,
    floor_cost,
    proportional_prompts,
    rule_costs,
    specialised_prompts,
    true_ratio,
)
from theory_gradients import BANDS, TOKENS, AlignmentRow, Pair, alignments

WINDOWS = (1, 2, 5, 10, 20)
STEP_SIZES = (16, 64, 256, 1024)
GAPS = (1, 2, 5, 10, 20, 30)
STRONG = 0.9
PAIRS = [Pair(distance, 0.4, source) for distance in (0.1, 0.3, 1.0) for source in (0.1, 0.4, 0.8)] + [
    Pair(1.0, 0.4, 0.4, verified=TOKENS),
    Pair(1.0, 0.4, 0.4, verified=TOKENS, halves=True),
]


@dataclass(frozen=True)
class Report:
    """All tables, for both theorems."""

    seed: int
    true_ratio: list[TrueRatioRow]
    estimated_ratio: list[EstimatedRatioRow]
    rules: list[RuleRow]
    floor: list[FloorRow]
    alignments: list[AlignmentRow]


def run(seed: int) -> Report:
    """Both theorems' simulations."""
    generator = torch.Generator().manual_seed(seed)
    pairs = [(STRONG, STRONG / gap) for gap in GAPS] + [(STRONG / gap, STRONG) for gap in GAPS[1:]]
    return Report(
        seed,
        true_ratio=[
            true_ratio("equal: .6 and .2", equal_prompts(0.6, 0.2, 2_000), generator),
            true_ratio("proportional: .45 and .15", proportional_prompts(0.45, 0.15, 2_000, generator), generator),
            true_ratio("specialised: .45 and .15", specialised_prompts(0.45, 0.15, 2_000, generator), generator),
            true_ratio("specialised: .15 and .45", specialised_prompts(0.15, 0.45, 2_000, generator), generator),
        ],
        estimated_ratio=[
            row for rollouts in STEP_SIZES for row in estimated_ratio(0.6, 0.3, WINDOWS, rollouts, 500, generator)
        ]
        + estimated_ratio(0.6, 0.3, WINDOWS, 256, 500, generator, drift=0.02),
        rules=[rule_costs(learner, source, 20_000, generator) for learner, source in pairs],
        floor=[floor_cost(learner, STRONG, window, 16, 300, generator) for learner in (0.1, 0.03) for window in (1, 5)],
        alignments=[row for pair in PAIRS for row in alignments(pair, 12, seed)],
    )


def tables(report: Report) -> Iterator[Table]:
    """The report as one table a question, both theorems'."""
    yield _table(
        "Theorem 4.1, true ratio: bias of the baseline (learner and source capability)",
        ["prompts", "mixed mean", "joint_advantages", "pooled mean", "by prompt, mixed", "by prompt, pooled"],
        [
            [
                row.prompts,
                row.theorem,
                row.library,
                row.naive,
                f"{row.theorem_by_prompt:.4f}",
                f"{row.naive_by_prompt:.4f}",
            ]
            for row in report.true_ratio
        ],
    )
    yield _table(
        "Theorem 4.1, estimated ratio (.6 and .3), against the true one",
        [
            "rollouts a step",
            "drift a step",
            "window",
            "bias of the baseline",
            "RMSE of the baseline",
            "relative RMSE of the ratio",
        ],
        [
            [row.rollouts, row.drift, row.window, row.bias, f"{row.rmse:.4f}", f"{row.ratio_rmse:.3f}"]
            for row in report.estimated_ratio
        ],
    )
    yield _table(
        "What each rule adds to the baseline (true capabilities)",
        ["learner", "source", "equal rewards", "bounds [0.1, 10]", "guard", "all rules", "pooled mean"],
        [
            [
                f"{row.learner:.3f}",
                f"{row.source:.3f}",
                row.equal_rewards,
                row.bounds,
                row.guard,
                row.all_rules,
                row.naive,
            ]
            for row in report.rules
        ],
    )
    yield _table(
        "What the floor adds where the learner has no success in its window (16 rollouts a step)",
        ["learner", "source", "window", "share of windows", "floor", "floor and bounds"],
        [
            [row.learner, row.source, row.window, f"{row.floored:.3f}", row.floor, row.floor_and_bounds]
            for row in report.floor
        ],
    )
    yield _table(
        "Theorem 4.3: gradients of the self and the cross part of hacpo_loss",
        [
            "agents",
            "band",
            "cosine, self and cross",
            "inner product × 1000",
            "positive seeds",
            "with ∇ success",
            "with ∇ log success",
            "live A > 0",
            "live A < 0",
        ],
        [
            [
                row.pair,
                row.band,
                row.cosine,
                Estimate(1000 * row.inner.mean, 1000 * row.inner.se),
                f"{row.positive:.2f}",
                row.ascent,
                row.log_ascent,
                f"{row.live_positive:.2f}",
                f"{row.live_negative:.2f}",
            ]
            for row in report.alignments
        ],
    )


def _table(title: str, columns: list[str], rows: Sequence[Sequence[object]]) -> Table:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    return table


def plot(report: Report, path: Path) -> None:
    """A figure of both theorems, in the format that the file's name says."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Text as text, and names of elements that do not change from run to run.
    mpl.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "theory", "font.size": 9})
    from matplotlib import pyplot

    figure, (window, rules, gradients) = pyplot.subplots(1, 3, figsize=(13, 3.6), layout="constrained")
    for rollouts in STEP_SIZES:
        rows = [row for row in report.estimated_ratio if (row.rollouts, row.drift) == (rollouts, 0)]
        window.plot([row.window for row in rows], [row.rmse for row in rows], marker="o", label=f"{rollouts}")
    window.set(
        xscale="log",
        yscale="log",
        ylim=(2e-3, 0.6),
        xlabel="window K, steps",
        title="Error of the baseline, estimated ratio",
    )
    window.set_xticks(WINDOWS, [str(each) for each in WINDOWS])
    window.legend(title="rollouts a step", loc="upper right", ncols=2)

    strong = [row for row in report.rules if row.learner == STRONG]
    for name in ("bounds", "guard", "all_rules", "naive"):
        estimates: list[Estimate] = [getattr(row, name) for row in strong]
        rules.errorbar(
            GAPS,
            [each.mean for each in estimates],
            [each.se for each in estimates],
            marker="o",
            label={"all_rules": "all rules", "naive": "pooled mean"}.get(name, name),
        )
    rules.axhline(0, color="grey", linewidth=0.5)
    rules.set(xscale="log", xlabel="P learner / P source", title=f"Bias of the baseline, P learner = {STRONG}")
    rules.set_xticks(GAPS, [str(each) for each in GAPS])
    rules.legend()

    for band in BANDS:
        for distance, style in ((0.1, ":"), (0.3, "--"), (1.0, "-")):
            points = [
                row
                for row in report.alignments
                if (row.band, row.pair.distance, row.pair.verified) == (band, distance, 1)
            ]
            gradients.errorbar(
                [row.pair.source / row.pair.learner for row in points],
                [row.cosine.mean for row in points],
                [row.cosine.se for row in points],
                marker="o",
                linestyle=style,
                color=f"C{list(BANDS).index(band)}",
                label=f"{band}, {distance}",
            )
    gradients.axhline(0, color="grey", linewidth=0.5)
    gradients.set(xscale="log", xlabel="P source / P learner", title="Cosine of self and cross gradient")
    gradients.set_xticks([0.25, 1, 2], ["1/4", "1", "2"])
    gradients.legend(title="band, distance", loc="center left", bbox_to_anchor=(1, 0.5))
    for axes in (window, gradients):
        axes.minorticks_off()
    rules.minorticks_off()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def main(
    seed: Annotated[int, typer.Option(help="Of all draws.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Folder for theory.json, all figures.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="File for a figure, .svg or .png.")] = None,
) -> None:
    """Simulates theorems 4.1 and 4.3 of HACPO, and prints what holds."""
    torch.set_num_threads(1)
    report = run(seed)
    console = Console()
    for table in tables(report):
        console.print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        (out / "theory.json").write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    if plot_file is not None:
        plot(report, plot_file)


if __name__ == "__main__":
    app()
