"""Sessions over a real server: joining, orders and replies, and how a site that is gone is found out."""

import contextlib
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import grpc
import pytest

from federation import TASK, WAIT_S, Coordinator, Served, eventually, run_config, serving
from hacrl_fed.config import RunConfig
from hacrl_fed.errors import HacrlFedError, RefusedError
from hacrl_fed.protocol import digests
from hacrl_fed.status import AgentStatus, RunStatus
from hacrl_fed.v1 import exchange_pb2, exchange_pb2_grpc, session_pb2, session_pb2_grpc

OTHER = digests.sha256_hex(b"other")


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    coordinator = Coordinator(tmp_path, run_config(), "alpha", "beta")
    with serving(coordinator, tmp_path) as served:
        yield served


@contextlib.contextmanager
def stub_of(served: Served, agent: str = "alpha", incarnation: int = 1) -> Iterator[session_pb2_grpc.SessionStub]:
    with served.channel(agent, incarnation) as channel:
        yield session_pb2_grpc.SessionStub(channel)


def join(stub: session_pb2_grpc.SessionStub, instance: str = "first", task_digest: str = TASK.digest) -> int:
    request = session_pb2.JoinRequest(task_digest=task_digest, instance_id=instance)
    return int(stub.Join(request, timeout=10).incarnation)


def attend(stub: session_pb2_grpc.SessionStub) -> Iterator[session_pb2.SessionEvent]:
    events: Iterator[session_pb2.SessionEvent] = stub.Attend(session_pb2.AttendRequest(), timeout=WAIT_S)
    return events


def order(until_step: int = 1) -> session_pb2.FlowerMessage:
    config = {"until_step": session_pb2.Scalar(integer=until_step)}
    return session_pb2.FlowerMessage(message_type="train.block", group_id="g", ttl=60.0, created_at=1.0, config=config)


def reply_to(message: session_pb2.FlowerMessage, score: float = 0.5) -> session_pb2.FlowerMessage:
    return session_pb2.FlowerMessage(
        message_id="reply",
        reply_to_message_id=message.message_id,
        message_type=message.message_type,
        group_id=message.group_id,
        ttl=60.0,
        created_at=2.0,
        metrics={"score": session_pb2.Scalar(number=score)},
    )


def next_order(events: Iterator[session_pb2.SessionEvent]) -> session_pb2.FlowerMessage:
    return next(event.order for event in events if event.WhichOneof("event") == "order")


@contextlib.contextmanager
def refused(code: grpc.StatusCode, sentence: str) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as refusal:
        yield
    assert refusal.value.code() is code
    assert sentence in str(refusal.value.details())


# --- joining


def test_the_run_is_given_signed_to_a_site_with_the_same_protocol_and_roster(served: Served, tmp_path: Path) -> None:
    with served.session("alpha", tmp_path / "alpha") as session:
        run, payload = session.get_run()
    assert run == served.coordinator.run
    assert RunConfig.model_validate_json(payload) == run
    with stub_of(served) as stub:
        wrong = session_pb2.GetRunRequest(protocol_version=2, roster_digest=served.coordinator.roster.digest)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "this site speaks protocol version 2, and the server 1"):
            stub.GetRun(wrong, timeout=10)
        wrong = session_pb2.GetRunRequest(protocol_version=1, roster_digest=OTHER)
        with refused(grpc.StatusCode.FAILED_PRECONDITION, "both sides need the same roster file"):
            stub.GetRun(wrong, timeout=10)


def test_joining_counts_the_processes_of_an_agent_and_says_where_the_run_is(served: Served) -> None:
    coordinator = served.coordinator
    with stub_of(served, "alpha", 0) as alpha, stub_of(served, "beta", 0) as beta:
        assert [join(alpha), join(alpha), join(beta)] == [1, 1, 1]
        author = coordinator.join("alpha")
        coordinator.exchange.publish("alpha", author.chunk(0, coordinator.genesis, final=True))
        response = alpha.Join(session_pb2.JoinRequest(task_digest=TASK.digest, instance_id="second"), timeout=10)
        assert (response.incarnation, response.open_step, response.open_step_finished) == (2, 0, True)
        response = beta.Join(session_pb2.JoinRequest(task_digest=TASK.digest, instance_id="first"), timeout=10)
        assert (response.incarnation, response.open_step, response.open_step_finished) == (1, 0, False)


def test_the_first_to_join_pins_the_task(served: Served) -> None:
    with stub_of(served, "alpha", 0) as alpha, stub_of(served, "beta", 0) as beta:
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "task_digest must be a SHA-256"):
            join(alpha, task_digest="?")
        join(alpha)
        pinned = (
            f"task sums differs: this site's digest is {OTHER}, and the run's {TASK.digest}, which agent alpha brought"
        )
        with refused(grpc.StatusCode.FAILED_PRECONDITION, pinned):
            join(beta, task_digest=OTHER)
        assert served.coordinator.ledger.incarnation("beta") == 0


def test_a_task_that_the_run_pins_is_the_task_of_the_first_too(tmp_path: Path) -> None:
    coordinator = Coordinator(tmp_path, run_config(task={"id": "sums", "digest": OTHER}), "alpha", "beta")
    with (
        serving(coordinator, tmp_path) as served,
        stub_of(served, "alpha", 0) as alpha,
        refused(grpc.StatusCode.FAILED_PRECONDITION, "task sums differs"),
    ):
        join(alpha)


# --- orders and replies


def test_an_order_reaches_its_agent_alone_and_its_reply_comes_back_once(served: Served) -> None:
    sessions = served.coordinator.sessions
    with stub_of(served, "alpha") as alpha, stub_of(served, "beta") as beta:
        join(alpha), join(beta)
        of_alpha, of_beta = attend(alpha), attend(beta)
        eventually(lambda: sessions.present() == ("alpha", "beta"))
        key = sessions.push("alpha", order(until_step=2))
        other = sessions.push("beta", order(until_step=3))
        got = next_order(of_alpha)
        assert (got.message_id, got.config["until_step"].integer) == (key, 2)
        assert next_order(of_beta).message_id == other
        assert sessions.take_replies([key, other]) == []
        alpha.Reply(reply_to(got), timeout=10)
        alpha.Reply(reply_to(got, score=0.9), timeout=10)  # sent again, for fear that it was lost
        [reply] = sessions.take_replies([key, other])
        assert (reply.reply_to_message_id, reply.metrics["score"].number) == (key, 0.5)
        alpha.Reply(reply_to(got, score=0.9), timeout=10)
        assert sessions.take_replies([key, other]) == []


def test_an_agent_cannot_answer_for_another(served: Served) -> None:
    sessions = served.coordinator.sessions
    with stub_of(served, "alpha") as alpha, stub_of(served, "beta") as beta:
        join(alpha), join(beta)
        events = attend(alpha)
        key = sessions.push("alpha", order())
        got = next_order(events)
        beta.Reply(reply_to(got), timeout=10)
        assert sessions.take_replies([key]) == []


def test_a_reply_that_flower_cannot_be_given_is_refused(served: Served) -> None:
    with stub_of(served) as alpha:
        join(alpha)
        bad = reply_to(order())
        bad.metrics["score"].text = "high"
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "metric 'score' must be a number"):
            alpha.Reply(bad, timeout=10)


def test_orders_without_a_reply_are_sent_again_to_a_new_stream(served: Served) -> None:
    sessions = served.coordinator.sessions
    with stub_of(served) as alpha:
        join(alpha)
        first = attend(alpha)
        done, open_ = sessions.push("alpha", order(1)), sessions.push("alpha", order(2))
        got = [next_order(first), next_order(first)]
        assert [message.message_id for message in got] == [done, open_]
        alpha.Reply(reply_to(got[0]), timeout=10)
        again = attend(alpha)
        assert next_order(again).message_id == open_
        # The older stream of the same process has ended without a word.
        assert [event for event in first if event.WhichOneof("event") != "status"] == []


def test_status_is_shown_to_all_and_again_only_when_it_changes(served: Served) -> None:
    coordinator = served.coordinator
    status = RunStatus("demo", "hacpo", "here", 2, 3, "waiting for beta to join", ("beta",), {"alpha": AgentStatus()})
    with stub_of(served) as alpha:
        join(alpha)
        events = attend(alpha)
        eventually(lambda: coordinator.sessions.present() == ("alpha",))
        for _ in range(2):
            with coordinator.exchange.changed:
                coordinator.sessions.show(status)
        shown = next(event.status for event in events if event.status.text)
        assert (shown.step, shown.text) == (2, "waiting for beta to join")
        assert (list(shown.present), list(shown.awaited)) == (["alpha"], ["beta"])
        key = coordinator.sessions.push("alpha", order())
        assert next(events).order.message_id == key


def test_the_end_of_the_run_is_told_after_the_last_order_also_to_who_comes_later(served: Served) -> None:
    sessions = served.coordinator.sessions
    with stub_of(served, "alpha") as alpha, stub_of(served, "beta") as beta:
        join(alpha), join(beta)
        events = attend(alpha)
        eventually(lambda: sessions.present() == ("alpha",))
        sessions.finish("the run is complete")
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds[-1] == "finished"
        assert list(attend(beta))[-1].finished.reason == "the run is complete"
        eventually(lambda: sessions.present() == ())


def test_a_report_is_shown_and_stored_and_its_numbers_are_finite(served: Served) -> None:
    coordinator = served.coordinator
    with stub_of(served) as alpha:
        join(alpha)
        alpha.Report(session_pb2.StepReport(step=1, metrics={"reward_mean": 0.25}), timeout=10)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "metric 'loss' must be finite"):
            alpha.Report(session_pb2.StepReport(step=1, metrics={"loss": float("nan")}), timeout=10)
        many = {f"metric{n}": 0.0 for n in range(4097)}
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "at most 4096 metrics"):
            alpha.Report(session_pb2.StepReport(step=1, metrics=many), timeout=10)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "a metric's name has at most 160 characters"):
            alpha.Report(session_pb2.StepReport(step=1, metrics={"x" * 161: 0.0}), timeout=10)
        with refused(grpc.StatusCode.INVALID_ARGUMENT, "the run has 3 steps, and no step 3"):
            alpha.Report(session_pb2.StepReport(step=3), timeout=10)
        alpha.Heartbeat(session_pb2.HeartbeatRequest(step=2, phase="generating" * 9), timeout=10)
    with coordinator.exchange.changed:
        agent = coordinator.sessions.agents()["alpha"]
    assert (agent.reward, agent.step, agent.phase) == (0.25, 2, ("generating" * 9)[:40])


# --- who speaks for an agent


def test_a_superseded_process_is_refused_whatever_it_does(served: Served) -> None:
    coordinator = served.coordinator
    with stub_of(served, incarnation=1) as old, stub_of(served, incarnation=2) as new:
        join(old)
        held = attend(old)
        eventually(lambda: coordinator.sessions.present() == ("alpha",))
        assert join(new, "second") == 2
        # Its open stream breaks off with the reason, and nothing else works either.
        with refused(grpc.StatusCode.ABORTED, "(incarnation 1) was superseded by a newer one with the same key"):
            list(held)
        with refused(grpc.StatusCode.ABORTED, "superseded"):
            next(attend(old))
        with refused(grpc.StatusCode.ABORTED, "superseded"):
            old.Heartbeat(session_pb2.HeartbeatRequest(), timeout=10)
        with refused(grpc.StatusCode.ABORTED, "superseded"):
            old.Reply(reply_to(order()), timeout=10)
        with refused(grpc.StatusCode.ABORTED, "superseded"):
            old.Report(session_pb2.StepReport(), timeout=10)
        with served.channel("alpha", 1) as channel, refused(grpc.StatusCode.ABORTED, "superseded"):
            next(exchange_pb2_grpc.ExchangeStub(channel).Subscribe(exchange_pb2.SubscribeRequest(), timeout=10))
        chunk = coordinator.join("alpha", "second")
        stale = chunk.chunk(0, coordinator.genesis, incarnation=1)
        with served.channel("alpha", 1) as channel, refused(grpc.StatusCode.ABORTED, "superseded"):
            exchange_pb2_grpc.ExchangeStub(channel).Publish(stale, timeout=10)
        new.Heartbeat(session_pb2.HeartbeatRequest(), timeout=10)


def test_the_end_of_an_older_stream_does_not_take_the_new_one_with_it(served: Served) -> None:
    sessions = served.coordinator.sessions
    incarnation = sessions.join("alpha", TASK.digest, "first")
    streams: list[Generator[session_pb2.SessionEvent]] = []
    for _ in range(2):
        sessions.push("alpha", order())
        stream = sessions.attend("alpha", incarnation, lambda: True)
        assert isinstance(stream, Generator)
        next(stream)
        streams.append(stream)
    older, newer = streams
    older.close()
    assert sessions.present() == ("alpha",)
    newer.close()
    assert sessions.present() == ()


def test_the_site_of_a_superseded_process_ends_by_name(served: Served, tmp_path: Path) -> None:
    with served.session("alpha", tmp_path / "one") as old, served.session("alpha", tmp_path / "two") as new:
        old.join(TASK.digest, 0)
        old.attend(lambda status: None)
        eventually(lambda: served.coordinator.sessions.present() == ("alpha",))
        new.join(TASK.digest, 0)
        assert (old.incarnation, new.incarnation) == (1, 2)
        with pytest.raises(RefusedError, match=r"the server refused: this process of agent alpha .* superseded"):
            list(old.orders())
        new.check()


# --- liveness


def test_a_broken_stream_is_seen_at_once(served: Served) -> None:
    sessions = served.coordinator.sessions
    with stub_of(served) as alpha:
        join(alpha)
        events = attend(alpha)
        next(events)
        eventually(lambda: sessions.present() == ("alpha",))
    # The channel is closed; nothing ticks here, and no heartbeat is due for a long time.
    eventually(lambda: sessions.present() == ())
    assert sessions.reachable() == ("alpha",)  # within the grace


def test_without_a_sign_of_life_a_session_expires(served: Served) -> None:
    coordinator, deadlines = served.coordinator, served.coordinator.run.deadlines
    with stub_of(served) as alpha:
        join(alpha)
        events = attend(alpha)
        eventually(lambda: coordinator.sessions.present() == ("alpha",))
        coordinator.expire(deadlines.heartbeat_s - 5)
        assert coordinator.sessions.present() == ("alpha",)
        coordinator.expire(deadlines.heartbeat_s)
        assert coordinator.sessions.present() == ()
        # The stream ends, so that a site that is alive after all comes again.
        assert [event for event in events if event.WhichOneof("event") != "status"] == []
        again = attend(alpha)
        next(again)
        assert coordinator.sessions.present() == ("alpha",)


def test_orders_of_an_agent_that_is_away_are_answered_with_an_error_after_the_grace(served: Served) -> None:
    coordinator, deadlines = served.coordinator, served.coordinator.run.deadlines
    with stub_of(served) as alpha:
        join(alpha)
        events = attend(alpha)
        key = coordinator.sessions.push("alpha", order())
        got = next_order(events)
    eventually(lambda: coordinator.sessions.present() == ())
    coordinator.expire(deadlines.rejoin_s - 5)
    assert coordinator.sessions.take_replies([key]) == []
    coordinator.expire(deadlines.rejoin_s)
    [reply] = coordinator.sessions.take_replies([key])
    assert (reply.reply_to_message_id, reply.error_code) == (key, 1)
    assert reply.error_reason == "agent alpha is away"
    with stub_of(served) as alpha:
        # What comes of it later is dropped, and the order is not given again.
        alpha.Reply(reply_to(got), timeout=10)
        assert coordinator.sessions.take_replies([key]) == []
        events = attend(alpha)
        other = coordinator.sessions.push("alpha", order())
        assert next_order(events).message_id == other


# --- the client's side


def test_a_session_comes_back_after_its_stream_broke_and_gives_each_order_once(served: Served, tmp_path: Path) -> None:
    coordinator = served.coordinator
    with served.session("alpha", tmp_path / "alpha") as session:
        joined = session.join(TASK.digest, 0)
        assert (joined.open_step, joined.open_step_finished) == (0, False)
        session.attend(lambda status: None)
        orders = session.orders()
        coordinator.sessions.push("alpha", order(1))
        first = next(orders)
        coordinator.expire(coordinator.run.deadlines.heartbeat_s)
        assert coordinator.sessions.present() == ()
        eventually(lambda: coordinator.sessions.present() == ("alpha",))
        assert session.incarnation == 1
        # The first order, still open, is sent again and not given again.
        coordinator.sessions.push("alpha", order(2))
        second = next(orders)
        assert [message.config["until_step"].integer for message in (first, second)] == [1, 2]
        session.reply(reply_to(first))
        session.reply(reply_to(second))
        assert len(coordinator.sessions.take_replies([first.message_id, second.message_id])) == 2
        coordinator.sessions.finish("over")
        assert list(orders) == []


def test_a_session_notices_a_server_that_has_forgotten_steps(served: Served, tmp_path: Path) -> None:
    with served.session("alpha", tmp_path / "alpha") as session:
        with pytest.raises(HacrlFedError, match=r"the server is at step 1 and was at step 3 before: start it with"):
            session.join(TASK.digest, 2)
        assert session.join(TASK.digest, 0).open_step == 0


def test_a_session_reads_the_log_and_takes_it_up_again(served: Served, tmp_path: Path) -> None:
    coordinator = served.coordinator
    beta = coordinator.join("beta")
    with served.session("alpha", tmp_path / "alpha") as session:
        session.join(TASK.digest, 0)
        coordinator.exchange.publish("beta", beta.chunk(0, coordinator.genesis, final=True))
        events = session.subscribe(lambda: 0)
        first = next(events)
        with served.channel(
            "alpha", 1
        ) as channel:  # takes the place of the site's subscription, which then comes again
            next(exchange_pb2_grpc.ExchangeStub(channel).Subscribe(exchange_pb2.SubscribeRequest(), timeout=WAIT_S))
            assert next(events) == first


def test_a_closed_session_leaves_no_thread(served: Served, tmp_path: Path) -> None:
    def of_sessions() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("session")]

    with served.session("alpha", tmp_path / "alpha") as session:
        session.join(TASK.digest, 0)
        session.attend(lambda status: None)
        assert of_sessions()
    assert of_sessions() == []
