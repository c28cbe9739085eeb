"""CoordinatorGrid as Flower's Grid: what a ServerApp may rely on."""

import inspect
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app import DEFAULT_TTL, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.run import Run

from federation import RUN, TASK, Coordinator, eventually, run_config
from hacrl_fed.protocol import flower
from hacrl_fed.v1 import session_pb2
from hacrl_fed_server.grid import CoordinatorGrid

ALPHA, BETA = flower.node_id("alpha"), flower.node_id("beta")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[Coordinator]:
    coordinator = Coordinator(tmp_path, run_config(), "alpha", "beta")
    coordinator.join("alpha")
    coordinator.join("beta")
    yield coordinator
    coordinator.ledger.close()


@pytest.fixture
def grid(coordinator: Coordinator) -> CoordinatorGrid:
    return CoordinatorGrid(coordinator.roster, coordinator.sessions, lambda: None)


def order(grid: Grid, node: int, until_step: int = 1, ttl: float | None = None) -> Message:
    content = RecordDict({"config": ConfigRecord({"until_step": until_step})})
    return grid.create_message(content, "train.block", node, "a group", ttl)


def answer(coordinator: Coordinator, agent: str, message_id: str, score: float = 0.5) -> None:
    reply = session_pb2.FlowerMessage(
        message_id="r",
        reply_to_message_id=message_id,
        message_type="train.block",
        group_id="a group",
        created_at=1.0,
        ttl=9.0,
        metrics={"score": session_pb2.Scalar(number=score)},
    )
    coordinator.sessions.reply(agent, 1, reply)


def test_every_method_has_the_signature_that_flower_declares(grid: CoordinatorGrid) -> None:
    assert isinstance(grid, Grid)
    for name in Grid.__abstractmethods__ - {"run"}:
        ours, flowers = (inspect.signature(getattr(kind, name)).parameters for kind in (CoordinatorGrid, Grid))
        assert [(p.name, p.kind, p.default) for p in ours.values()] == [
            (p.name, p.kind, p.default) for p in flowers.values()
        ], name


def test_the_run_is_the_rosters_until_it_is_set(grid: CoordinatorGrid) -> None:
    assert grid.run.run_id == flower.run_id(RUN)
    grid.set_run(Run.create_empty(7))
    assert grid.run.run_id == 7
    assert order(grid, ALPHA).metadata.run_id == 7


def test_a_message_is_from_the_server_to_a_node(grid: CoordinatorGrid) -> None:
    message = order(grid, ALPHA)
    metadata = message.metadata
    assert (metadata.src_node_id, metadata.dst_node_id) == (flower.SERVER_NODE_ID, ALPHA)
    assert (metadata.message_type, metadata.group_id, metadata.ttl) == ("train.block", "a group", DEFAULT_TTL)
    assert message.content.config_records["config"]["until_step"] == 1
    assert order(grid, ALPHA, ttl=5.0).metadata.ttl == 5.0


def test_nodes_are_the_agents_that_are_there_or_expected_back(coordinator: Coordinator, grid: CoordinatorGrid) -> None:
    assert set(grid.get_node_ids()) == {ALPHA, BETA}
    assert {node.node_id for node in grid.get_nodes()} == {ALPHA, BETA}
    coordinator.barrier.lost("beta", now=-1e9)
    assert list(grid.get_node_ids()) == [ALPHA]


def test_what_went_wrong_meanwhile_is_raised_when_nodes_are_asked_for(coordinator: Coordinator) -> None:
    def check() -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        CoordinatorGrid(coordinator.roster, coordinator.sessions, check).get_node_ids()


def test_messages_get_ids_in_order_and_each_reply_is_given_out_once(
    coordinator: Coordinator, grid: CoordinatorGrid
) -> None:
    of_alpha, of_beta = grid.push_messages([order(grid, ALPHA), order(grid, BETA)])
    assert of_alpha != of_beta
    assert list(grid.pull_messages([of_alpha, of_beta])) == []
    answer(coordinator, "beta", of_beta, score=0.25)
    answer(coordinator, "alpha", of_alpha)
    [reply] = grid.pull_messages([of_beta])
    assert reply.metadata.reply_to_message_id == of_beta
    assert (reply.metadata.src_node_id, reply.metadata.dst_node_id) == (BETA, flower.SERVER_NODE_ID)
    assert reply.content.metric_records["metrics"]["score"] == 0.25
    [reply] = grid.pull_messages([of_alpha, of_beta])
    assert reply.metadata.src_node_id == ALPHA
    assert list(grid.pull_messages([of_alpha, of_beta])) == []


def test_an_agent_that_stays_away_answers_with_an_error(coordinator: Coordinator, grid: CoordinatorGrid) -> None:
    [message_id] = grid.push_messages([order(grid, BETA)])
    coordinator.barrier.lost("beta", now=-1e9)
    coordinator.expire(0.0)
    [reply] = grid.pull_messages([message_id])
    assert reply.has_error()
    assert (reply.error.code, reply.error.reason) == (flower.AWAY, "agent beta is away")
    assert reply.metadata.src_node_id == BETA


def test_a_node_outside_the_roster_is_an_error(grid: CoordinatorGrid) -> None:
    with pytest.raises(KeyError):
        list(grid.push_messages([order(grid, 12345)]))


def test_content_that_could_carry_a_weight_does_not_leave(grid: CoordinatorGrid) -> None:
    content = RecordDict({"config": ConfigRecord({"weights": [0.5, 0.25]})})
    with pytest.raises(ValueError, match="'weights' must be a number"):
        list(grid.push_messages([grid.create_message(content, "train.block", ALPHA, "")]))


def test_send_and_receive_waits_for_all_replies(coordinator: Coordinator, grid: CoordinatorGrid) -> None:
    got: list[Message] = []
    messages = [order(grid, ALPHA), order(grid, BETA)]
    waiting = threading.Thread(target=lambda: got.extend(grid.send_and_receive(messages)))
    waiting.start()
    orders = coordinator.sessions._sessions
    eventually(lambda: bool(orders["alpha"].orders and orders["beta"].orders))
    for agent in ("alpha", "beta"):
        [message_id] = orders[agent].orders
        answer(coordinator, agent, message_id)
    waiting.join()
    assert {reply.metadata.src_node_id for reply in got} == {ALPHA, BETA}


def test_send_and_receive_returns_what_came_in_time(coordinator: Coordinator, grid: CoordinatorGrid) -> None:
    assert TASK.digest == coordinator.ledger.meta("task_digest")
    assert list(grid.send_and_receive([order(grid, ALPHA)], timeout=0.05)) == []
    # The order stands: its reply can still be pulled.
    [message_id] = coordinator.sessions._sessions["alpha"].orders
    answer(coordinator, "alpha", message_id)
    [reply] = grid.pull_messages([message_id])
    assert reply.metadata.src_node_id == ALPHA
