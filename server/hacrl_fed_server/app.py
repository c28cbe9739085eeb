"""The run as a Flower ServerApp: evaluate, train block by block, evaluate. It runs on any engine that gives it a Grid."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from hacrl_fed.config import RunConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import flower
from hacrl_fed.status import printable

_log = logging.getLogger(__name__)

_POLL_S = 0.1
_MOST_ERRORS = 3


@dataclass(frozen=True, slots=True)
class Stage:
    """One message to every agent. An order says where to be afterwards, so it can be given again without harm."""

    message_type: str
    config: dict[str, int | str]


def stages(run: RunConfig, resumed_at: int | None = None) -> Iterator[Stage]:
    """The run's stages in order; of a run that is resumed, from the block of its open step ``resumed_at`` on.

    Orders of earlier stages would never be answered by a site that is still in that block and waits there for the
    rollouts of another, which would be led no further before. Every site makes up by itself for what it lacks.
    """
    if run.evaluation.prompts and resumed_at is None:
        yield Stage("evaluate", {"when": "before"})
    for start in range(0, run.steps, run.block_steps):
        until_step = min(start + run.block_steps, run.steps)
        if resumed_at is None or until_step > resumed_at or until_step == run.steps:
            yield Stage("train.block", {"until_step": until_step})
    if run.evaluation.prompts:
        yield Stage("evaluate", {"when": "after"})


def build_server_app(run: RunConfig, resumed_at: int | None = None) -> ServerApp:
    """The ServerApp of a run, or of one that is resumed at an open step. Its settings come by closure: Flower's simulation
    engine passes none.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        for stage in stages(run, resumed_at):
            run_stage(grid, stage, run)

    return app


def run_stage(grid: Grid, stage: Stage, run: RunConfig) -> None:
    """Gives the stage's order to every agent, also to those that come later, until all that are there have followed it.

    An agent that has not followed it after the stage's time (``_stage_s``), or answers it with errors, is left behind.
    Raises HacrlFedError where fewer than ``min_agents`` are there for ``pause_s``.
    """
    done: set[int] = set()
    left_behind: set[int] = set()
    errors: Counter[int] = Counter()
    ordered: dict[str, int] = {}
    now = time.monotonic()
    running_s, enough_at = 0.0, now + run.deadlines.join_s
    while True:
        nodes = set(grid.get_node_ids()) - left_behind
        for node in sorted(nodes - done - set(ordered.values())):
            content = RecordDict({"config": ConfigRecord(dict(stage.config))})
            message = grid.create_message(content, stage.message_type, node, group_id=_group(stage))
            for message_id in grid.push_messages([message]):
                ordered[message_id] = node
        for reply in grid.pull_messages(list(ordered)):
            node = ordered.pop(reply.metadata.reply_to_message_id)
            if not reply.has_error():
                done.add(node)
                continue
            _log.warning("%s: %s", _group(stage), printable(reply.error.reason or "")[:200])
            errors[node] += reply.error.code != flower.AWAY
            if errors[node] >= _MOST_ERRORS:
                left_behind.add(node)
        if len(done) >= run.min_agents and nodes <= done:
            return
        before, now = now, time.monotonic()
        if len(nodes | done) >= run.min_agents:
            running_s += now - before
            enough_at = max(enough_at, now)
        elif now - enough_at > run.deadlines.pause_s:
            raise HacrlFedError(
                f"fewer than min_agents = {run.min_agents} agents were there for {run.deadlines.pause_s:.0f} s"
                " (deadlines.pause_s); run the same command to resume"
            )
        if running_s > _stage_s(stage, run):
            _log.warning("%s: no answer from %d agents in %.0f s", _group(stage), len(nodes - done), running_s)
            left_behind |= nodes - done
        time.sleep(_POLL_S)


def _stage_s(stage: Stage, run: RunConfig) -> float:
    """Seconds that a stage may take while enough agents are there: two deadlines a step, the second for the updates."""
    return run.deadlines.join_s + 2 * run.deadlines.step_s * (run.block_steps if "until_step" in stage.config else 1)


def _group(stage: Stage) -> str:
    return " ".join([stage.message_type, *(f"{key}={value}" for key, value in stage.config.items())])
