"""Publishing own rollouts: chunks of whole groups, signed and sent in order by a thread, while later groups still generate."""

import contextlib
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.records import ChunkHeader, SamplingParameters
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed_client.admission import AdmittedChunk, AdmittedRollout
from hacrl_fed_client.inbox import Inbox
from hacrl_fed_client.session import Session, StepClosedError

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class OwnStep:
    """What the headers of a step's chunks say alike."""

    step: int
    previous_manifest: str
    policy_step: int


@dataclass(frozen=True, slots=True)
class _Job:
    own_step: OwnStep
    rollouts: tuple[AdmittedRollout, ...]
    final: bool


class Publisher:
    """Signs and sends what it is given, in order. The chain of headers goes on from what the coordinator has taken."""

    def __init__(
        self,
        session: Session,
        inbox: Inbox,
        key: Ed25519PrivateKey,
        run_id: str,
        agent: str,
        sampling: SamplingParameters,
        tokenizer_digest: str,
        chunk_bytes: int,
    ) -> None:
        self._session = session
        self._inbox = inbox
        self._key = key
        self._run_id = run_id
        self._agent = agent
        self._sampling = sampling
        self._tokenizer_digest = tokenizer_digest
        self._chunk_bytes = chunk_bytes
        self._jobs: queue.Queue[_Job] = queue.Queue()
        self._head = ""
        self._step = -1
        self._chunk_index = 0
        self._total = 0
        session.run_beside(self._send_all)

    def publish(self, own_step: OwnStep, groups: Sequence[Sequence[AdmittedRollout]], final: bool) -> None:
        """Queues whole groups as one chunk, or as several where they weigh too much for one."""
        batches = self._fitting(groups)
        for index, batch in enumerate(batches):
            self._jobs.put(_Job(own_step, batch, final and index == len(batches) - 1))

    def _fitting(self, groups: Sequence[Sequence[AdmittedRollout]]) -> list[tuple[AdmittedRollout, ...]]:
        batches: list[list[AdmittedRollout]] = [[]]
        size = 0
        for group in groups:
            weight = len(convert.rollouts_to_body([admitted.rollout for admitted in group]))
            if size + weight > self._chunk_bytes:
                batches.append([])
                size = 0
            batches[-1].extend(group)
            size += weight
        return [tuple(batch) for batch in batches if batch] or [()]

    def _send_all(self) -> None:
        while not self._session.is_closed:
            # The step's manifest says what counts of a step that was closed meanwhile.
            with contextlib.suppress(queue.Empty, StepClosedError):
                self._send(self._jobs.get(timeout=_POLL_S))

    def _send(self, job: _Job) -> None:
        if job.own_step.step != self._step:
            self._step, self._chunk_index, self._total = job.own_step.step, 0, 0
        body = convert.rollouts_to_body([admitted.rollout for admitted in job.rollouts])
        total = self._total + len(job.rollouts)
        header = ChunkHeader(
            protocol_version=PROTOCOL_VERSION,
            run_id=self._run_id,
            step=job.own_step.step,
            agent=self._agent,
            incarnation=self._session.incarnation,
            chunk_index=self._chunk_index,
            final=job.final,
            rollout_count=len(job.rollouts),
            total_rollouts=total if job.final else 0,
            body_sha256=digests.sha256_hex(body),
            previous_chunk=self._head,
            previous_manifest=job.own_step.previous_manifest,
            sampling=self._sampling,
            tokenizer_digest=self._tokenizer_digest,
            policy_step=job.own_step.policy_step,
            created_at_ms=time.time_ns() // 1_000_000,
        )
        payload = convert.header_to_payload(header)
        digest = digests.sha256_hex(payload)
        # Before it is sent: the manifest that lists it may come back at once.
        self._inbox.add_own(header.step, AdmittedChunk(header, digest, job.rollouts))
        signed = envelope.sign(self._key, envelope.CHUNK_HEADER_TYPE, payload)
        self._session.publish(header.step, exchange_pb2.Chunk(header=signed, body=body))
        self._head = digest
        self._chunk_index += 1
        self._total = total
