"""What has come in, step by step: a thread reads the coordinator's log, admits it, and the site waits here for manifests."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import Manifest
from hacrl_fed.v1 import envelope_pb2, exchange_pb2
from hacrl_fed_client.admission import Admission, AdmittedChunk, AdmittedRollout, ChunkRefusedError, StepExpectation

_log = logging.getLogger(__name__)

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """A step's manifest with its digest, and the admitted chunks by the digests of their headers."""

    manifest: Manifest
    digest: str
    chunks: dict[str, AdmittedChunk]

    def rollouts(self) -> tuple[list[AdmittedRollout], int]:
        """All rollouts that the manifest lists and this site admitted, and how many listed chunks it lacks."""
        listed = [digest for entry in self.manifest.entries for digest in entry.chunks]
        found = [self.chunks[digest] for digest in listed if digest in self.chunks]
        return [rollout for chunk in found for rollout in chunk.rollouts], len(listed) - len(found)


class Inbox:
    """Chunks and manifests of the open step and of closed ones not yet taken."""

    def __init__(
        self,
        roster: Roster,
        admission: Admission,
        expect: Callable[[int, str], StepExpectation],
        first_step: int,
        previous_manifest: str,
    ) -> None:
        """``expect(step, previous manifest's digest)`` says what a step's chunks must match."""
        self._roster = roster
        self._admission = admission
        self._expect = expect
        self._changed = threading.Condition()
        self._reading = expect(first_step, previous_manifest)
        self._seen: set[str] = set()  # of the step being read: a stream that was taken up again repeats them
        self._chunks: dict[int, dict[str, AdmittedChunk]] = {}
        self._closed: dict[int, ClosedStep] = {}

    @property
    def reading_step(self) -> int:
        """The step whose events come next; a stream that broke is taken up again from here."""
        return self._reading.step

    def read(self, events: Iterable[exchange_pb2.ExchangeEvent]) -> None:
        """Takes events until they end; runs on a thread of its own.

        Raises HacrlFedError where the coordinator's log does not hold together.
        """
        for event in events:
            if event.WhichOneof("event") == "manifest":
                self._take_manifest(event.manifest)
            else:
                self._take_chunk(event.chunk)

    def add_own(self, step: int, chunk: AdmittedChunk) -> None:
        """A chunk that this process itself publishes, and so need not admit."""
        with self._changed:
            self._chunks.setdefault(step, {})[chunk.digest] = chunk

    def has_closed(self, step: int) -> bool:
        """Whether the step's manifest has come."""
        with self._changed:
            return step in self._closed

    def wait_closed(self, step: int, deadline_s: float, check: Callable[[], None]) -> ClosedStep:
        """The step, once its manifest has come. ``check`` may raise to end the wait.

        Raises HacrlFedError after ``deadline_s``.
        """
        deadline = time.monotonic() + deadline_s
        while True:
            check()
            with self._changed:
                if step in self._closed:
                    return self._closed[step]
                if time.monotonic() > deadline:
                    raise HacrlFedError(f"the manifest of step {step} did not come within {deadline_s:.0f} s")
                self._changed.wait(_POLL_S)

    def forget(self, step: int) -> None:
        """Drops a step that has been learned from."""
        with self._changed:
            self._closed.pop(step, None)
            self._chunks.pop(step, None)

    def _take_chunk(self, message: exchange_pb2.Chunk) -> None:
        step, digest = self._reading.step, digests.payload_digest(message.header)
        if digest in self._seen:
            return
        self._seen.add(digest)
        try:
            chunk = self._admission.admit(message, self._reading)
        except ChunkRefusedError:
            return  # counted and logged by the admission
        with self._changed:
            self._chunks.setdefault(step, {})[chunk.digest] = chunk

    def _take_manifest(self, signed: envelope_pb2.Envelope) -> None:
        step, previous = self._reading.step, self._reading.previous_manifest
        try:
            payload = envelope.open_envelope(signed, self._roster.coordinator_key, envelope.MANIFEST_TYPE)
            manifest = convert.manifest_from_payload(payload)
        except ValueError as error:
            raise HacrlFedError(f"the coordinator's manifest of step {step} is not valid: {error}") from None
        if (manifest.run_id, manifest.step) != (self._roster.run, step):
            raise HacrlFedError(
                f"the coordinator gave the manifest of run {manifest.run_id}, step {manifest.step}, for step {step}"
            )
        if manifest.previous_manifest != previous:
            raise HacrlFedError(
                f"the coordinator's manifest of step {step} does not follow the one that this site has of the step before: "
                "it tells sites different things, or its run folder was replaced"
            )
        if manifest.protocol_version != PROTOCOL_VERSION:
            raise HacrlFedError(f"the coordinator's manifest of step {step} is of protocol {manifest.protocol_version}")
        digest = digests.sha256_hex(payload)
        self._admission.forget(step)
        self._reading = self._expect(step + 1, digest)
        self._seen.clear()
        with self._changed:
            chunks = self._chunks.pop(step, {})
            _check_listed(manifest, chunks)
            self._closed[step] = ClosedStep(manifest, digest, chunks)
            self._changed.notify_all()


def _check_listed(manifest: Manifest, chunks: Mapping[str, AdmittedChunk]) -> None:
    for entry in manifest.entries:
        for digest in entry.chunks:
            header = chunks[digest].header if digest in chunks else None
            if header and (header.agent, header.incarnation) != (entry.agent, entry.incarnation):
                raise HacrlFedError(
                    f"the coordinator's manifest of step {manifest.step} lists a chunk of {header.agent} under {entry.agent}"
                )
