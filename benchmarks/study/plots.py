"""A plot a regime: held-out accuracy against own rollouts, mean over seeds with 95 % intervals."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

import matplotlib

matplotlib.use("Agg")  # no window

from matplotlib import pyplot

from study.outcomes import Outcome
from study.regimes import Regime
from study.statistics import estimate


def plot_regime(regime: Regime, outcomes: Mapping[str, Mapping[int, Outcome]], file: Path) -> None:
    """One panel with the mean over the reported agents, or one for each where their rollouts differ in number."""
    together = all(_alike(list(one.curves.values())) for seeds in outcomes.values() for one in seeds.values())
    panels = [regime.reported] if together else [(name,) for name in regime.reported]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.4 * len(panels), 4.2), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, names in zip(axes[0], panels, strict=True):
        for number, (variant, seeds) in enumerate(outcomes.items()):
            xs = [point["own_rollouts"] for point in next(iter(seeds.values())).curves[names[0]]]
            heights = [
                estimate([fmean(one.curves[name][index]["greedy"] for name in names) for one in seeds.values()])
                for index in range(len(xs))
            ]
            means = [height.mean for height in heights]
            colour = f"C{number}"
            axis.plot(xs, means, label=variant, color=colour, marker=".")
            if all(height.half_width is not None for height in heights):
                halves = [height.half_width or 0.0 for height in heights]
                low = [mean - half for mean, half in zip(means, halves, strict=True)]
                high = [mean + half for mean, half in zip(means, halves, strict=True)]
                axis.fill_between(xs, low, high, color=colour, alpha=0.12, linewidth=0)
        axis.set_xlabel("own rollouts an agent")
        axis.set_ylim(0, 1.02)
        axis.grid(alpha=0.3)
        axis.set_title(
            f"{regime.name}, mean of {' and '.join(names)}" if len(names) > 1 else f"{regime.name}, {names[0]}"
        )
    axes[0][0].set_ylabel("held-out accuracy, greedy")
    axes[0][-1].legend(fontsize="small")
    figure.savefig(file, dpi=100)
    pyplot.close(figure)


def _alike(curves: Sequence[Sequence[Mapping[str, float]]]) -> bool:
    grids = {tuple(point["own_rollouts"] for point in curve) for curve in curves}
    return len(grids) == 1
