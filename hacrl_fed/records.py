"""Records that cross a boundary: frozen, and valid by construction (a bad value raises ValueError that names the field)."""

import math
import re
from dataclasses import dataclass, field
from enum import Enum

_DIGEST = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_U32 = 2**32
# A uniform choice among a million tokens has -14 nats; what is far below cannot be, and would overflow a float32.
_LEAST_MEAN_LOGP = -1000.0


def check_name(field_name: str, value: str) -> None:
    """Raises ValueError unless ``value`` is a name: 1 to 64 letters, digits, '.', '_' or '-', a letter or digit first."""
    if not _NAME.fullmatch(value):
        raise ValueError(f"{field_name} must be 1 to 64 letters, digits, '.', '_' or '-', not {value!r}")


def check_digest(field_name: str, value: str) -> None:
    """Raises ValueError unless ``value`` is a SHA-256 in lower-case hexadecimal."""
    if not _DIGEST.fullmatch(value):
        raise ValueError(f"{field_name} must be a SHA-256 in lower-case hexadecimal, not {value!r}")


def _check_u32(field_name: str, value: int, least: int = 0) -> None:
    if not least <= value < _U32:
        raise ValueError(f"{field_name} must be from {least} to 2^32 - 1, not {value}")


class FinishReason(Enum):
    """Why a completion ended: the policy's end-of-turn token, or the limit on new tokens."""

    STOP = "stop"
    LENGTH = "length"


class Participation(Enum):
    """What a manifest says of an agent's part in a step."""

    COMPLETE = "complete"
    PARTIAL = "partial"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Rollout:
    """One completion of one prompt with its verified reward and its log-prob under the source.

    Attributes:
        text: the completion, without the end-of-turn token.
        logp_sum: summed log-prob of the completion's tokens under the source, in nats.
        token_count: the source's tokens, the end-of-turn token included where the source finished.
        eos_only: the source emitted nothing but its end-of-turn token.
        token_ids: the source's ids, ``token_count`` long, or empty where they are not shared.
    """

    prompt_id: str
    sample_index: int
    text: str
    finish_reason: FinishReason
    reward: float
    logp_sum: float
    token_count: int
    eos_only: bool = False
    token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_digest("prompt_id", self.prompt_id)
        _check_u32("sample_index", self.sample_index)
        _check_u32("token_count", self.token_count, least=1)
        if not math.isfinite(self.reward):
            raise ValueError(f"reward must be finite, not {self.reward}")
        if not math.isfinite(self.logp_sum) or self.logp_sum > 0:
            raise ValueError(f"logp_sum must be finite and at most 0, not {self.logp_sum}")
        if self.logp_sum < _LEAST_MEAN_LOGP * self.token_count:
            raise ValueError(f"logp_sum must be at least {_LEAST_MEAN_LOGP} nats a token, not {self.logp_sum}")
        if self.token_ids and len(self.token_ids) != self.token_count:
            raise ValueError(
                f"token_ids must be {self.token_count} long, as token_count says, not {len(self.token_ids)}"
            )
        if any(not 0 <= token_id < _U32 for token_id in self.token_ids):
            raise ValueError("token_ids must be from 0 to 2^32 - 1")
        if self.eos_only and (self.text or self.token_count != 1 or self.finish_reason is not FinishReason.STOP):
            raise ValueError("eos_only goes with an empty text, one token and finish reason stop")

    @property
    def mean_logp(self) -> float:
        """Mean log-prob a token under the source, in nats."""
        return self.logp_sum / self.token_count


@dataclass(frozen=True, slots=True)
class SamplingParameters:
    """How completions were sampled. The algorithm's ratios assume the policy's own distribution: temperature 1, no cut."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        _check_u32("max_new_tokens", self.max_new_tokens, least=1)
        _check_u32("top_k", self.top_k)
        if not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be positive, not {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], not {self.top_p}")


@dataclass(frozen=True, slots=True)
class ChunkHeader:
    """The signed header of a chunk of rollouts. Digests are SHA-256 in lower-case hexadecimal.

    Attributes:
        chunk_index: within the step, from 0.
        total_rollouts: of the whole step; 0 unless ``final``.
        previous_chunk: digest of this incarnation's previous header; empty for its first.
        previous_manifest: digest of the previous step's manifest; the run's genesis digest at step 0.
        policy_step: optimizer updates behind the policy that generated.
    """

    protocol_version: int
    run_id: str
    step: int
    agent: str
    incarnation: int
    chunk_index: int
    final: bool
    rollout_count: int
    total_rollouts: int
    body_sha256: str
    previous_chunk: str
    previous_manifest: str
    sampling: SamplingParameters
    tokenizer_digest: str
    policy_step: int
    created_at_ms: int

    def __post_init__(self) -> None:
        check_name("run_id", self.run_id)
        check_name("agent", self.agent)
        _check_u32("step", self.step)
        _check_u32("incarnation", self.incarnation, least=1)
        _check_u32("chunk_index", self.chunk_index)
        _check_u32("rollout_count", self.rollout_count)
        _check_u32("total_rollouts", self.total_rollouts)
        _check_u32("policy_step", self.policy_step)
        if self.total_rollouts and not self.final:
            raise ValueError("total_rollouts must be 0 unless final is set")
        check_digest("body_sha256", self.body_sha256)
        check_digest("previous_manifest", self.previous_manifest)
        check_digest("tokenizer_digest", self.tokenizer_digest)
        if self.previous_chunk:
            check_digest("previous_chunk", self.previous_chunk)


@dataclass(frozen=True, slots=True)
class ManifestEntry:
    """One agent's part in a closed step: which of its chunks count, by the digests of their headers, in order."""

    agent: str
    participation: Participation
    incarnation: int = 0
    rollout_count: int = 0
    chunks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_name("agent", self.agent)
        _check_u32("incarnation", self.incarnation)
        _check_u32("rollout_count", self.rollout_count)
        for digest in self.chunks:
            check_digest("chunks", digest)
        if (self.participation is Participation.ABSENT) != (not self.chunks):
            raise ValueError("an absent agent has no chunks, and a present one has some")


@dataclass(frozen=True, slots=True)
class Manifest:
    """The coordinator's account of a closed step: all sites learn from exactly what it lists."""

    protocol_version: int
    run_id: str
    step: int
    previous_manifest: str
    entries: tuple[ManifestEntry, ...]
    closed_at_ms: int
    by_agent: dict[str, ManifestEntry] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_name("run_id", self.run_id)
        _check_u32("step", self.step)
        check_digest("previous_manifest", self.previous_manifest)
        by_agent = {entry.agent: entry for entry in self.entries}
        if len(by_agent) != len(self.entries):
            raise ValueError("entries must name each agent once")
        chunks = [digest for entry in self.entries for digest in entry.chunks]
        if len(set(chunks)) != len(chunks):
            raise ValueError("entries must list each chunk once")
        object.__setattr__(self, "by_agent", by_agent)


@dataclass(frozen=True, slots=True)
class CallToken:
    """What authenticates one RPC, once signed: short-lived, bound to the method and to the server."""

    run_id: str
    agent: str
    method: str
    audience: str
    issued_at_ms: int
    incarnation: int

    def __post_init__(self) -> None:
        check_name("run_id", self.run_id)
        check_name("agent", self.agent)
        _check_u32("incarnation", self.incarnation)
