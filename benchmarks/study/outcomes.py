"""From units' results to what a regime comes to: per seed, over seeds, and in paired differences."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from study.regimes import Regime
from study.statistics import Estimate, estimate, mean_height, paired_difference
from study.units import ALONE, Training

# What a table shows of a method, in its order; those beside "final" and "auc" are None where nothing is shared.
MEASURES = (
    *("final", "final_sampled", "auc", "auc_same_rollouts", "drop", "own_rollouts"),
    *("live_share_positive", "median_ratio", "median_rewarded_ratio", "left_out"),
)
# Opponents, and what methods are compared with them in.
COMPARED_IN = {"gspo_x2": ("final", "auc", "auc_same_rollouts"), "naive": ("final", "auc")}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one seed of a variant came to.

    Attributes:
        mean: each of ``MEASURES``, over the reported agents.
        agents: the same of each.
        curves: of each, its points: step, own_rollouts, greedy.
    """

    mean: Mapping[str, float | None]
    agents: Mapping[str, Mapping[str, float | None]]
    curves: Mapping[str, Sequence[Mapping[str, float]]]


def outcome(regime: Regime, runs: Mapping[str, Training], results: Mapping[str, dict[str, Any]]) -> Outcome:
    """Of a regime's runs and their results, both by reported seat."""
    agents, curves = {}, {}
    for name in regime.reported:
        result = results[name]["agents"][name if name in runs[name].reported else ALONE]
        agents[name] = _measures(result, runs[name].rollouts_factor)
        curves[name] = result["curve"]
    return Outcome({measure: _mean([agents[name][measure] for name in agents]) for measure in MEASURES}, agents, curves)


def _measures(result: Mapping[str, Any], rollouts_factor: int) -> dict[str, float | None]:
    curve = result["curve"]
    greedy = [point["greedy"] for point in curve]
    rollouts = [point["own_rollouts"] for point in curve]
    return {
        "final": result["final"]["greedy"],
        "final_sampled": result["final"]["sampled"],
        "auc": mean_height(rollouts, greedy, rollouts[-1]),
        # Up to as many rollouts as a method spends that does not draw more of them.
        "auc_same_rollouts": mean_height(rollouts, greedy, rollouts[-1] / rollouts_factor),
        "drop": max(greedy) - greedy[-1],
        "own_rollouts": rollouts[-1],
        "live_share_positive": result["live_share_positive"],
        "median_ratio": result["median_ratio"],
        "median_rewarded_ratio": result["median_rewarded_ratio"],
        "left_out": result["left_out"],
    }


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def over_seeds(outcomes: Mapping[int, Outcome], measure: str, agent: str | None = None) -> Estimate | None:
    """A measure's mean over seeds, of the regime or of one agent; None where no seed has it."""
    values = by_seed(outcomes, measure, agent)
    return estimate(list(values.values())) if values else None


def by_seed(outcomes: Mapping[int, Outcome], measure: str, agent: str | None = None) -> dict[int, float]:
    found = {}
    for seed, one in outcomes.items():
        value = (one.mean if agent is None else one.agents[agent])[measure]
        if value is not None:
            found[seed] = value
    return found


def difference(
    outcomes: Mapping[str, Mapping[int, Outcome]], variant: str, opponent: str, measure: str
) -> Estimate | None:
    """Paired by seed, variant - opponent; None where the opponent was not run, or is the variant."""
    if opponent not in outcomes or opponent == variant:
        return None
    return paired_difference(by_seed(outcomes[variant], measure), by_seed(outcomes[opponent], measure))
