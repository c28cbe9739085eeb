"""The rollout exchange: checks what is published, stores it, hands it on at once, and closes steps by signed manifests."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.config import RunConfig
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import ChunkHeader, Manifest, ManifestEntry, Participation, Rollout
from hacrl_fed.v1 import envelope_pb2, exchange_pb2
from hacrl_fed_server.ledger import Ledger, StoredChunk
from hacrl_fed_server.refusal import CallRefusedError
from hacrl_fed_server.steps import Decision, Phase, StepBarrier

_log = logging.getLogger(__name__)

_EVENTS_A_READ = 32
_POLL_S = 1.0


class Exchange:
    """The open step of one run. All state that changes is guarded by ``changed``, which is notified at every change."""

    def __init__(
        self, run: RunConfig, roster: Roster, key: Ed25519PrivateKey, ledger: Ledger, barrier: StepBarrier
    ) -> None:
        self.changed = threading.Condition()
        self._run = run
        self._roster = roster
        self._key = key
        self._ledger = ledger
        self._barrier = barrier
        self._open_step = ledger.open_step()
        self._in_flight: Counter[str] = Counter()
        self._subscriptions: Counter[str] = Counter()  # counts them: only the newest of an agent goes on
        for chunk in ledger.chunks(self._open_step):
            barrier.published(chunk.agent, chunk.final)

    @property
    def open_step(self) -> int:
        """The step that rollouts are taken for; ``run.steps`` once all are closed."""
        return self._open_step

    @property
    def complete(self) -> bool:
        """Every step of the run is closed."""
        return self._open_step >= self._run.steps

    def standing(self, agent: str) -> tuple[int, bool]:
        """The open step, and whether the agent has published all of it."""
        with self.changed:
            chunks = self._ledger.chunks(self._open_step)
            return self._open_step, any(chunk.agent == agent and chunk.final for chunk in chunks)

    def publish(self, agent: str, chunk: exchange_pb2.Chunk) -> bool:
        """Checks and stores a chunk. Returns False for one that is already there. Raises CallRefusedError."""
        limits = self._run.limits
        with self.changed:
            if self._in_flight[agent] >= limits.chunks_in_flight:
                raise _exhausted(f"more than limits.chunks_in_flight = {limits.chunks_in_flight} chunks at once")
            self._in_flight[agent] += 1
        try:
            header, digest = self._open_header(agent, chunk)
            rollouts = self._open_body(header, chunk.body)
            with self.changed:
                stored = self._place(header, digest)
                if not stored:
                    return False
                self._ledger.append_chunk(
                    header.step,
                    StoredChunk(agent, header.incarnation, header.chunk_index, header.final, len(rollouts), digest),
                    chunk.SerializeToString(deterministic=True),
                )
                self._barrier.published(agent, header.final)
                self.changed.notify_all()
                return True
        finally:
            with self.changed:
                self._in_flight[agent] -= 1

    def events(
        self, agent: str, incarnation: int, first_step: int, alive: Callable[[], bool]
    ) -> Iterator[exchange_pb2.ExchangeEvent]:
        """What the log holds from ``first_step`` on, then what comes, until ``alive`` says no.

        A process gets its own chunks only where an earlier one of the same agent published them, and of closed steps
        that the agent had no part in only the manifests.
        """
        with self.changed:
            self._subscriptions[agent] += 1
            subscription = self._subscriptions[agent]
            closed_before, took_part = self._open_step, self._ledger.steps_of(agent)
        seq = 0
        while alive() and self._subscriptions[agent] == subscription:
            batch = self._ledger.events(first_step, seq, _EVENTS_A_READ)
            for event in batch:
                seq = event.seq
                if event.is_manifest:
                    yield exchange_pb2.ExchangeEvent(manifest=envelope_pb2.Envelope.FromString(event.message))
                elif event.step < closed_before and event.step not in took_part:
                    continue
                elif (event.agent, event.incarnation) != (agent, incarnation):
                    yield exchange_pb2.ExchangeEvent(chunk=exchange_pb2.Chunk.FromString(event.message))
            if not batch:
                with self.changed:
                    if not self._ledger.events(first_step, seq, 1):
                        self.changed.wait(_POLL_S)

    def advance(self, now: float) -> Decision:
        """Closes the open step if its time has come; says for whom the run waits. Call with ``changed`` held."""
        decision = self._barrier.decide(now)
        if decision.phase is Phase.CLOSING and not self.complete:
            if decision.awaited:
                _log.warning("step %d closes at its deadline without %s", self._open_step, ", ".join(decision.awaited))
            self._close_step()
            decision = self._barrier.decide(now)
        return decision

    def _open_header(self, agent: str, chunk: exchange_pb2.Chunk) -> tuple[ChunkHeader, str]:
        limits = self._run.limits
        if len(chunk.body) > limits.chunk_bytes:
            raise _exhausted(f"a chunk of {len(chunk.body)} bytes is over limits.chunk_bytes = {limits.chunk_bytes}")
        try:
            convert.refuse_unknown_fields(chunk)
            payload = envelope.open_envelope(chunk.header, self._roster.agent(agent).key, envelope.CHUNK_HEADER_TYPE)
            header = convert.header_from_payload(payload)
        except (envelope.SignatureError, ValueError) as error:
            raise CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, f"chunk header: {error}") from None
        if header.agent != agent:
            raise _invalid(f"the chunk is of agent {header.agent}, and the call of {agent}")
        if header.run_id != self._roster.run:
            raise _invalid(f"the chunk is of run {header.run_id}, not {self._roster.run}")
        if header.protocol_version != PROTOCOL_VERSION:
            raise _invalid(f"protocol version {header.protocol_version} is not {PROTOCOL_VERSION}")
        return header, digests.sha256_hex(payload)

    def _open_body(self, header: ChunkHeader, body: bytes) -> list[Rollout]:
        limits = self._run.limits
        if digests.sha256_hex(body) != header.body_sha256:
            raise _invalid("the body is not the one that the header's body_sha256 names")
        try:
            rollouts = convert.rollouts_from_body(body)
        except ValueError as error:
            raise _invalid(f"chunk body: {error}") from None
        if len(rollouts) != header.rollout_count:
            raise _invalid(f"the body holds {len(rollouts)} rollouts, and rollout_count says {header.rollout_count}")
        longest = max((len(rollout.text.encode()) for rollout in rollouts), default=0)
        if longest > limits.text_bytes:
            raise _exhausted(f"a text of {longest} bytes is over limits.text_bytes = {limits.text_bytes}")
        return rollouts

    def _place(self, header: ChunkHeader, digest: str) -> bool:
        """Whether a checked chunk is the next of its chain (True) or already there (False). Raises CallRefusedError."""
        agent, step = header.agent, header.step
        if header.incarnation != self._ledger.incarnation(agent):
            raise CallRefusedError(
                grpc.StatusCode.ABORTED, f"incarnation {header.incarnation} of {agent} has been superseded"
            )
        chunks = self._ledger.chunks(step)
        if any(chunk.digest == digest for chunk in chunks):
            return False
        if self.complete:
            raise _precondition(f"all {self._run.steps} steps of the run are closed")
        if step > self._open_step:
            raise _invalid(f"step {step} is not open yet; step {self._open_step} is")
        if step < self._open_step:
            raise _precondition(f"step {step} is closed; step {self._open_step} is open")
        own = [chunk for chunk in chunks if chunk.agent == agent]
        if any(chunk.final for chunk in own):
            raise _precondition(f"{agent} has already finished step {step}")
        own = [chunk for chunk in own if chunk.incarnation == header.incarnation]
        if header.chunk_index != len(own):
            raise _invalid(f"chunk {header.chunk_index} is out of order: chunk {len(own)} is next")
        if header.previous_chunk != self._ledger.chain_head(agent, header.incarnation):
            raise _invalid("previous_chunk does not name this agent's previous chunk")
        if header.previous_manifest != self.manifest_digest(step - 1):
            raise _invalid(f"previous_manifest does not name the manifest of step {step - 1}")
        if not header.rollout_count and not header.final:
            raise _invalid("a chunk without rollouts can only be a step's last one")
        if len(own) >= self._run.chunks_per_agent:
            raise _exhausted(
                f"more than {self._run.chunks_per_agent} chunks in a step (limits.chunks_per_step, and one a prompt)"
            )
        total = sum(chunk.rollouts for chunk in own) + header.rollout_count
        if total > self._run.rollouts_per_agent:
            raise _exhausted(
                f"{total} rollouts in a step are over {self._run.rollouts_per_agent} (limits.rollouts_per_step, and "
                "prompts_per_step x group_size)"
            )
        if header.final and header.total_rollouts != total:
            raise _invalid(f"total_rollouts says {header.total_rollouts}, and the chunks hold {total}")
        return True

    def manifest_digest(self, step: int) -> str:
        """Digest of a closed step's manifest; the run's genesis digest for step -1."""
        digest = self._ledger.manifest_digest(step) if step >= 0 else self._ledger.meta("genesis")
        assert digest is not None, "asked for only after a first agent has joined, and of closed steps"
        return digest

    def _close_step(self) -> None:
        step = self._open_step
        manifest = Manifest(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._roster.run,
            step=step,
            previous_manifest=self.manifest_digest(step - 1),
            entries=_entries(self._roster.names, self._ledger.chunks(step)),
            closed_at_ms=time.time_ns() // 1_000_000,
        )
        payload = convert.manifest_to_payload(manifest)
        signed = envelope.sign(self._key, envelope.MANIFEST_TYPE, payload)
        self._ledger.append_manifest(step, digests.sha256_hex(payload), signed.SerializeToString(deterministic=True))
        self._open_step = step + 1
        self._barrier.next_step()
        self.changed.notify_all()


def _entries(agents: tuple[str, ...], chunks: list[StoredChunk]) -> tuple[ManifestEntry, ...]:
    """What counts: of each agent the incarnation that finished the step, else the latest that published in it."""
    entries = []
    for agent in agents:
        own = [chunk for chunk in chunks if chunk.agent == agent]
        if not own:
            entries.append(ManifestEntry(agent, Participation.ABSENT))
            continue
        final = [chunk.incarnation for chunk in own if chunk.final]
        incarnation = final[0] if final else max(chunk.incarnation for chunk in own)
        counted = [chunk for chunk in own if chunk.incarnation == incarnation]
        entries.append(
            ManifestEntry(
                agent,
                Participation.COMPLETE if final else Participation.PARTIAL,
                incarnation,
                sum(chunk.rollouts for chunk in counted),
                tuple(chunk.digest for chunk in counted),
            )
        )
    return tuple(entries)


def _invalid(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.INVALID_ARGUMENT, message)


def _precondition(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.FAILED_PRECONDITION, message)


def _exhausted(message: str) -> CallRefusedError:
    return CallRefusedError(grpc.StatusCode.RESOURCE_EXHAUSTED, message)
