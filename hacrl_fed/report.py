"""How the agents of a run do: accuracy, rollouts, traffic, learning curves, and what they learn from each other.

Reads the agents' metrics and, once there is one, the summary; so it also works on a run that goes on, or was stopped.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hacrl_fed.inspection import read_egress
from hacrl_fed.run_folder import Run, read_json_lines

_CURVE_WIDTH = 40
_BARS = "▁▂▃▄▅▆▇█"
# Start, middle and end are means over this share of the steps: single ones are noisy.
_WINDOW_SHARE = 10
_NONE = "-"
_LATER = "accuracy, refusals and bytes received come with its summary"


@dataclass(frozen=True, slots=True)
class AgentRecord:
    """What a site has written: its metrics by step (the newest where a step was done again), and its summary if any."""

    name: str
    steps: dict[int, dict[str, Any]]
    summary: dict[str, Any]
    egress_bytes: int

    def series(self, metric: str) -> list[float]:
        """A metric's values in the order of the steps, those left out that lack it."""
        return [line[metric] for line in self.steps.values() if metric in line]

    def count(self, name: str) -> int:
        """A sum over all steps of a count that is a metric and in the summary."""
        return int(self.summary.get(name, sum(self.series(name))))


def read_agent(name: str, folder: Path, summary: Mapping[str, Any]) -> AgentRecord:
    """``summary``: the run's, which may be empty."""
    by_step = {line["step"]: line for line in read_json_lines(folder / "metrics.jsonl")}
    own = summary.get("agents", {}).get(name, {})
    return AgentRecord(name, dict(sorted(by_step.items())), own, read_egress(folder).total.bytes)


def render_run(run: Run) -> RenderableType:
    """A run's agents, in tables of at most 80 columns."""
    agents = [read_agent(name, folder, run.summary) for name, folder in run.agents.items()]
    state = (
        f"{run.summary['steps']} steps in {run.summary['wall_s']:.0f} s" if run.summary else f"not complete; {_LATER}"
    )
    title = Text.assemble((run.method or "run", "bold"), f": {state}")
    agents = [agent for agent in agents if agent.steps]
    if not agents:
        return Group(title, "no agent has done a step yet", "")
    parts = [_results(agents), _refusals(agents), _curves(agents), _sharing(agents), _costs(agents)]
    spaced = itertools.chain.from_iterable((part, "") for part in parts if part is not None)
    return Group(title, "", *spaced)


def sparkline(values: Sequence[float], top: float) -> str:
    """Bars from 0 to ``top``, at most 40: each the mean of as many consecutive values as it stands for."""
    bins = min(len(values), _CURVE_WIDTH)
    edges = [index * len(values) // bins for index in range(bins + 1)] if bins else []
    means = [statistics.fmean(values[low:high]) for low, high in itertools.pairwise(edges)]
    return "".join(_BARS[min(len(_BARS) - 1, max(0, int(mean / top * len(_BARS))))] for mean in means)


def start_middle_end(values: Sequence[float]) -> tuple[float, float, float]:
    """Means over the first, the middle and the last tenth of the values, at least one each."""
    width = max(1, len(values) // _WINDOW_SHARE)
    middle = (len(values) - width) // 2
    windows = values[:width], values[middle : middle + width], values[-width:]
    return statistics.fmean(windows[0]), statistics.fmean(windows[1]), statistics.fmean(windows[2])


def _results(agents: Sequence[AgentRecord]) -> RenderableType:
    table = _table("agent", "steps", "greedy", "sampled", "own", "cross")
    for agent in agents:
        table.add_row(
            agent.name,
            str(len(agent.steps)),
            _change(agent.summary, "greedy"),
            _change(agent.summary, "sampled"),
            f"{agent.count('own_rollouts'):,}",
            f"{agent.count('cross_rollouts'):,}",
        )
    note = "greedy, sampled: held-out accuracy before → after; own, cross: rollouts used"
    return Group(table, Text(note, style="dim"))


def _change(summary: Mapping[str, Any], mode: str) -> str:
    before, after = (summary.get(when, {}).get(mode) for when in ("before", "after"))
    return _NONE if before is None or after is None else f"{before:.3f} → {after:.3f}"


def _refusals(agents: Sequence[AgentRecord]) -> Table | None:
    table = _table("agent", "refused from", "reason", "times")
    table.columns[1].justify = table.columns[2].justify = "left"
    for agent in agents:
        for source, reasons in sorted(agent.summary.get("refused_by_agent", {}).items()):
            for reason, times in sorted(reasons.items()):
                table.add_row(agent.name, source, reason, f"{times:,}")
    return table if table.row_count else None


def _curves(agents: Sequence[AgentRecord]) -> Table:
    rewards = {agent.name: agent.series("reward_mean") for agent in agents}
    top = max((value for values in rewards.values() for value in values), default=0.0) or 1.0
    table = _table("agent", "reward by step", "start", "middle", "end")
    table.columns[1].justify = "left"
    for name, values in rewards.items():
        if values:  # a site that rolled out nothing has none
            table.add_row(name, sparkline(values, top), *(f"{mean:.3f}" for mean in start_middle_end(values)))
    return table


def _sharing(agents: Sequence[AgentRecord]) -> Table | None:
    """Capability ratios, and the shares of cross rollouts that carried gradient, from each source to each learner."""
    table = _table("learner ← source", "", "start", "middle", "end")
    for agent in agents:
        keys = dict.fromkeys(key for line in agent.steps.values() for key in line)
        for source in (key.removeprefix("capability_ratio/") for key in keys if key.startswith("capability_ratio/")):
            if source == agent.name:
                continue
            rows = {
                "capability ratio": (f"capability_ratio/{source}", ".2f"),
                "live, A > 0": (f"cross/{source}/live_share_positive", ".0%"),
                "live, A < 0": (f"cross/{source}/live_share_negative", ".0%"),
            }
            pair = f"{agent.name} ← {source}"
            for what, (metric, shape) in rows.items():
                values = agent.series(metric)
                shown = [format(value, shape) for value in start_middle_end(values)] if values else [_NONE] * 3
                table.add_row(pair, what, *shown)
                pair = ""
    table.columns[1].justify = "left"
    return table if table.row_count else None


def _costs(agents: Sequence[AgentRecord]) -> RenderableType:
    table = _table("agent", "sent", "received", "seconds a step", "rollout", "update")
    for agent in agents:
        received = agent.summary.get("ingress_bytes")
        rollout, update = (statistics.fmean(agent.series(name)) for name in ("rollout_s", "update_s"))
        table.add_row(
            agent.name,
            decimal(agent.egress_bytes),
            _NONE if received is None else decimal(received),
            *(f"{seconds:.2f}" for seconds in (rollout + update, rollout, update)),
        )
    return Group(table, Text("rollout: generating, and waiting for the others", style="dim"))


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in others:
        table.add_column(column, justify="right", no_wrap=True)
    return table
