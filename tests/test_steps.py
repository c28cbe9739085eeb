"""The step barrier, on a clock of the test's own."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hacrl_fed.config import Deadlines
from hacrl_fed_server.steps import Phase, StepBarrier

DEADLINES = Deadlines(join_s=100, step_s=50, rejoin_s=10, heartbeat_s=5, pause_s=1000)
AGENTS = ("a", "b", "c")


def barrier(*present: str, min_agents: int = 2, agents: tuple[str, ...] = AGENTS) -> StepBarrier:
    """A barrier of a run that began long ago, at second 0, with these agents present."""
    made = StepBarrier(agents, min_agents, DEADLINES, -1000.0, started=True)
    for agent in present:
        made.arrived(agent)
    return made


def test_a_step_closes_when_all_who_take_part_have_finished() -> None:
    steps = barrier("a", "b", "c")
    for agent in ("a", "b", "c"):
        steps.published(agent, final=False)
        assert steps.decide(0.0).phase is Phase.RUNNING
    steps.published("a", final=True)
    steps.published("b", final=True)
    assert steps.decide(1.0).awaited == ("c",)
    assert "waiting for rollouts of c" in steps.decide(1.0).text
    steps.published("c", final=True)
    assert steps.decide(1.0).phase is Phase.CLOSING
    steps.next_step()
    assert steps.decide(1.0).awaited == ("a", "b", "c")


def test_an_agent_that_never_came_is_not_awaited() -> None:
    steps = barrier("a", "b")
    steps.published("a", final=True)
    steps.published("b", final=True)
    assert steps.decide(0.0).phase is Phase.CLOSING


def test_at_the_deadline_a_step_closes_without_who_has_not_finished() -> None:
    steps = barrier("a", "b")
    assert steps.decide(0.0).phase is Phase.RUNNING  # the deadline counts from here
    steps.published("a", final=True)
    steps.published("b", final=False)
    assert steps.decide(49.9).phase is Phase.RUNNING
    late = steps.decide(50.0)
    assert (late.phase, late.awaited) == (Phase.CLOSING, ("b",))
    steps.next_step()
    steps.published("a", final=True)
    assert steps.decide(50.0).phase is Phase.RUNNING  # each step has its own
    assert steps.decide(100.0).phase is Phase.CLOSING


def test_an_empty_step_never_closes() -> None:
    steps = barrier("a", "b")
    assert steps.decide(0.0).phase is Phase.RUNNING
    assert steps.decide(1e6).phase is Phase.RUNNING
    steps.published("a", final=False)
    assert steps.decide(1e6).phase is Phase.CLOSING


def test_an_agent_that_broke_off_is_awaited_for_the_grace() -> None:
    steps = barrier("a", "b", "c")
    steps.decide(0.0)
    steps.published("a", final=True)
    steps.published("b", final=True)
    steps.lost("c", 1.0)
    assert steps.decide(10.9).awaited == ("c",)
    assert steps.taking_part(10.9) == {"a", "b", "c"}
    assert steps.decide(11.0).phase is Phase.CLOSING
    steps.arrived("c")
    assert steps.decide(11.0).awaited == ("c",)


def test_who_has_finished_counts_after_leaving() -> None:
    steps = barrier("a", "b")
    steps.published("b", final=True)
    steps.lost("b", 0.0)
    assert steps.decide(20.0).awaited == ("a",)
    steps.published("a", final=True)
    assert steps.decide(20.0).phase is Phase.CLOSING


def test_below_min_agents_the_run_pauses_and_the_deadline_stands_still() -> None:
    steps = barrier("a", "b")
    steps.decide(0.0)
    steps.published("a", final=False)
    steps.lost("b", 1.0)
    assert steps.decide(10.9).phase is Phase.RUNNING
    paused = steps.decide(11.0)
    assert (paused.phase, paused.awaited) == (Phase.PAUSED, ("b", "c"))
    assert paused.text == "paused: 1 of at least 2 agents; waiting for b, c"
    assert steps.decide(500.0).phase is Phase.PAUSED
    steps.arrived("b")
    assert steps.decide(500.0).phase is Phase.RUNNING
    assert steps.decide(549.9).phase is Phase.RUNNING
    assert steps.decide(550.0).phase is Phase.CLOSING


def test_a_new_run_gathers_its_roster_for_join_s_at_least_min_agents() -> None:
    steps = StepBarrier(AGENTS, 2, DEADLINES, 0.0, started=False)
    gathering = steps.decide(0.0)
    assert (gathering.phase, gathering.text) == (Phase.GATHERING, "waiting for a, b, c to join")
    steps.arrived("a")
    assert steps.decide(1e6).phase is Phase.GATHERING
    steps.arrived("b")
    assert steps.decide(99.9).awaited == ("c",)
    assert steps.decide(100.0).phase is Phase.RUNNING
    steps.lost("b", 100.0)
    assert steps.decide(111.0).phase is Phase.PAUSED  # gathering is over for good


def test_a_whole_roster_starts_at_once() -> None:
    steps = StepBarrier(AGENTS, 2, DEADLINES, 0.0, started=False)
    for agent in AGENTS:
        steps.arrived(agent)
    assert steps.decide(0.0).phase is Phase.RUNNING


def test_a_resumed_run_gives_everyone_the_grace_and_gathers_no_more() -> None:
    steps = StepBarrier(AGENTS, 1, DEADLINES, 0.0, started=True)
    steps.arrived("a")
    steps.published("a", final=True)
    assert steps.decide(9.9).awaited == ("b", "c")
    assert steps.decide(10.0).phase is Phase.CLOSING


class AnyOrder(RuleBasedStateMachine):
    """Events in any order, against what may never happen and what must."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = StepBarrier(AGENTS, 2, DEADLINES, self.now, started=False)
        self.opened_at = 0.0
        self.gathered = False
        self.present: set[str] = set()
        self.left_at: dict[str, float] = {}
        self.published: set[str] = set()
        self.finished: set[str] = set()

    @rule(seconds=st.sampled_from([0.5, 4.0, 9.0, 30.0, 101.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(agent=st.sampled_from(AGENTS))
    def arrive(self, agent: str) -> None:
        self.steps.arrived(agent)
        self.present.add(agent)
        self.left_at.pop(agent, None)

    @precondition(lambda self: self.present)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        agent = data.draw(st.sampled_from(sorted(self.present)))
        self.steps.lost(agent, self.now)
        self.present.discard(agent)
        self.left_at[agent] = self.now

    @precondition(lambda self: self.present - self.finished)
    @rule(data=st.data(), final=st.booleans())
    def publish(self, data: st.DataObject, final: bool) -> None:
        agent = data.draw(st.sampled_from(sorted(self.present - self.finished)))
        self.steps.published(agent, final)
        self.published.add(agent)
        if final:
            self.finished.add(agent)

    @invariant()
    def decide(self) -> None:
        decision = self.steps.decide(self.now)
        in_grace = {agent for agent, at in self.left_at.items() if self.now - at < DEADLINES.rejoin_s}
        unfinished = (self.present | in_grace) - self.finished
        enough = len(self.present | in_grace | self.finished) >= 2
        self.gathered = self.gathered or decision.phase is not Phase.GATHERING
        if decision.phase is Phase.CLOSING:
            assert self.published
            assert enough
            assert not unfinished or self.now - self.opened_at >= DEADLINES.step_s
            assert set(decision.awaited) == unfinished
            self.steps.next_step()
            self.published, self.finished, self.opened_at = set(), set(), self.now
        elif self.gathered:
            assert decision.phase is (Phase.RUNNING if enough else Phase.PAUSED)
            assert not enough or unfinished or not self.published, "everyone has finished, and the step stays open"


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
