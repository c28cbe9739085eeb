"""A study: all units of regimes, variants and seeds, run where they are missing, and what they come to."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from study.outcomes import Outcome, outcome
from study.regimes import Regime
from study.units import Plan, Training, load_result, trainings
from study.variants import Variant, learning_rate
from study.workers import run_missing


def outcomes_of(
    regimes: Sequence[Regime],
    variants: Sequence[Variant],
    seeds: Sequence[int],
    plan: Plan,
    out: Path,
    workers: int,
    console: Console,
) -> dict[str, dict[str, dict[int, Outcome]]]:
    """Outcomes by regime, variant and seed. Raises HacrlFedError for a unit that fails."""
    planned = {
        (regime.name, variant.name, seed): trainings(regime, variant, learning_rate(variant), seed, plan)
        for regime in regimes
        for variant in variants
        for seed in seeds
    }
    run_missing([unit for runs in planned.values() for unit in runs.values()], out, workers, console)
    return {
        regime.name: {
            variant.name: {seed: outcome_of(regime, planned[regime.name, variant.name, seed], out) for seed in seeds}
            for variant in variants
        }
        for regime in regimes
    }


def outcome_of(regime: Regime, runs: dict[str, Training], out: Path) -> Outcome:
    """What a regime's runs, by reported seat, came to; all of them must have been run."""
    results = {}
    for name, unit in runs.items():
        result = load_result(out, unit)
        assert result is not None, unit.title
        results[name] = result
    return outcome(regime, runs, results)
