"""The agents' sessions: joining, orders (Flower messages) and their replies, liveness, and what people are shown."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import grpc

from hacrl_fed.config import RunConfig
from hacrl_fed.protocol import digests, flower
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.status import AgentStatus, RunStatus, printable
from hacrl_fed.v1 import session_pb2
from hacrl_fed_server.ledger import Ledger
from hacrl_fed_server.refusal import CallRefusedError
from hacrl_fed_server.steps import StepBarrier

_POLL_S = 1.0


@dataclass
class _Session:
    incarnation: int = 0
    stream: int = 0  # counts attendances: only the newest one speaks for the agent
    alive_at: float = 0.0
    orders: dict[str, session_pb2.FlowerMessage] = field(default_factory=dict)  # without a reply yet
    phase: str = ""
    step: int = 0
    reward: float | None = None


class Sessions:
    """All agents' sessions of one run. State is guarded by ``changed``, the exchange's condition, notified at every change."""

    def __init__(
        self,
        run: RunConfig,
        roster: Roster,
        run_payload: bytes,
        ledger: Ledger,
        barrier: StepBarrier,
        changed: threading.Condition,
    ) -> None:
        self._run = run
        self._roster = roster
        self._run_payload = run_payload
        self._ledger = ledger
        self._barrier = barrier
        self._changed = changed
        self._sessions = {name: _Session(ledger.incarnation(name)) for name in roster.names}
        self._replies: dict[str, session_pb2.FlowerMessage] = {}
        self._status = session_pb2.Status()
        self._finished: str | None = None

    def join(self, agent: str, task_digest: str, instance: str) -> int:
        """Admits a process as the agent's newest and returns its incarnation. Raises CallRefusedError."""
        with self._changed:
            pinned = self._ledger.meta("task_digest") or self._run.task.digest
            if pinned not in (None, task_digest):
                raise CallRefusedError(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"task {self._run.task.id} differs: this site's digest is {task_digest}, and the run's {pinned}"
                    f"{self._pinned_by()}; all sites need the same prompts, answers and verifier under this id",
                )
            if self._ledger.meta("genesis") is None:
                self._ledger.set_meta("task_digest", task_digest)
                self._ledger.set_meta("first_agent", agent)
                genesis = digests.genesis_digest(self._roster.digest, self._run_payload, task_digest)
                self._ledger.set_meta("genesis", genesis)
            incarnation = self._ledger.admit(agent, instance)
            session = self._sessions[agent]
            if incarnation != session.incarnation:
                session.incarnation = incarnation
                session.stream += 1  # whatever stream an earlier process holds no longer speaks for the agent
            self._changed.notify_all()
            return incarnation

    def _pinned_by(self) -> str:
        if self._run.task.digest is not None:
            return ""
        first = self._ledger.meta("first_agent")
        return (
            f", which agent {first} brought (to decide it in advance, set task.digest in run.yaml and a new --run-dir)"
        )

    def attend(self, agent: str, incarnation: int, alive: Callable[[], bool]) -> Iterator[session_pb2.SessionEvent]:
        """The session itself: it lives while this iterator does. Orders without a reply are sent again at the start."""
        session = self._sessions[agent]
        with self._changed:
            self.check_incarnation(agent, incarnation)
            session.stream += 1
            stream = session.stream
            session.alive_at = time.monotonic()
            self._barrier.arrived(agent)
            self._changed.notify_all()
        sent: set[str] = set()
        shown = None
        try:
            while alive():
                with self._changed:
                    if session.stream != stream:
                        self.check_incarnation(agent, incarnation)
                        return
                    orders = [order for key, order in session.orders.items() if key not in sent]
                    status, finished = self._status, self._finished
                    if not orders and status == shown and finished is None:
                        self._changed.wait(_POLL_S)
                        continue
                for order in orders:
                    sent.add(order.message_id)
                    yield session_pb2.SessionEvent(order=order)
                if status != shown:
                    shown = status
                    yield session_pb2.SessionEvent(status=status)
                if finished is not None:
                    yield session_pb2.SessionEvent(finished=session_pb2.Finished(reason=finished))
                    return
        finally:
            with self._changed:
                if session.stream == stream:
                    session.stream += 1
                    self._barrier.lost(agent, time.monotonic())
                    self._changed.notify_all()

    def heartbeat(self, agent: str, incarnation: int, step: int, phase: str) -> None:
        """A sign of life, with what the agent is doing. Raises CallRefusedError."""
        with self._changed:
            self.check_incarnation(agent, incarnation)
            session = self._sessions[agent]
            session.alive_at = time.monotonic()
            session.step, session.phase = step, printable(phase)[:40]

    def report(self, agent: str, incarnation: int, step: int, metrics: dict[str, float]) -> None:
        """Stores an agent's metrics of a step. Raises CallRefusedError, and ValueError for a step that the run has not."""
        if step >= self._run.steps:
            raise ValueError(f"the run has {self._run.steps} steps, and no step {step}")
        with self._changed:
            self.check_incarnation(agent, incarnation)
            self._ledger.add_report(step, agent, metrics)
            session = self._sessions[agent]
            session.step = step + 1
            session.reward = metrics.get("reward_mean")

    def push(self, agent: str, order: session_pb2.FlowerMessage) -> str:
        """Queues an order and returns the id of its message."""
        order.message_id = uuid.uuid4().hex
        with self._changed:
            self._sessions[agent].orders[order.message_id] = order
            self._changed.notify_all()
        return order.message_id

    def reply(self, agent: str, incarnation: int, message: session_pb2.FlowerMessage) -> None:
        """Takes a reply; one to an order that is not waiting for one is dropped, since its sender may only repeat itself."""
        with self._changed:
            self.check_incarnation(agent, incarnation)
            if self._sessions[agent].orders.pop(message.reply_to_message_id, None) is not None:
                self._replies[message.reply_to_message_id] = message
                self._changed.notify_all()

    def take_replies(self, message_ids: Iterable[str]) -> list[session_pb2.FlowerMessage]:
        """The replies that have come to these orders; each is given out once."""
        with self._changed:
            return [self._replies.pop(key) for key in list(message_ids) if key in self._replies]

    def present(self) -> tuple[str, ...]:
        """Agents whose session lives."""
        with self._changed:
            return self._barrier.present

    def reachable(self) -> tuple[str, ...]:
        """Agents that are present or expected back within the grace for a broken stream."""
        with self._changed:
            return tuple(sorted(self._barrier.taking_part(time.monotonic())))

    def expire(self, now: float) -> None:
        """Ends sessions without a sign of life, and gives up the orders of agents that did not come back. Needs ``changed``."""
        for agent in self._barrier.present:
            session = self._sessions[agent]
            if now - session.alive_at >= self._run.deadlines.heartbeat_s:
                session.stream += 1
                self._barrier.lost(agent, now)
        reachable = self._barrier.taking_part(now)
        for agent, session in self._sessions.items():
            if agent not in reachable and session.orders:
                for key, order in session.orders.items():
                    self._replies[key] = session_pb2.FlowerMessage(
                        reply_to_message_id=key,
                        message_type=order.message_type,
                        error_code=flower.AWAY,
                        error_reason=f"agent {agent} is away",
                    )
                session.orders.clear()

    def show(self, status: RunStatus) -> None:
        """Sends what the run is doing to all sites. Needs ``changed``."""
        self._status = session_pb2.Status(
            step=status.step, text=status.text, present=self._barrier.present, awaited=status.awaited
        )
        self._changed.notify_all()

    def agents(self) -> dict[str, AgentStatus]:
        """A snapshot of all agents. Needs ``changed``."""
        present = self._barrier.present
        return {
            name: AgentStatus(name in present, session.phase, session.step, session.reward)
            for name, session in self._sessions.items()
        }

    def finish(self, reason: str) -> None:
        """Tells all sites that the run is over."""
        with self._changed:
            self._finished = reason
            self._changed.notify_all()

    def check_incarnation(self, agent: str, incarnation: int) -> None:
        """Raises CallRefusedError for a process that is not the agent's newest."""
        current = self._sessions[agent].incarnation
        if incarnation != current:
            raise CallRefusedError(
                grpc.StatusCode.ABORTED,
                f"this process of agent {agent} (incarnation {incarnation}) was superseded by a newer one with the same key",
            )
