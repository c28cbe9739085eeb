"""A site's session with the coordinator: one outbound connection that is taken up again when it breaks."""

import json
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from tenacity import (
    RetryCallState,
    Retrying,
    retry_if_exception,
    sleep_using_event,
    stop_after_delay,
    wait_random_exponential,
)

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.config import RunConfig, WireLimits, parse
from hacrl_fed.errors import HacrlFedError, RefusedError, UnreachableError, UserError
from hacrl_fed.protocol import envelope, transport
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.v1 import exchange_pb2, exchange_pb2_grpc, session_pb2, session_pb2_grpc
from hacrl_fed_client.egress import Egress

_CALL_S = 30.0
_PROBE_S = 10.0
_HEARTBEAT_S = 5.0
_LEAST_HEARTBEAT_S = 1.0  # between two, where there is news
_TELL_AGAIN_S = 10.0
_CHANNELS_KEPT = 4
_THREADS = 4  # attending, heartbeats, reading the log, publishing
_PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

T = TypeVar("T")
S = TypeVar("S", bound=grpc.RpcContext)


@dataclass(frozen=True, slots=True)
class Joined:
    """What the coordinator said when this process joined."""

    open_step: int
    open_step_finished: bool


class StepClosedError(Exception):
    """The step that a chunk was published for is closed; the manifest says what counts."""


class Session:
    """Calls to the coordinator. Each is retried while the server cannot be reached, ``connect_s`` seconds at most.

    Methods raise RefusedError where the coordinator says no, and UnreachableError where it cannot be reached for so long.
    """

    def __init__(
        self,
        address: transport.Address,
        tls: transport.ClientTls | None,
        allow_remote: bool,
        key: Ed25519PrivateKey,
        roster: Roster,
        agent: str,
        connect_s: float,
        egress: Egress,
        tell: Callable[[str], None],
    ) -> None:
        """``tell`` is given a sentence whenever the server cannot be reached, and when it can be again."""
        self._address = address
        self._tls = tls
        self._allow_remote = allow_remote
        self._roster = roster
        self._connect_s = connect_s
        self.egress = egress
        self._tell = tell
        self._instance = uuid.uuid4().hex
        self._incarnation = 0
        self._caller = transport.Caller(key, roster.run, agent, lambda: self._incarnation)
        self._message_bytes = WireLimits().chunk_bytes
        self._heartbeat_s = _HEARTBEAT_S
        self._connecting = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._retired: list[grpc.Channel] = []  # earlier ones, the newest of which a call may still be about to use
        self._closed = threading.Event()
        self._streams: dict[str, grpc.RpcContext] = {}
        self._orders: queue.Queue[session_pb2.FlowerMessage | None] = queue.Queue()
        self._doing = (0, "starting")
        self._news = threading.Event()  # what the site is doing has changed
        self._told_at = -_TELL_AGAIN_S
        self._task_digest = ""
        self._open_step = 0
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="session")
        self._running: list[Future[None]] = []

    @property
    def incarnation(self) -> int:
        """Counts the processes that have joined as this agent."""
        return self._incarnation

    def get_run(self) -> tuple[RunConfig, bytes]:
        """The run's configuration and the bytes that the coordinator signed."""
        request = session_pb2.GetRunRequest(protocol_version=PROTOCOL_VERSION, roster_digest=self._roster.digest)
        response = self._call(
            "GetRun", lambda: self._session_stub().GetRun(request, timeout=_CALL_S), request.ByteSize()
        )
        try:
            payload = envelope.open_envelope(
                response.run_config, self._roster.coordinator_key, envelope.RUN_CONFIG_TYPE
            )
            run = parse(RunConfig, json.loads(payload), f"the run's configuration from {self._address}")
        except (ValueError, UserError) as error:
            raise RefusedError(f"the server cannot be joined: {error}") from None
        self._message_bytes = run.message_bytes(len(self._roster.names))
        self._heartbeat_s = max(_LEAST_HEARTBEAT_S, min(_HEARTBEAT_S, run.deadlines.heartbeat_s / 3))
        self._retire_channel()  # the next one has the run's limits
        return run, payload

    def join(self, task_digest: str, next_step: int) -> Joined:
        """Makes this process the agent's newest, or finds that it still is.

        Raises HacrlFedError where the server's open step is before ``next_step``, the first that this site has not done.
        """
        self._task_digest, self._open_step = task_digest, next_step
        request = session_pb2.JoinRequest(task_digest=task_digest, instance_id=self._instance)
        response = self._call("Join", lambda: self._session_stub().Join(request, timeout=_CALL_S), request.ByteSize())
        if response.open_step < self._open_step:
            raise HacrlFedError(
                f"the server is at step {response.open_step + 1} and was at step {self._open_step + 1} before: start it with "
                "the run folder that it had, or this site with another --run-dir"
            )
        self._open_step = response.open_step
        self._incarnation = response.incarnation
        return Joined(response.open_step, response.open_step_finished)

    def attend(self, on_status: Callable[[session_pb2.Status], None]) -> None:
        """Starts the session's threads: one keeps the stream of orders and status, one sends heartbeats."""
        self.run_beside(lambda: self._attend(on_status))
        self.run_beside(self._beat)

    def run_beside(self, work: Callable[[], None]) -> None:
        """Runs ``work`` on a thread that ends with the session; what it raises, ``check`` raises again."""
        self._running.append(self._threads.submit(work))

    def orders(self) -> Iterator[session_pb2.FlowerMessage]:
        """The coordinator's orders, each once, until the run is over. Raises what ended the session."""
        seen: set[str] = set()
        while True:
            self.check()
            try:
                order = self._orders.get(timeout=0.5)
            except queue.Empty:
                continue
            if order is None:
                return
            if order.message_id not in seen:
                seen.add(order.message_id)
                yield order

    def check(self) -> None:
        """Raises what ended the session, if something did."""
        for work in self._running:
            if work.done() and (error := work.exception()):
                raise error

    @property
    def is_closed(self) -> bool:
        """Whether the session has ended on this side."""
        return self._closed.is_set()

    def doing(self, step: int, phase: str) -> None:
        """What the heartbeats from now on say of this site."""
        self._doing = (step, phase)
        self._news.set()

    def reply(self, message: session_pb2.FlowerMessage) -> None:
        """Answers an order."""
        self._call("Reply", lambda: self._session_stub().Reply(message, timeout=_CALL_S), message.ByteSize())

    def report(self, step: int, metrics: dict[str, float]) -> None:
        """Reports named scalars of a step."""
        request = session_pb2.StepReport(step=step, metrics=metrics)
        self._call(
            "Report", lambda: self._session_stub().Report(request, timeout=_CALL_S), request.ByteSize(), step=step
        )

    def publish(self, step: int, chunk: exchange_pb2.Chunk) -> None:
        """Publishes a chunk. Raises StepClosedError where the step has been closed without it."""
        try:
            self._call(
                "Publish", lambda: self._exchange_stub().Publish(chunk, timeout=_CALL_S), chunk.ByteSize(), step=step
            )
        except _PreconditionError as error:
            raise StepClosedError(str(error)) from None

    def subscribe(self, first_step: Callable[[], int]) -> Iterator[exchange_pb2.ExchangeEvent]:
        """The coordinator's log from ``first_step()`` on, taken up again from there when the stream breaks."""
        while not self._closed.is_set():
            request = exchange_pb2.SubscribeRequest(first_step=first_step())
            self.egress.sent("Subscribe", request.ByteSize())
            try:
                for event in self._opened("Subscribe", self._exchange_stub().Subscribe(request)):
                    self.egress.received(event.ByteSize())
                    yield event
            except UnreachableError:
                pass  # the attending thread reconnects, or gives up and says so
            except grpc.RpcError as error:
                if self._closed.is_set():
                    return
                if not self._is_passing(error):
                    raise _refused(error) from None
            self._closed.wait(0.5)

    def close(self) -> None:
        """Ends the session."""
        with self._connecting:
            self._closed.set()
            self._news.set()
        for stream in list(self._streams.values()):
            stream.cancel()  # type: ignore[no-untyped-call]
        self._threads.shutdown()
        # Not before: a call that begins on a closed channel with interceptors crashes the whole process (grpcio 1.85).
        for channel in filter(None, (*self._retired, self._channel)):
            channel.close()

    def _opened(self, method: str, stream: S) -> S:
        """Remembers a stream that has begun, so that ``close`` can end it."""
        self._streams[method] = stream
        if self.is_closed:
            stream.cancel()  # type: ignore[no-untyped-call]
        return stream

    def _retire_channel(self) -> None:
        """Lets the next call open a new channel, which finds out anew whether the server's certificate is the same."""
        with self._connecting:
            if self._channel:
                self._retired.append(self._channel)
                self._channel = None
            while len(self._retired) > _CHANNELS_KEPT:
                self._retired.pop(0).close()

    def _attend(self, on_status: Callable[[session_pb2.Status], None]) -> None:
        while not self._closed.is_set():
            try:
                self.egress.sent("Attend", 0)
                for event in self._opened("Attend", self._session_stub().Attend(session_pb2.AttendRequest())):
                    self.egress.received(event.ByteSize())
                    match event.WhichOneof("event"):
                        case "order":
                            self._orders.put(event.order)
                        case "status":
                            on_status(event.status)
                        case "finished":
                            self._orders.put(None)
                            return
            except grpc.RpcError as error:
                if self._closed.is_set():
                    return
                if not self._is_passing(error):
                    raise _refused(error) from None
                self._tell("the connection to the server broke; reconnecting")
            self._reconnect()

    def _reconnect(self) -> None:
        if self._closed.wait(0.5):
            return
        self._retire_channel()
        self.join(self._task_digest, self._open_step)
        self._tell("connected again")

    def _beat(self) -> None:
        while not self._closed.wait(_LEAST_HEARTBEAT_S):
            self._news.wait(self._heartbeat_s - _LEAST_HEARTBEAT_S)
            self._news.clear()
            step, phase = self._doing
            request = session_pb2.HeartbeatRequest(step=step, phase=phase)
            self.egress.sent("Heartbeat", request.ByteSize())
            try:
                self._session_stub().Heartbeat(request, timeout=_CALL_S)
            except UnreachableError:
                continue  # the attending thread reconnects, or gives up and says so
            except grpc.RpcError as error:
                if not (self._is_passing(error) or self.is_closed):
                    raise _refused(error) from None

    def _call(self, method: str, call: Callable[[], T], size: int, step: int | None = None) -> T:
        def attempt() -> T:
            self.egress.sent(method, size, step)
            return call()

        retrying = Retrying(
            sleep=sleep_using_event(self._closed),
            stop=stop_after_delay(self._connect_s),
            wait=wait_random_exponential(multiplier=0.25, max=5),
            retry=retry_if_exception(self._is_passing),
            before_sleep=self._say_why,
            reraise=True,
        )
        try:
            return retrying(attempt)
        except grpc.RpcError as error:
            if self._is_passing(error):
                raise UnreachableError(
                    f"the server at {self._address} could not be reached for {self._connect_s:.0f} s ({_details(error)});"
                    " run the same command to resume"
                ) from None
            raise _refused(error) from None
        except UnreachableError as error:
            raise UnreachableError(f"{error}; gave up after {self._connect_s:.0f} s (connect_s)") from None

    def _is_passing(self, error: BaseException) -> bool:
        if self._closed.is_set():
            return False
        return isinstance(error, UnreachableError) or (isinstance(error, grpc.RpcError) and error.code() in _PASSING)

    def _say_why(self, state: RetryCallState) -> None:
        error = state.outcome.exception() if state.outcome else None
        why = _details(error) if isinstance(error, grpc.RpcError) else str(error)
        # Several threads meet the same fault.
        if time.monotonic() - self._told_at < _TELL_AGAIN_S:
            return
        self._told_at = time.monotonic()
        self._tell(f"{why}; trying again for {max(0.0, self._connect_s - (state.seconds_since_start or 0.0)):.0f} s")

    def _connected(self) -> grpc.Channel:
        with self._connecting:
            if self._closed.is_set():
                raise UnreachableError("the session has ended")
            if self._channel is None:
                self._channel = transport.open_channel(
                    self._address,
                    self._tls,
                    self._caller,
                    chunk_bytes=self._message_bytes,
                    timeout_s=min(_PROBE_S, self._connect_s),
                    insecure_allow_remote=self._allow_remote,
                )
            return self._channel

    def _session_stub(self) -> session_pb2_grpc.SessionStub:
        return session_pb2_grpc.SessionStub(self._connected())

    def _exchange_stub(self) -> exchange_pb2_grpc.ExchangeStub:
        return exchange_pb2_grpc.ExchangeStub(self._connected())


class _PreconditionError(RefusedError):
    """A call that came too late, or too early."""


def _details(error: grpc.RpcError) -> str:
    return str(error.details() or error.code().name)


def _refused(error: grpc.RpcError) -> RefusedError:
    kind = _PreconditionError if error.code() is grpc.StatusCode.FAILED_PRECONDITION else RefusedError
    return kind(f"the server refused: {_details(error)}")
