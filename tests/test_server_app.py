"""The ServerApp on the coordinator's grid: sites of a few lines follow its orders over real sessions."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pytest
from flwr.app import Context, Error, Message, MetricRecord, RecordDict

from federation import TASK, WAIT_S, Coordinator, Served, eventually, run_config, serving
from hacrl_fed.config import RunConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import flower
from hacrl_fed_client.session import Session
from hacrl_fed_server.app import build_server_app, run_stage, stages
from hacrl_fed_server.grid import CoordinatorGrid

Followed = tuple[str, int | str]
RUN = run_config(steps=5, block_steps=2, evaluation={"prompts": 4}, deadlines={"rejoin_s": 0.5})
ALL: list[Followed] = [
    ("evaluate", "before"),
    ("train.block", 2),
    ("train.block", 4),
    ("train.block", 5),
    ("evaluate", "after"),
]


class KilledError(Exception):
    """What a site's work ends with where a test kills it."""


class Site:
    """Answers every order at once, with the number of orders that it has followed; ``before`` may hold it up."""

    def __init__(self, session: Session, before: Callable[[Followed], None] = lambda _: None) -> None:
        self.at: Followed | None = None  # the newest order, followed or not
        self.followed: list[Followed] = []
        self._session = session
        self._before = before
        session.join(TASK.digest, 0)
        session.attend(lambda status: None)

    def follow(self) -> None:
        with contextlib.suppress(KilledError):
            self._follow()

    def _follow(self) -> None:
        for order in self._session.orders():
            message = flower.from_proto(order, run_id=1, src_node_id=flower.SERVER_NODE_ID, dst_node_id=2)
            config = message.content.config_records["config"]
            where = config.get("until_step", config.get("when"))
            assert isinstance(where, int | str)
            what = message.metadata.message_type, where
            self.at = what
            self._before(what)
            if self._session.is_closed:
                raise KilledError
            self.followed.append(what)
            self._session.reply(flower.to_proto(self.answer(message)))

    def answer(self, order: Message) -> Message:
        return Message(RecordDict({"metrics": MetricRecord({"orders": len(self.followed)})}), reply_to=order)


class Federation:
    """A served coordinator whose ServerApp runs on a thread, and its sites."""

    def __init__(self, served: Served, folder: Path, stack: ExitStack) -> None:
        self.coordinator = served.coordinator
        self._served = served
        self._folder = folder
        self._stack = stack
        self._pool = stack.enter_context(ThreadPoolExecutor(1))
        self._over = threading.Event()
        stack.callback(self._over.set)
        self.grid = CoordinatorGrid(self.coordinator.roster, self.coordinator.sessions, self._check)

    def start(self) -> Future[None]:
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})

        def run() -> None:
            build_server_app(self.coordinator.run)(self.grid, context)
            self.coordinator.sessions.finish("over")

        return self._pool.submit(run)

    def _check(self) -> None:
        if self._over.is_set():  # so that a test that fails ends
            raise KilledError

    def site(
        self, agent: str, before: Callable[[Followed], None] = lambda _: None, kind: type[Site] = Site
    ) -> tuple[Site, Session]:
        session = self._stack.enter_context(self._served.session(agent, self._folder / agent))
        site = kind(session, before)
        threading.Thread(target=site.follow, daemon=True).start()
        return site, session


@pytest.fixture
def federation(tmp_path: Path) -> Iterator[Federation]:
    coordinator = Coordinator(tmp_path, RUN, "alpha", "beta", "gamma")
    with serving(coordinator, tmp_path, tick_s=0.02) as served, ExitStack() as stack:
        yield Federation(served, tmp_path, stack)


def test_stages_of_a_run() -> None:
    assert [(stage.message_type, *stage.config.values()) for stage in stages(RUN)] == ALL
    assert [stage.config for stage in stages(run_config(steps=3, block_steps=10))] == [{"until_step": 3}]


def test_two_sites_are_led_through_all_stages(federation: Federation) -> None:
    sites = [federation.site(name)[0] for name in ("alpha", "beta")]
    federation.start().result(timeout=WAIT_S)
    for site in sites:
        assert site.followed == ALL


def test_a_stage_waits_for_min_agents(federation: Federation) -> None:
    alpha, _ = federation.site("alpha")
    running = federation.start()
    eventually(lambda: alpha.followed == ALL[:1])
    assert not running.done()
    beta, _ = federation.site("beta")
    running.result(timeout=WAIT_S)
    assert alpha.followed == beta.followed == ALL


def test_a_late_joiner_is_led_from_the_stage_that_runs(federation: Federation) -> None:
    joined = threading.Event()

    def wait_for_gamma(what: Followed) -> None:
        if what == ("train.block", 4):
            joined.wait(WAIT_S)

    alpha, _ = federation.site("alpha", wait_for_gamma)
    beta, _ = federation.site("beta")
    running = federation.start()
    eventually(lambda: beta.followed[-1:] == [("train.block", 4)])
    gamma, _ = federation.site("gamma")
    eventually(lambda: gamma.followed == [("train.block", 4)])
    joined.set()
    running.result(timeout=WAIT_S)
    assert alpha.followed == beta.followed == ALL
    assert gamma.followed == ALL[2:]


def test_a_lost_site_holds_up_nobody_for_long_and_is_led_on_when_it_is_back(federation: Federation) -> None:
    held, back = threading.Event(), threading.Event()

    def hold(what: Followed) -> None:
        if what == ("train.block", 2):
            held.wait(WAIT_S)

    def wait_until_back(what: Followed) -> None:
        if what == ("train.block", 5):
            back.wait(WAIT_S)

    alpha, _ = federation.site("alpha", wait_until_back)
    beta, _ = federation.site("beta", wait_until_back)
    gamma, session = federation.site("gamma", hold)
    eventually(lambda: len(set(federation.grid.get_node_ids())) == 3)
    running = federation.start()
    eventually(lambda: alpha.followed == beta.followed == ALL[:2] and gamma.at == ALL[1])
    # It is still at work in the second stage, and so the others wait, until it is lost for longer than the grace.
    assert gamma.followed == ALL[:1]
    session.close()
    eventually(lambda: alpha.at == beta.at == ALL[3])
    held.set()
    again, _ = federation.site("gamma")
    eventually(lambda: again.followed == [("train.block", 5)])
    back.set()
    running.result(timeout=WAIT_S)
    assert again.followed == ALL[3:]
    assert alpha.followed == beta.followed == ALL


def test_a_site_that_is_back_within_a_stage_is_given_its_order_again(federation: Federation) -> None:
    go_on = threading.Event()

    def hold(what: Followed) -> None:
        if what == ("train.block", 2):
            go_on.wait(WAIT_S)

    alpha, _ = federation.site("alpha", hold)
    beta, session = federation.site("beta", hold)
    running = federation.start()
    eventually(lambda: alpha.at == beta.at == ALL[1])
    session.close()
    eventually(lambda: len(list(federation.grid.get_node_ids())) == 1)
    again, _ = federation.site("beta")
    eventually(lambda: again.followed == ALL[1:2])
    go_on.set()
    running.result(timeout=WAIT_S)
    assert again.followed == ALL[1:]


def error_to(order: Message, reason: str) -> Message:
    return Message(Error(7, reason), reply_to=order)


def test_a_site_that_answers_with_errors_is_left_behind(federation: Federation) -> None:
    class Failing(Site):
        def answer(self, order: Message) -> Message:
            return error_to(order, "out of memory")

    sites = [federation.site(name)[0] for name in ("alpha", "beta")]
    failing, _ = federation.site("gamma", kind=Failing)
    eventually(lambda: len(set(federation.grid.get_node_ids())) == 3)
    federation.start().result(timeout=WAIT_S)
    for site in sites:
        assert site.followed == ALL
    assert failing.followed == [stage for stage in ALL for _ in range(3)]


def test_a_site_that_does_not_answer_in_a_stages_time_is_left_behind(federation: Federation) -> None:
    run = federation.coordinator.run
    short = run.model_copy(update={"deadlines": run.deadlines.model_copy(update={"join_s": 0.2, "step_s": 0.1})})
    over = threading.Event()

    def hang(what: Followed) -> None:
        over.wait(WAIT_S)
        raise KilledError

    sites = [federation.site(name)[0] for name in ("alpha", "beta")]
    hanging, _ = federation.site("gamma", hang)
    eventually(lambda: len(set(federation.grid.get_node_ids())) == 3)
    run_stage(federation.grid, next(stages(short)), short)
    for site in sites:
        assert site.followed == ALL[:1]
    assert (hanging.at, hanging.followed) == (ALL[0], [])
    federation.coordinator.sessions.finish("over")
    over.set()


def test_a_run_that_stays_below_min_agents_gives_up_by_name(tmp_path: Path) -> None:
    run: RunConfig = run_config(deadlines={"pause_s": 0.05, "join_s": 0.01})
    coordinator = Coordinator(tmp_path, run, "alpha", "beta")
    coordinator.join("alpha")
    grid = CoordinatorGrid(coordinator.roster, coordinator.sessions, lambda: None)
    [stage] = stages(run)
    with pytest.raises(HacrlFedError, match=r"fewer than min_agents = 2 agents .*deadlines\.pause_s.*to resume"):
        run_stage(grid, stage, run)
