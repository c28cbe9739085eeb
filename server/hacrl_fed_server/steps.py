"""When a step closes: the step's barrier as a state machine without I/O. Times are seconds of a monotonic clock, passed in."""

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hacrl_fed.config import Deadlines


class Phase(Enum):
    """What a run is doing."""

    GATHERING = "gathering"  # before the first step, for the roster to come together
    RUNNING = "running"
    PAUSED = "paused"  # fewer than min_agents take part
    CLOSING = "closing"  # the open step can be closed now


@dataclass(frozen=True, slots=True)
class Decision:
    """What the barrier says now, and for whom the run waits."""

    phase: Phase
    awaited: tuple[str, ...]
    text: str


class StepBarrier:
    """Tracks who is present and who has finished the open step.

    An agent takes part in a step while its session lives, for ``rejoin_s`` after it broke, and once it has finished.
    """

    def __init__(self, agents: Iterable[str], min_agents: int, deadlines: Deadlines, now: float, started: bool) -> None:
        """``started``: the run has begun before (a resumed server does not gather its roster again)."""
        self._agents = tuple(sorted(agents))
        self._min_agents = min_agents
        self._deadlines = deadlines
        self._gathering_since = None if started else now
        # After a restart everyone has just been lost: they get the same grace as after a broken stream.
        self._lost_at: dict[str, float] = dict.fromkeys(self._agents, now) if started else {}
        self._present: set[str] = set()
        self._published: set[str] = set()
        self._finished: set[str] = set()
        self._clock_from: float | None = None

    @property
    def present(self) -> tuple[str, ...]:
        """Agents whose session lives."""
        return tuple(sorted(self._present))

    def arrived(self, agent: str) -> None:
        """The agent's session has begun, or begun again."""
        self._present.add(agent)
        self._lost_at.pop(agent, None)

    def lost(self, agent: str, now: float) -> None:
        """The agent's session broke."""
        self._present.discard(agent)
        self._lost_at[agent] = now

    def published(self, agent: str, final: bool) -> None:
        """The agent has published a chunk of the open step, its last one where ``final``."""
        self._published.add(agent)
        if final:
            self._finished.add(agent)

    def next_step(self) -> None:
        """The step was closed, and the next is open."""
        self._published.clear()
        self._finished.clear()
        self._clock_from = None

    def taking_part(self, now: float) -> set[str]:
        """Agents that are present, or broke off less than ``rejoin_s`` ago."""
        grace = {agent for agent, at in self._lost_at.items() if now - at < self._deadlines.rejoin_s}
        return self._present | grace

    def decide(self, now: float) -> Decision:
        """What to do now. Never closes a step that nobody has published anything in."""
        if self._gathering_since is not None:
            missing = self._missing()
            enough = len(self._present) >= self._min_agents
            if missing and not (enough and now - self._gathering_since >= self._deadlines.join_s):
                return Decision(Phase.GATHERING, missing, f"waiting for {_names(missing)} to join")
            self._gathering_since = None
        contributing = self.taking_part(now) | self._finished
        if len(contributing) < self._min_agents:
            self._clock_from = None
            missing = self._missing()
            text = f"paused: {len(contributing)} of at least {self._min_agents} agents; waiting for {_names(missing)}"
            return Decision(Phase.PAUSED, missing, text)
        if self._clock_from is None:
            self._clock_from = now
        awaited = tuple(sorted(self.taking_part(now) - self._finished))
        overdue = now - self._clock_from >= self._deadlines.step_s
        if self._published and (not awaited or overdue):
            return Decision(Phase.CLOSING, awaited, "closing the step")
        return Decision(Phase.RUNNING, awaited, f"waiting for rollouts of {_names(awaited)}")

    def _missing(self) -> tuple[str, ...]:
        return tuple(agent for agent in self._agents if agent not in self._present)


def _names(agents: tuple[str, ...]) -> str:
    return ", ".join(agents) if agents else "nobody"
