"""What people and programs read of the study: tables, and one JSON of all results."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from typing import Any

from rich.console import Console
from rich.table import Table

from study.outcomes import COMPARED_IN, MEASURES, Outcome, by_seed, difference, over_seeds
from study.regimes import Regime
from study.statistics import Estimate
from study.units import Plan
from study.variants import Variant, learning_rate

# Of a regime, by variant and seed.
Outcomes = Mapping[str, Mapping[int, Outcome]]

_HEADINGS = {
    "final": "final greedy",
    "final_sampled": "final sampled",
    "auc": "AUC",
    "auc_same_rollouts": "AUC, same rollouts",
    "drop": "drop from peak",
    "own_rollouts": "own rollouts",
    "live_share_positive": "live A > 0",
    "median_ratio": "median s",
    "median_rewarded_ratio": "rewarded",
    "left_out": "left out",
}


def print_regime(regime: Regime, outcomes: Outcomes, console: Console) -> None:
    """A table of the methods, of the agents where there are several, and of the paired differences."""
    console.print()
    console.print(f"[bold]{regime.name}[/bold]: {regime.tests}", soft_wrap=True)
    if any(len(seeds) < 2 for seeds in outcomes.values()):
        console.print("one seed: no intervals")
    _print_methods(regime, outcomes, console)
    _print_differences(outcomes, console)


def _print_methods(regime: Regime, outcomes: Outcomes, console: Console) -> None:
    several = len(regime.reported) > 1
    table = Table(
        "method",
        *(_HEADINGS[measure] for measure in MEASURES),
        *((f"{name} final" for name in regime.reported) if several else ()),
        title="means over seeds ± 95 % interval",
        title_justify="left",
    )
    for variant, seeds in outcomes.items():
        cells = [_cell(over_seeds(seeds, measure), 0 if measure == "own_rollouts" else 3) for measure in MEASURES]
        own = [_cell(over_seeds(seeds, "final", name), 3) for name in regime.reported] if several else []
        table.add_row(variant, *cells, *own)
    console.print(table)


def _print_differences(outcomes: Outcomes, console: Console) -> None:
    columns = _comparisons(outcomes)
    if not columns:
        return
    table = Table(
        "method",
        *(f"{_HEADINGS[measure]} - {opponent}" for opponent, measure in columns),
        title="differences paired by seed ± 95 % interval; * where it leaves out 0",
        title_justify="left",
    )
    for variant in outcomes:
        found = [difference(outcomes, variant, opponent, measure) for opponent, measure in columns]
        table.add_row(variant, *(_cell(each, 3, signed=True) for each in found))
    console.print(table)


def _comparisons(outcomes: Outcomes) -> list[tuple[str, str]]:
    """Opponents that were run, and the measures in which they are compared with."""
    return [
        (opponent, measure) for opponent in COMPARED_IN if opponent in outcomes for measure in COMPARED_IN[opponent]
    ]


def _cell(value: Estimate | None, digits: int, *, signed: bool = False) -> str:
    if value is None:
        return ""
    text = f"{value.mean:{'+' if signed else ''}.{digits}f}"
    if value.half_width is not None and digits:
        text += f" ± {value.half_width:.{digits}f}"
    return text + (" *" if signed and value.differs_from_zero else "")


def as_markdown(regimes: Sequence[Regime], outcomes: Mapping[str, Outcomes]) -> str:
    """The same tables for a document: the first variant's differences in all regimes, then a section a regime."""
    sections = [line for regime in regimes for line in _section(regime, outcomes[regime.name])]
    return "\n".join([*_summary(regimes, outcomes), *sections])


def _summary(regimes: Sequence[Regime], outcomes: Mapping[str, Outcomes]) -> list[str]:
    first = next(iter(outcomes[regimes[0].name]))
    columns = _comparisons(outcomes[regimes[0].name])
    rows = []
    for regime in regimes:
        of_regime = outcomes[regime.name]
        finals = [
            _cell(over_seeds(of_regime[variant], "final"), 2)
            for variant in (first, *COMPARED_IN)
            if variant in of_regime
        ]
        rows.append([f"[{regime.name}](#{regime.name})", *finals, *_differences(of_regime, first, columns)])
    opponents = [opponent for opponent in COMPARED_IN if opponent in outcomes[regimes[0].name]]
    headings = ["regime", *(f"{variant}, final" for variant in (first, *opponents)), *_versus(columns)]
    return [*_table(headings, rows), ""]


def _section(regime: Regime, outcomes: Outcomes) -> list[str]:
    columns = _comparisons(outcomes)
    measured = [
        [variant, *(_cell(over_seeds(seeds, measure), 0 if measure == "own_rollouts" else 2) for measure in MEASURES)]
        for variant, seeds in outcomes.items()
    ]
    compared = [[variant, *_differences(outcomes, variant, columns)] for variant in outcomes]
    return [
        f"### {regime.name}",
        "",
        f"{regime.tests[0].upper()}{regime.tests[1:]}.".replace("?.", "?"),
        "",
        *_table(["method", *_HEADINGS.values()], measured),
        "",
        *([*_table(["method", *_versus(columns)], compared), ""] if columns else []),
        f"![{regime.name}](evidence/{regime.name}.png)",
        "",
    ]


def _versus(columns: Sequence[tuple[str, str]]) -> list[str]:
    return [f"{_HEADINGS[measure]} - {opponent}" for opponent, measure in columns]


def _differences(outcomes: Outcomes, variant: str, columns: Sequence[tuple[str, str]]) -> list[str]:
    return [_cell(difference(outcomes, variant, *column), 2, signed=True) for column in columns]


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in (headings, ["---"] * len(headings), *rows)]


def as_json(
    regimes: Sequence[Regime], variants: Sequence[Variant], plan: Plan, outcomes: Mapping[str, Outcomes]
) -> dict[str, Any]:
    """All of it, by regime and variant, with what it depends on."""
    return {
        "plan": asdict(plan),
        "learning_rates": {variant.name: learning_rate(variant) for variant in variants},
        "versions": {name: version(name) for name in ("torch", "transformers", "tokenizers")},
        "regimes": {
            regime.name: {"tests": regime.tests, "variants": _variants(outcomes[regime.name])} for regime in regimes
        },
    }


def _variants(outcomes: Outcomes) -> dict[str, Any]:
    return {
        variant: {
            "mean": {measure: _estimate(over_seeds(seeds, measure)) for measure in MEASURES},
            "difference": {
                opponent: {measure: _estimate(difference(outcomes, variant, opponent, measure)) for measure in measures}
                for opponent, measures in COMPARED_IN.items()
            },
            "by_seed": {measure: by_seed(seeds, measure) for measure in MEASURES},
            "seeds": {str(seed): asdict(one) for seed, one in seeds.items()},
        }
        for variant, seeds in outcomes.items()
    }


def _estimate(value: Estimate | None) -> dict[str, Any] | None:
    return None if value is None else asdict(value)
