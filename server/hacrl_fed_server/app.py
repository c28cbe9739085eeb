"""The run as a Flower ServerApp: evaluate, train block by block, evaluate. It runs on any engine that gives it a Grid."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from hacrl_fed.config import RunConfig
from hacrl_fed.errors import HacrlFedError

_log = logging.getLogger(__name__)

_POLL_S = 0.1


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

    Raises HacrlFedError where fewer than ``min_agents`` are there for ``pause_s``.
    """
    done: set[int] = set()
    ordered: dict[str, int] = {}
    enough_at = time.monotonic()
    while True:
        nodes = set(grid.get_node_ids())
        for node in sorted(nodes - done - set(ordered.values())):
            content = RecordDict({"config": ConfigRecord(dict(stage.config))})
            message = grid.create_message(content, stage.message_type, node, group_id=_group(stage))
            for message_id in grid.push_messages([message]):
                ordered[message_id] = node
        for reply in grid.pull_messages(list(ordered)):
            node = ordered.pop(reply.metadata.reply_to_message_id)
            if reply.has_error():
                _log.warning("%s: %s", _group(stage), reply.error.reason)
            else:
                done.add(node)
        if len(done) >= run.min_agents and nodes <= done:
            return
        now = time.monotonic()
        if len(nodes | done) >= run.min_agents:
            enough_at = now
        elif now - enough_at > run.deadlines.pause_s:
            raise HacrlFedError(
                f"fewer than min_agents = {run.min_agents} agents were there for {run.deadlines.pause_s:.0f} s"
                " (deadlines.pause_s); run the same command to resume"
            )
        time.sleep(_POLL_S)


def _group(stage: Stage) -> str:
    return " ".join([stage.message_type, *(f"{key}={value}" for key, value in stage.config.items())])
