"""Between records and protobuf: the one module that touches the generated classes of what is signed.

Bytes that arrive must be exactly what these functions would write (fields in order, none twice, none unknown), so that
nothing rides along unseen. All functions raise ValueError, and name the field, for a value or bytes that do not fit.
"""

import copy
from typing import Any, TypeVar

from google.protobuf.message import DecodeError, Message

from hacrl_fed.records import (
    CallToken,
    ChunkHeader,
    FinishReason,
    Manifest,
    ManifestEntry,
    Participation,
    Rollout,
    SamplingParameters,
)
from hacrl_fed.v1 import chunk_pb2, envelope_pb2, manifest_pb2, rollout_pb2

M = TypeVar("M", bound=Message)

_FINISH_REASONS = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
}
_PARTICIPATIONS = {
    Participation.COMPLETE: manifest_pb2.PARTICIPATION_COMPLETE,
    Participation.PARTIAL: manifest_pb2.PARTICIPATION_PARTIAL,
    Participation.ABSENT: manifest_pb2.PARTICIPATION_ABSENT,
}


def rollouts_to_body(rollouts: list[Rollout]) -> bytes:
    """The body of a chunk."""
    return _serialize(_build(rollout_pb2.ChunkBody, rollouts=[_rollout_to_proto(rollout) for rollout in rollouts]))


def rollouts_from_body(body: bytes) -> list[Rollout]:
    """Raises ValueError that also says which rollout is at fault, counted from 0."""
    rollouts = []
    for index, proto in enumerate(parse_exact(rollout_pb2.ChunkBody, body).rollouts):
        try:
            rollouts.append(_rollout_from_proto(proto))
        except ValueError as error:
            raise ValueError(f"rollout {index}: {error}") from None
    return rollouts


def header_to_payload(header: ChunkHeader) -> bytes:
    """The payload of a chunk's envelope."""
    return _serialize(
        _build(
            chunk_pb2.ChunkHeader,
            protocol_version=header.protocol_version,
            run_id=header.run_id,
            step=header.step,
            agent=header.agent,
            incarnation=header.incarnation,
            chunk_index=header.chunk_index,
            final=header.final,
            rollout_count=header.rollout_count,
            total_rollouts=header.total_rollouts,
            body_sha256=header.body_sha256,
            previous_chunk=header.previous_chunk,
            previous_manifest=header.previous_manifest,
            sampling=_build(
                chunk_pb2.SamplingParameters,
                temperature=header.sampling.temperature,
                top_p=header.sampling.top_p,
                top_k=header.sampling.top_k,
                max_new_tokens=header.sampling.max_new_tokens,
            ),
            tokenizer_digest=header.tokenizer_digest,
            policy_step=header.policy_step,
            created_at_ms=header.created_at_ms,
        )
    )


def header_from_payload(payload: bytes) -> ChunkHeader:
    """The header in the payload of a chunk's envelope."""
    proto = parse_exact(chunk_pb2.ChunkHeader, payload)
    return ChunkHeader(
        protocol_version=proto.protocol_version,
        run_id=proto.run_id,
        step=proto.step,
        agent=proto.agent,
        incarnation=proto.incarnation,
        chunk_index=proto.chunk_index,
        final=proto.final,
        rollout_count=proto.rollout_count,
        total_rollouts=proto.total_rollouts,
        body_sha256=proto.body_sha256,
        previous_chunk=proto.previous_chunk,
        previous_manifest=proto.previous_manifest,
        sampling=SamplingParameters(
            max_new_tokens=proto.sampling.max_new_tokens,
            temperature=proto.sampling.temperature,
            top_p=proto.sampling.top_p,
            top_k=proto.sampling.top_k,
        ),
        tokenizer_digest=proto.tokenizer_digest,
        policy_step=proto.policy_step,
        created_at_ms=proto.created_at_ms,
    )


def manifest_to_payload(manifest: Manifest) -> bytes:
    """The payload of a manifest's envelope."""
    entries = [
        _build(
            manifest_pb2.ManifestEntry,
            agent=entry.agent,
            participation=_PARTICIPATIONS[entry.participation],
            incarnation=entry.incarnation,
            rollout_count=entry.rollout_count,
            chunks=entry.chunks,
        )
        for entry in manifest.entries
    ]
    return _serialize(
        _build(
            manifest_pb2.Manifest,
            protocol_version=manifest.protocol_version,
            run_id=manifest.run_id,
            step=manifest.step,
            previous_manifest=manifest.previous_manifest,
            entries=entries,
            closed_at_ms=manifest.closed_at_ms,
        )
    )


def manifest_from_payload(payload: bytes) -> Manifest:
    """The manifest in the payload of its envelope."""
    proto = parse_exact(manifest_pb2.Manifest, payload)
    return Manifest(
        protocol_version=proto.protocol_version,
        run_id=proto.run_id,
        step=proto.step,
        previous_manifest=proto.previous_manifest,
        entries=tuple(
            ManifestEntry(
                agent=entry.agent,
                participation=_member("participation", _PARTICIPATIONS, entry.participation),
                incarnation=entry.incarnation,
                rollout_count=entry.rollout_count,
                chunks=tuple(entry.chunks),
            )
            for entry in proto.entries
        ),
        closed_at_ms=proto.closed_at_ms,
    )


def token_to_payload(token: CallToken) -> bytes:
    """The payload of a call token's envelope."""
    return _serialize(
        _build(
            envelope_pb2.CallToken,
            run_id=token.run_id,
            agent=token.agent,
            method=token.method,
            audience=token.audience,
            issued_at_ms=token.issued_at_ms,
            incarnation=token.incarnation,
        )
    )


def token_from_payload(payload: bytes) -> CallToken:
    """The call token in the payload of its envelope."""
    proto = parse_exact(envelope_pb2.CallToken, payload)
    return CallToken(
        run_id=proto.run_id,
        agent=proto.agent,
        method=proto.method,
        audience=proto.audience,
        issued_at_ms=proto.issued_at_ms,
        incarnation=proto.incarnation,
    )


def parse_exact(kind: type[M], data: bytes) -> M:
    """Raises ValueError unless ``data`` is a message of ``kind`` exactly as this code would serialise it."""
    name = kind.DESCRIPTOR.name
    try:
        message = kind.FromString(data)
    except DecodeError as error:
        raise ValueError(f"these bytes are not a {name}: {error}") from None
    # Unknown fields survive a round trip, and so must go first; a field sent twice (the first is overwritten) or a
    # number with needless bytes does not survive it.
    message.DiscardUnknownFields()
    if _serialize(message) != data:
        raise ValueError(f"these bytes hold more than the fields of a {name}")
    return message


def refuse_unknown_fields(message: Message) -> None:
    """Raises ValueError where a received message, or one within it, holds fields that its schema lacks."""
    known = copy.copy(message)
    known.DiscardUnknownFields()
    if known.ByteSize() != message.ByteSize():
        raise ValueError(f"the {message.DESCRIPTOR.name} holds fields that its schema lacks")


def _rollout_to_proto(rollout: Rollout) -> rollout_pb2.Rollout:
    return _build(
        rollout_pb2.Rollout,
        prompt_id=rollout.prompt_id,
        sample_index=rollout.sample_index,
        text=rollout.text,
        finish_reason=_FINISH_REASONS[rollout.finish_reason],
        reward=rollout.reward,
        logp_sum=rollout.logp_sum,
        token_count=rollout.token_count,
        eos_only=rollout.eos_only,
        token_ids=rollout.token_ids,
    )


def _rollout_from_proto(proto: rollout_pb2.Rollout) -> Rollout:
    return Rollout(
        prompt_id=proto.prompt_id,
        sample_index=proto.sample_index,
        text=proto.text,
        finish_reason=_member("finish_reason", _FINISH_REASONS, proto.finish_reason),
        reward=proto.reward,
        logp_sum=proto.logp_sum,
        token_count=proto.token_count,
        eos_only=proto.eos_only,
        token_ids=tuple(proto.token_ids),
    )


E = TypeVar("E")


def _member(field_name: str, numbers: dict[E, Any], number: int) -> E:
    for member, known in numbers.items():
        if known == number:
            return member
    raise ValueError(f"{field_name} has no meaning for {number}")


def _build(kind: type[M], **fields: Any) -> M:
    try:
        return kind(**fields)
    except ValueError:
        # Protobuf's own message does not name the field.
        for name, value in fields.items():
            try:
                kind(**{name: value})
            except ValueError as error:
                raise ValueError(f"{name} cannot be sent: {error}") from None
        raise


def _serialize(message: Message) -> bytes:
    return message.SerializeToString(deterministic=True)
