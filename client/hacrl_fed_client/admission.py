"""What a site checks before it learns from a peer. Every refusal is named and counted; none is fatal to the run.

A chunk is checked as a whole first (who signed it, where it belongs, whether it is the one that the header names), then
rollout by rollout. Rewards are recomputed by the site's own verifier from its own gold answers, and the site's value is used.
"""

import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hacrl_fed import PROTOCOL_VERSION
from hacrl_fed.config import WireLimits
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import ChunkHeader, FinishReason, Rollout
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.v1 import exchange_pb2
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.retokenize import Retokenizer

_log = logging.getLogger(__name__)

_SAME_REWARD = 1e-6


class ChunkRefusedError(Exception):
    """A chunk that this site does not learn from."""

    def __init__(self, agent: str, reason: str, detail: str) -> None:
        super().__init__(f"{agent}: {reason}: {detail}")
        self.agent = agent
        self.reason = reason


@dataclass(frozen=True, slots=True)
class AdmittedRollout:
    """A rollout that passed: its reward is the site's own, its ids are the learner's (its end-of-turn token included)."""

    source: str
    rollout: Rollout
    completion_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class AdmittedChunk:
    """What is left of a chunk after admission. ``digest`` is that of its header."""

    header: ChunkHeader
    digest: str
    rollouts: tuple[AdmittedRollout, ...]


@dataclass(frozen=True, slots=True)
class StepExpectation:
    """What a chunk of a step must match: the previous manifest's digest and the step's prompts by id."""

    step: int
    previous_manifest: str
    prompts: Mapping[str, Prompt]


class Admission:
    """The checks of one site, with what they remember: the heads of the sources' chains and the counts of refusals."""

    def __init__(
        self,
        learner: str,
        roster: Roster,
        limits: WireLimits,
        group_size: int,
        max_new_tokens: int,
        verifiers: VerifierPool,
        retokenizer: Retokenizer,
        tokenizer_digest: str,
    ) -> None:
        self._learner = learner
        self._roster = roster
        self._limits = limits
        self._group_size = group_size
        self._max_new_tokens = max_new_tokens
        self._verifiers = verifiers
        self._retokenizer = retokenizer
        self._tokenizer_digest = tokenizer_digest
        self._heads: dict[tuple[str, int], str] = {}
        self._incarnations: dict[str, int] = {}
        self._chunk_counts: Counter[tuple[str, int, int]] = Counter()
        self._samples: dict[tuple[str, int, int], set[tuple[str, int]]] = {}
        self.refused: Counter[tuple[str, str]] = Counter()
        self.reward_disagreements: Counter[str] = Counter()

    def admit(self, chunk: exchange_pb2.Chunk, expectation: StepExpectation) -> AdmittedChunk:
        """Checks a chunk of the expected step. Raises ChunkRefusedError, which it has counted."""
        try:
            header, digest = self._check_header(chunk, expectation)
            rollouts = self._check_body(header, chunk.body)
        except ChunkRefusedError as refusal:
            self.refused[refusal.agent, refusal.reason] += 1
            _log.warning("refused a chunk of %s", refusal)
            raise
        return AdmittedChunk(header, digest, tuple(self._check_rollouts(header, rollouts, expectation)))

    def _check_header(self, chunk: exchange_pb2.Chunk, expectation: StepExpectation) -> tuple[ChunkHeader, str]:
        # The header names its agent, whose key then has to have signed these very bytes.
        try:
            header = convert.header_from_payload(chunk.header.payload)
        except ValueError as error:
            raise ChunkRefusedError("unknown", "malformed", str(error)) from None
        agent = header.agent
        if agent not in self._roster.names:
            raise ChunkRefusedError("unknown", "roster", f"{agent} is not in this site's roster")
        try:
            payload = envelope.open_envelope(chunk.header, self._roster.agent(agent).key, envelope.CHUNK_HEADER_TYPE)
        except envelope.SignatureError as error:
            raise ChunkRefusedError(agent, "signature", str(error)) from None
        if header.protocol_version != PROTOCOL_VERSION:
            raise ChunkRefusedError(agent, "version", f"protocol version {header.protocol_version}")
        if header.run_id != self._roster.run:
            raise ChunkRefusedError(agent, "run", f"of run {header.run_id}")
        if header.step != expectation.step:
            raise ChunkRefusedError(agent, "step", f"of step {header.step}, not {expectation.step}")
        digest = digests.sha256_hex(payload)
        self._check_order(header, digest)
        if header.previous_manifest != expectation.previous_manifest:
            raise ChunkRefusedError(
                agent, "manifest", "the coordinator gave it another account of the previous step than this site"
            )
        return header, digest

    def _check_order(self, header: ChunkHeader, digest: str) -> None:
        agent, incarnation = header.agent, header.incarnation
        if incarnation < self._incarnations.get(agent, 0):
            raise ChunkRefusedError(agent, "incarnation", f"incarnation {incarnation} has been superseded")
        self._incarnations[agent] = incarnation
        head = self._heads.get((agent, incarnation))
        # The chain goes on from this chunk in either case, so that one lost chunk is one refusal.
        self._heads[agent, incarnation] = digest
        if head == digest:
            raise ChunkRefusedError(agent, "replay", f"chunk {header.chunk_index} of step {header.step} came twice")
        if head is not None and header.previous_chunk != head:
            raise ChunkRefusedError(agent, "chain", f"chunk {header.chunk_index} does not follow the one before it")
        place = agent, incarnation, header.step
        expected = self._chunk_counts[place]
        self._chunk_counts[place] = header.chunk_index + 1
        if header.chunk_index != expected:
            raise ChunkRefusedError(agent, "order", f"chunk {header.chunk_index} came where {expected} was next")

    def _check_body(self, header: ChunkHeader, body: bytes) -> list[Rollout]:
        agent = header.agent
        if len(body) > self._limits.chunk_bytes:
            raise ChunkRefusedError(agent, "limits", f"a chunk of {len(body)} bytes")
        if digests.sha256_hex(body) != header.body_sha256:
            raise ChunkRefusedError(agent, "digest", "the body is not the one that was signed")
        try:
            rollouts = convert.rollouts_from_body(body)
        except ValueError as error:
            raise ChunkRefusedError(agent, "malformed", str(error)) from None
        if len(rollouts) != header.rollout_count:
            raise ChunkRefusedError(
                agent, "count", f"{len(rollouts)} rollouts, and the header says {header.rollout_count}"
            )
        return rollouts

    def _check_rollouts(
        self, header: ChunkHeader, rollouts: list[Rollout], expectation: StepExpectation
    ) -> Iterable[AdmittedRollout]:
        agent = header.agent
        seen = self._samples.setdefault((agent, header.incarnation, header.step), set())
        kept: list[Rollout] = []
        for rollout in rollouts:
            reason = self._fault(rollout, expectation, seen)
            if reason:
                self.refused[agent, reason] += 1
                continue
            seen.add((rollout.prompt_id, rollout.sample_index))
            kept.append(rollout)
        verdicts = self._verifiers.verify_all([(expectation.prompts[r.prompt_id], r.text) for r in kept])
        verified = []
        for rollout, verdict in zip(kept, verdicts, strict=True):
            if verdict.reward is None:
                self.refused[agent, "unverifiable"] += 1
                continue
            if abs(verdict.reward - rollout.reward) > _SAME_REWARD:
                self.reward_disagreements[agent] += 1
            verified.append(replace(rollout, reward=verdict.reward))
        return self._tokenise(header, verified)

    def _fault(self, rollout: Rollout, expectation: StepExpectation, seen: set[tuple[str, int]]) -> str | None:
        """Why a rollout is refused. Its numbers are finite and its text is UTF-8, or it would not be a record."""
        if rollout.prompt_id not in expectation.prompts:
            return "prompt"
        if rollout.sample_index >= self._group_size or (rollout.prompt_id, rollout.sample_index) in seen:
            return "sample"
        if len(rollout.text.encode()) > self._limits.text_bytes or rollout.token_count > self._max_new_tokens:
            return "limits"
        return None

    def _tokenise(self, header: ChunkHeader, rollouts: list[Rollout]) -> Iterable[AdmittedRollout]:
        agent = header.agent
        as_text = []
        for rollout in rollouts:
            if header.tokenizer_digest == self._tokenizer_digest and rollout.token_ids:
                # Its own ids may be of special tokens too: an earlier process of this site sampled them.
                if agent == self._learner or self._retokenizer.reads_as(
                    rollout.token_ids, rollout.text, rollout.finish_reason
                ):
                    yield AdmittedRollout(agent, rollout, rollout.token_ids)
                else:
                    self.refused[agent, "tokens"] += 1
            else:
                as_text.append(rollout)
        finished = [rollout.finish_reason is FinishReason.STOP for rollout in as_text]
        completions = self._retokenizer.encode([rollout.text for rollout in as_text], finished)
        for rollout, completion_ids in zip(as_text, completions, strict=True):
            if completion_ids:
                yield AdmittedRollout(agent, rollout, tuple(completion_ids))
            else:
                self.refused[agent, "empty"] += 1

    def forget(self, step: int) -> None:
        """Drops what is remembered of a step that is over; the chains go on."""
        self._chunk_counts = Counter({key: n for key, n in self._chunk_counts.items() if key[2] != step})
        self._samples = {key: samples for key, samples in self._samples.items() if key[2] != step}
