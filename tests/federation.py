"""A federation for tests: keys, a roster, a run, and the coordinator's parts with real files, signatures and sockets."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.config import RunConfig
from hacrl_fed.protocol import convert, digests, envelope, keys, transport
from hacrl_fed.protocol import roster as rosters
from hacrl_fed.protocol.certs import write_development_ca
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import ChunkHeader, FinishReason, Manifest, Rollout, SamplingParameters
from hacrl_fed.tasks.base import Prompt, Task, build_task
from hacrl_fed.v1 import envelope_pb2, exchange_pb2, exchange_pb2_grpc, session_pb2_grpc
from hacrl_fed.verifiers.exact import ExactVerifier
from hacrl_fed_client.egress import Egress
from hacrl_fed_client.session import Session
from hacrl_fed_server.exchange import Exchange
from hacrl_fed_server.ledger import Ledger
from hacrl_fed_server.services import ExchangeService, SessionService
from hacrl_fed_server.sessions import Sessions
from hacrl_fed_server.steps import Decision, StepBarrier

RUN = "demo"
COORDINATOR, STRANGER = keys.generate(), keys.generate()
AGENT_KEYS = {name: keys.generate() for name in ("alpha", "beta", "gamma")}
TOKENIZER_DIGEST = digests.sha256_hex(b"a tokenizer")
WAIT_S = 20.0  # for what is to happen at once; a test that passes never waits this long


def roster_of(*names: str) -> Roster:
    """The run's roster with these agents."""
    agents = [
        {"name": name, "organisation": "Org", "public_key": keys.format_public_key(AGENT_KEYS[name].public_key())}
        for name in names
    ]
    coordinator = keys.format_public_key(COORDINATOR.public_key())
    return rosters.parse({"run": RUN, "coordinator": coordinator, "agents": agents}, "test")


def sums_task() -> Task:
    """A task of small sums, verified by equality."""
    return build_task("sums", [Prompt(f"{n}+1=", str(n + 1)) for n in range(8)], 0.0, ExactVerifier("whole"))


TASK = sums_task()


def run_config(**settings: Any) -> RunConfig:
    """A small run; ``settings`` are sections as in run.yaml."""
    small = {
        "task": "sums",
        "steps": 3,
        "prompts_per_step": 2,
        "group_size": 2,
        "max_new_tokens": 16,
        "evaluation": {"prompts": 0},
    }
    return RunConfig.model_validate(small | settings)


def rollout(prompt: Prompt, sample_index: int = 0, text: str = "ok", reward: float = 0.0, **fields: Any) -> Rollout:
    """A finished completion of two tokens."""
    finished: dict[str, Any] = {"finish_reason": FinishReason.STOP, "logp_sum": -1.0, "token_count": 2}
    return Rollout(prompt_id=prompt.id, sample_index=sample_index, text=text, reward=reward, **(finished | fields))


class Author:
    """Writes an agent's chunks as a site does, and with any fault that a test asks for."""

    def __init__(self, agent: str, incarnation: int = 1) -> None:
        self.agent = agent
        self.incarnation = incarnation
        self.head = ""
        self._step = -1
        self._index = 0
        self._total = 0

    def chunk(
        self,
        step: int,
        previous_manifest: str,
        rollouts: Sequence[Rollout] = (),
        *,
        final: bool = False,
        body: bytes | None = None,
        key: Ed25519PrivateKey | None = None,
        **changes: Any,
    ) -> exchange_pb2.Chunk:
        """The next chunk of the chain; ``changes`` are fields of its header."""
        if step != self._step:
            self._step, self._index, self._total = step, 0, 0
        body = convert.rollouts_to_body(list(rollouts)) if body is None else body
        self._total += len(rollouts)
        fields: dict[str, Any] = {
            "protocol_version": PROTOCOL_VERSION,
            "run_id": RUN,
            "step": step,
            "agent": self.agent,
            "incarnation": self.incarnation,
            "chunk_index": self._index,
            "final": final,
            "rollout_count": len(rollouts),
            "total_rollouts": self._total if final else 0,
            "body_sha256": digests.sha256_hex(body),
            "previous_chunk": self.head,
            "previous_manifest": previous_manifest,
            "sampling": SamplingParameters(16),
            "tokenizer_digest": TOKENIZER_DIGEST,
            "policy_step": 0,
            "created_at_ms": 1,
        }
        payload = convert.header_to_payload(ChunkHeader(**(fields | changes)))
        self.head = digests.sha256_hex(payload)
        self._index += 1
        signed = envelope.sign(key or AGENT_KEYS[self.agent], envelope.CHUNK_HEADER_TYPE, payload)
        return exchange_pb2.Chunk(header=signed, body=body)


class Coordinator:
    """The parts of a coordinator, put together as its process does; a test drives the clock."""

    def __init__(self, folder: Path, run: RunConfig, *names: str) -> None:
        self.run = run
        self.roster = roster_of(*names)
        self.payload = run.model_dump_json().encode()
        self.authors: dict[str, Author] = {}
        identity = {"roster": self.roster.digest, "run configuration": digests.sha256_hex(self.payload)}
        self.ledger = Ledger(folder / "ledger.sqlite", identity)
        started = self.ledger.meta("genesis") is not None
        self.barrier = StepBarrier(self.roster.names, run.min_agents, run.deadlines, time.monotonic(), started)
        self.exchange = Exchange(run, self.roster, COORDINATOR, self.ledger, self.barrier)
        self.sessions = Sessions(run, self.roster, self.payload, self.ledger, self.barrier, self.exchange.changed)

    @property
    def genesis(self) -> str:
        """The run's genesis digest, known once an agent has joined."""
        return digests.genesis_digest(self.roster.digest, self.payload, TASK.digest)

    def join(self, agent: str, instance: str = "first") -> Author:
        """Joins a process of an agent, which attends from now on, and returns what writes its chunks."""
        incarnation = self.sessions.join(agent, TASK.digest, instance)
        self.barrier.arrived(agent)
        self.authors[agent] = Author(agent, incarnation)
        return self.authors[agent]

    def advance(self, after_s: float = 0.0) -> Decision:
        """What the ticker does, ``after_s`` seconds from now."""
        with self.exchange.changed:
            return self.exchange.advance(time.monotonic() + after_s)

    def expire(self, after_s: float) -> None:
        """What the ticker does to sessions, ``after_s`` seconds from now."""
        with self.exchange.changed:
            self.sessions.expire(time.monotonic() + after_s)

    def manifests(self) -> list[Manifest]:
        """The manifests in the log, their signatures verified."""
        events = [event for event in self.ledger.events(0, 0, 1000) if event.is_manifest]
        signed = [envelope_pb2.Envelope.FromString(event.message) for event in events]
        key = self.roster.coordinator_key
        return [
            convert.manifest_from_payload(envelope.open_envelope(one, key, envelope.MANIFEST_TYPE)) for one in signed
        ]


@dataclass(frozen=True, slots=True)
class Served:
    """A coordinator on a socket."""

    coordinator: Coordinator
    address: transport.Address
    tls: transport.ClientTls

    @contextlib.contextmanager
    def channel(self, agent: str, incarnation: int) -> Iterator[grpc.Channel]:
        """A channel whose calls carry an agent's tokens, without a site behind it."""
        caller = transport.Caller(AGENT_KEYS[agent], RUN, agent, lambda: incarnation)
        limit = self.coordinator.run.message_bytes(len(self.coordinator.roster.names))
        with transport.open_channel(self.address, self.tls, caller, chunk_bytes=limit, timeout_s=WAIT_S) as channel:
            yield channel

    @contextlib.contextmanager
    def session(self, agent: str, folder: Path, egress_bytes_per_step: int = 1 << 20) -> Iterator[Session]:
        """A site's session, which has learned the run and not joined yet."""
        folder.mkdir(parents=True, exist_ok=True)
        egress = Egress(folder, egress_bytes_per_step)
        session = Session(
            self.address, self.tls, False, AGENT_KEYS[agent], self.coordinator.roster, agent, WAIT_S, egress, _quiet
        )
        try:
            session.get_run()
            yield session
        finally:
            session.close()
            egress.close()


@contextlib.contextmanager
def serving(coordinator: Coordinator, folder: Path, tick_s: float | None = None) -> Iterator[Served]:
    """The coordinator's services on a port of 127.0.0.1, over TLS; its clock ticks where ``tick_s`` is given."""
    ca = folder / "ca"
    write_development_ca("127.0.0.1", ca)
    server, address = transport.make_server(
        coordinator.roster,
        transport.Address("127.0.0.1", 0),
        transport.ServerTls(ca / "server.pem", ca / "server-key.pem"),
        chunk_bytes=coordinator.run.message_bytes(len(coordinator.roster.names)),
        workers=24,
    )
    run_config_envelope = envelope.sign(COORDINATOR, envelope.RUN_CONFIG_TYPE, coordinator.payload)
    service = SessionService(coordinator.roster, run_config_envelope, coordinator.sessions, coordinator.exchange)
    session_pb2_grpc.add_SessionServicer_to_server(service, server)
    exchange_pb2_grpc.add_ExchangeServicer_to_server(
        ExchangeService(coordinator.sessions, coordinator.exchange), server
    )
    server.start()
    stop = threading.Event()

    def tick() -> None:
        while not stop.wait(tick_s):
            coordinator.expire(0.0)
            coordinator.advance()

    ticker = threading.Thread(target=tick)
    if tick_s is not None:
        ticker.start()
    try:
        yield Served(coordinator, address, transport.ClientTls(ca / "ca.pem"))
    finally:
        stop.set()
        if ticker.is_alive():
            ticker.join()
        server.stop(None).wait(WAIT_S)


def eventually(holds: Callable[[], bool]) -> None:
    """Waits until something holds; a test fails where it does not."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "it did not come about"
        time.sleep(0.01)


def _quiet(sentence: str) -> None:
    """Takes what a session says of its connection."""
