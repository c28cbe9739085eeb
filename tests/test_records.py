"""Records refuse bad values, by the field's name."""

import math
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from hacrl_fed.records import (
    CallToken,
    ChunkHeader,
    FinishReason,
    Manifest,
    ManifestEntry,
    Participation,
    Rollout,
    SamplingParameters,
    check_digest,
    check_name,
)

DIGEST = "0123456789abcdef" * 4
OTHER = "f" * 64

GOOD: dict[type, dict[str, Any]] = {
    Rollout: {
        "prompt_id": DIGEST,
        "sample_index": 0,
        "text": "four",
        "finish_reason": FinishReason.STOP,
        "reward": 1.0,
        "logp_sum": -3.0,
        "token_count": 2,
    },
    SamplingParameters: {"max_new_tokens": 8},
    ChunkHeader: {
        "protocol_version": 1,
        "run_id": "demo",
        "step": 0,
        "agent": "alpha",
        "incarnation": 1,
        "chunk_index": 0,
        "final": False,
        "rollout_count": 2,
        "total_rollouts": 0,
        "body_sha256": DIGEST,
        "previous_chunk": "",
        "previous_manifest": DIGEST,
        "sampling": SamplingParameters(8),
        "tokenizer_digest": DIGEST,
        "policy_step": 0,
        "created_at_ms": 0,
    },
    ManifestEntry: {"agent": "alpha", "participation": Participation.COMPLETE, "incarnation": 1, "chunks": (DIGEST,)},
    Manifest: {
        "protocol_version": 1,
        "run_id": "demo",
        "step": 0,
        "previous_manifest": DIGEST,
        "entries": (ManifestEntry("alpha", Participation.ABSENT), ManifestEntry("beta", Participation.ABSENT)),
        "closed_at_ms": 0,
    },
    CallToken: {
        "run_id": "demo",
        "agent": "alpha",
        "method": "/a/b",
        "audience": "x",
        "issued_at_ms": 0,
        "incarnation": 0,
    },
}

BAD: list[tuple[type, dict[str, Any], str]] = [
    (Rollout, {"prompt_id": DIGEST.upper()}, "prompt_id must be a SHA-256"),
    (Rollout, {"sample_index": -1}, "sample_index must be from 0"),
    (Rollout, {"token_count": 0}, "token_count must be from 1"),
    (Rollout, {"token_count": 2**32}, "token_count must be from 1 to"),
    (Rollout, {"reward": math.nan}, "reward must be finite, not nan"),
    (Rollout, {"reward": math.inf}, "reward must be finite, not inf"),
    (Rollout, {"logp_sum": 0.1}, "logp_sum must be finite and at most 0"),
    (Rollout, {"logp_sum": -math.inf}, "logp_sum must be finite"),
    (Rollout, {"logp_sum": -2000.5}, "logp_sum must be at least -1000.0 nats a token"),
    (Rollout, {"logp_sum": math.nan}, "logp_sum must be finite"),
    (Rollout, {"token_ids": (1, 2, 3)}, "token_ids must be 2 long, as token_count says, not 3"),
    (Rollout, {"token_ids": (1, -1)}, "token_ids must be from 0"),
    (Rollout, {"eos_only": True}, "eos_only goes with an empty text"),
    (Rollout, {"eos_only": True, "text": ""}, "eos_only goes with"),
    (Rollout, {"eos_only": True, "text": "", "token_count": 1, "finish_reason": FinishReason.LENGTH}, "eos_only goes"),
    (SamplingParameters, {"max_new_tokens": 0}, "max_new_tokens must be from 1"),
    (SamplingParameters, {"temperature": 0.0}, "temperature must be positive"),
    (SamplingParameters, {"temperature": math.inf}, "temperature must be positive"),
    (SamplingParameters, {"temperature": math.nan}, "temperature must be positive"),
    (SamplingParameters, {"top_p": 0.0}, "top_p must be in"),
    (SamplingParameters, {"top_p": 1.1}, "top_p must be in"),
    (SamplingParameters, {"top_k": -1}, "top_k must be from 0"),
    (ChunkHeader, {"run_id": ""}, "run_id must be 1 to 64 letters"),
    (ChunkHeader, {"agent": "al pha"}, "agent must be"),
    (ChunkHeader, {"incarnation": 0}, "incarnation must be from 1"),
    (ChunkHeader, {"step": 2**32}, "step must be from 0"),
    (ChunkHeader, {"chunk_index": -1}, "chunk_index must be"),
    (ChunkHeader, {"rollout_count": -1}, "rollout_count must be"),
    (ChunkHeader, {"policy_step": -1}, "policy_step must be"),
    (ChunkHeader, {"total_rollouts": 2}, "total_rollouts must be 0 unless final"),
    (ChunkHeader, {"body_sha256": ""}, "body_sha256 must be"),
    (ChunkHeader, {"previous_manifest": ""}, "previous_manifest must be"),
    (ChunkHeader, {"tokenizer_digest": "x"}, "tokenizer_digest must be"),
    (ChunkHeader, {"previous_chunk": "x"}, "previous_chunk must be"),
    (ManifestEntry, {"agent": ""}, "agent must be"),
    (ManifestEntry, {"chunks": ()}, "a present one has some"),
    (ManifestEntry, {"participation": Participation.PARTIAL, "chunks": ()}, "a present one has some"),
    (ManifestEntry, {"participation": Participation.ABSENT}, "an absent agent has no chunks"),
    (ManifestEntry, {"chunks": ("x",)}, "chunks must be a SHA-256"),
    (ManifestEntry, {"rollout_count": -1}, "rollout_count must be"),
    (Manifest, {"run_id": "-"}, "run_id must be"),
    (Manifest, {"step": -1}, "step must be"),
    (Manifest, {"previous_manifest": ""}, "previous_manifest must be"),
    (Manifest, {"entries": (ManifestEntry("alpha", Participation.ABSENT),) * 2}, "must name each agent once"),
    (
        Manifest,
        {"entries": tuple(ManifestEntry(n, Participation.PARTIAL, 1, 1, (DIGEST,)) for n in ("a", "b"))},
        "must list each chunk once",
    ),
    (CallToken, {"run_id": "."}, "run_id must be"),
    (CallToken, {"agent": ""}, "agent must be"),
    (CallToken, {"incarnation": -1}, "incarnation must be"),
]


@pytest.mark.parametrize("kind", GOOD)
def test_a_good_record_is_made_and_frozen(kind: type) -> None:
    record = kind(**GOOD[kind])
    with pytest.raises(FrozenInstanceError):
        setattr(record, next(iter(GOOD[kind])), None)


@pytest.mark.parametrize(("kind", "change", "sentence"), BAD)
def test_a_bad_value_is_refused_by_name(kind: type, change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        kind(**(GOOD[kind] | change))


def test_a_rollouts_mean_is_over_its_tokens() -> None:
    assert Rollout(**GOOD[Rollout]).mean_logp == -1.5
    only = {"text": "", "token_count": 1, "logp_sum": -0.0, "eos_only": True, "token_ids": (7,)}
    assert Rollout(**(GOOD[Rollout] | only)).mean_logp == 0.0


def test_a_final_header_and_a_manifest_by_agent() -> None:
    assert ChunkHeader(**(GOOD[ChunkHeader] | {"final": True, "total_rollouts": 2, "previous_chunk": OTHER})).final
    manifest = Manifest(**GOOD[Manifest])
    assert manifest.by_agent == {entry.agent: entry for entry in manifest.entries}
    assert list(manifest.by_agent) == ["alpha", "beta"]


@pytest.mark.parametrize("name", ["a", "A.b_c-9", "0", "x" * 64])
def test_names(name: str) -> None:
    check_name("name", name)


@pytest.mark.parametrize("name", ["", ".a", "-a", "_a", "a/b", "a b", "é", "x" * 65, "a\n"])
def test_no_names(name: str) -> None:
    with pytest.raises(ValueError, match="name must be 1 to 64 letters"):
        check_name("name", name)


@pytest.mark.parametrize("digest", ["", DIGEST[:-1], DIGEST + "0", DIGEST + "\n", "g" * 64])
def test_no_digests(digest: str) -> None:
    with pytest.raises(ValueError, match="d must be a SHA-256"):
        check_digest("d", digest)
