import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_fed.protocol import convert
from hacrl_fed.protocol.digests import sha256_hex
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
from hacrl_fed.v1 import chunk_pb2, exchange_pb2, manifest_pb2, rollout_pb2

U32 = st.integers(0, 2**32 - 1)
POSITIVE_U32 = st.integers(1, 2**32 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
DIGESTS = st.binary(min_size=32, max_size=32).map(bytes.hex)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]))  # all of Unicode that can be encoded
FINITE = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rollouts(draw):
    if draw(st.booleans()):
        text, count, finish, eos_only = "", 1, FinishReason.STOP, True
    else:
        text, count = draw(TEXTS), draw(st.integers(1, 8))
        finish, eos_only = draw(st.sampled_from(FinishReason)), False
    return Rollout(
        prompt_id=draw(DIGESTS),
        sample_index=draw(U32),
        text=text,
        finish_reason=finish,
        reward=draw(FINITE),
        logp_sum=draw(st.floats(-1000.0, 0)) * count,
        token_count=count,
        eos_only=eos_only,
        token_ids=tuple(draw(st.lists(U32, min_size=count, max_size=count))) if draw(st.booleans()) else (),
    )


@st.composite
def headers(draw):
    final = draw(st.booleans())
    return ChunkHeader(
        protocol_version=draw(U32),
        run_id=draw(NAMES),
        step=draw(U32),
        agent=draw(NAMES),
        incarnation=draw(POSITIVE_U32),
        chunk_index=draw(U32),
        final=final,
        rollout_count=draw(U32),
        total_rollouts=draw(U32) if final else 0,
        body_sha256=draw(DIGESTS),
        previous_chunk=draw(DIGESTS | st.just("")),
        previous_manifest=draw(DIGESTS),
        sampling=SamplingParameters(
            max_new_tokens=draw(POSITIVE_U32),
            temperature=draw(st.floats(0, exclude_min=True, allow_infinity=False)),
            top_p=draw(st.floats(0, 1, exclude_min=True)),
            top_k=draw(U32),
        ),
        tokenizer_digest=draw(DIGESTS),
        policy_step=draw(U32),
        created_at_ms=draw(I64),
    )


@st.composite
def entries(draw, agent):
    participation = draw(st.sampled_from(Participation))
    # Digests that name the agent, since a chunk may be listed under one only.
    chunks: tuple[str, ...] = ()
    if participation is not Participation.ABSENT:
        chunks = tuple(sha256_hex(f"{agent}/{number}".encode()) for number in range(draw(st.integers(1, 3))))
    return ManifestEntry(agent, participation, draw(U32), draw(U32), chunks)


@st.composite
def manifests(draw):
    agents = draw(st.lists(NAMES, max_size=3, unique=True))
    return Manifest(
        protocol_version=draw(U32),
        run_id=draw(NAMES),
        step=draw(U32),
        previous_manifest=draw(DIGESTS),
        entries=tuple(draw(entries(agent)) for agent in agents),
        closed_at_ms=draw(I64),
    )


TOKENS = st.builds(
    CallToken, run_id=NAMES, agent=NAMES, method=TEXTS, audience=TEXTS, issued_at_ms=I64, incarnation=U32
)

ROLLOUT = Rollout("0" * 64, 3, "forty-two", FinishReason.STOP, 1.0, -4.5, 3, token_ids=(7, 8, 9))
HEADER = ChunkHeader(
    1,
    "run",
    2,
    "alpha",
    1,
    0,
    True,
    1,
    1,
    "a" * 64,
    "",
    "b" * 64,
    SamplingParameters(64),
    "c" * 64,
    0,
    1_700_000_000_000,
)
MANIFEST = Manifest(
    1, "run", 2, "b" * 64, (ManifestEntry("alpha", Participation.COMPLETE, 1, 1, ("d" * 64,)),), 1_700_000_000_000
)
TOKEN = CallToken("run", "alpha", "/p.S/M", "localhost:1", 1_700_000_000_000, 1)

TO_BYTES_AND_BACK = [
    (convert.rollouts_to_body([ROLLOUT]), convert.rollouts_from_body),
    (convert.header_to_payload(HEADER), convert.header_from_payload),
    (convert.manifest_to_payload(MANIFEST), convert.manifest_from_payload),
    (convert.token_to_payload(TOKEN), convert.token_from_payload),
]


@given(st.lists(rollouts(), max_size=4))
def test_rollouts_come_back(records):
    body = convert.rollouts_to_body(records)
    assert convert.rollouts_from_body(body) == records
    assert convert.rollouts_to_body(convert.rollouts_from_body(body)) == body


@given(headers())
def test_headers_come_back(record):
    assert convert.header_from_payload(convert.header_to_payload(record)) == record


@given(manifests())
def test_manifests_come_back(record):
    assert convert.manifest_from_payload(convert.manifest_to_payload(record)) == record


@given(TOKENS)
def test_tokens_come_back(record):
    assert convert.token_from_payload(convert.token_to_payload(record)) == record


@given(st.text(), st.characters(categories=["Cs"]), st.text())
def test_a_lone_surrogate_cannot_be_sent(before, surrogate, after):
    with pytest.raises(ValueError, match="text cannot be sent"):
        convert.rollouts_to_body([dataclasses.replace(ROLLOUT, text=before + surrogate + after)])


@pytest.mark.parametrize(
    ("record", "send", "sentence"),
    [
        (dataclasses.replace(HEADER, protocol_version=2**32), convert.header_to_payload, "protocol_version cannot"),
        (dataclasses.replace(HEADER, created_at_ms=2**63), convert.header_to_payload, "created_at_ms cannot"),
        (dataclasses.replace(TOKEN, audience="\ud800"), convert.token_to_payload, "audience cannot"),
    ],
)
def test_a_value_that_does_not_fit_is_named(record, send, sentence):
    with pytest.raises(ValueError, match=sentence):
        send(record)


@given(st.binary(max_size=300), st.sampled_from([parse for _, parse in TO_BYTES_AND_BACK]))
def test_hostile_bytes_never_raise_anything_else(data, parse):
    try:
        parse(data)
    except ValueError:
        return
    assert (data, parse) == (b"", convert.rollouts_from_body)  # the one message that may be empty


@given(st.data(), st.sampled_from(TO_BYTES_AND_BACK))
def test_changed_bytes_are_another_record_or_refused(data, case):
    good, parse = case
    changed = bytearray(good)
    changed[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        record = parse(bytes(changed))
    except ValueError:
        return
    assert record != parse(good)


@pytest.mark.parametrize("case", TO_BYTES_AND_BACK)
@pytest.mark.parametrize(
    "hidden",
    [
        b"\x9a\x06\x01A",  # field 99, a text
        b"\x98\x06\x00",  # field 99, a number that is 0
    ],
)
def test_unknown_fields_are_refused(case, hidden):
    good, parse = case
    with pytest.raises(ValueError, match="hold more than the fields of"):
        parse(good + hidden)


@pytest.mark.parametrize("case", TO_BYTES_AND_BACK[1:])
def test_a_field_sent_twice_is_refused(case):
    # The last one counts in protobuf, so that the first could hide anything.
    good, parse = case
    with pytest.raises(ValueError, match="hold more than the fields of"):
        parse(good + good)


def test_unknown_fields_within_a_rollout_are_refused():
    inner = rollout_pb2.ChunkBody.FromString(convert.rollouts_to_body([ROLLOUT])).rollouts[0].SerializeToString()
    inner += b"\x9a\x06\x01A"
    body = b"\x0a" + bytes([len(inner)]) + inner
    with pytest.raises(ValueError, match="hold more than the fields of a ChunkBody"):
        convert.rollouts_from_body(body)


def test_unknown_fields_within_a_parsed_message_are_found():
    chunk = exchange_pb2.Chunk(body=b"x")
    convert.refuse_unknown_fields(chunk)
    chunk.header.MergeFromString(b"\x9a\x06\x01A")
    with pytest.raises(ValueError, match="Chunk holds fields that its schema lacks"):
        convert.refuse_unknown_fields(chunk)
    assert chunk.header.ByteSize() == 4  # the message itself is left as it was received


def body_of(**changes):
    good = rollout_pb2.ChunkBody.FromString(convert.rollouts_to_body([ROLLOUT, ROLLOUT]))
    for name, value in changes.items():
        if name == "token_ids":
            good.rollouts[1].token_ids[:] = value
        else:
            setattr(good.rollouts[1], name, value)
    return good.SerializeToString(deterministic=True)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prompt_id": "A" * 64}, "prompt_id must be a SHA-256"),
        ({"finish_reason": 0}, "finish_reason has no meaning for 0"),
        ({"finish_reason": 77}, "finish_reason has no meaning for 77"),
        ({"reward": math.nan}, "reward must be finite"),
        ({"reward": math.inf}, "reward must be finite"),
        ({"logp_sum": 0.5}, "logp_sum must be"),
        ({"logp_sum": -math.inf}, "logp_sum must be"),
        ({"logp_sum": -1e308}, "logp_sum must be"),
        ({"token_count": 0}, "token_count must be"),
        ({"token_ids": [1, 2]}, "token_ids must be 3 long"),
        ({"eos_only": True}, "eos_only goes with"),
    ],
)
def test_a_bad_value_names_the_rollout_and_the_field(change, sentence):
    with pytest.raises(ValueError, match=f"rollout 1: {sentence}"):
        convert.rollouts_from_body(body_of(**change))


def test_text_that_is_not_utf8_is_refused():
    body = convert.rollouts_to_body([ROLLOUT]).replace(b"forty-two", b"forty\xfftwo")
    with pytest.raises(ValueError, match="not a ChunkBody"):
        convert.rollouts_from_body(body)


def test_a_header_without_sampling_and_a_manifest_without_participation_are_refused():
    header = chunk_pb2.ChunkHeader.FromString(convert.header_to_payload(HEADER))
    header.ClearField("sampling")
    with pytest.raises(ValueError, match="max_new_tokens must be from 1"):
        convert.header_from_payload(header.SerializeToString(deterministic=True))
    manifest = manifest_pb2.Manifest.FromString(convert.manifest_to_payload(MANIFEST))
    manifest.entries[0].ClearField("participation")
    with pytest.raises(ValueError, match="participation has no meaning for 0"):
        convert.manifest_from_payload(manifest.SerializeToString(deterministic=True))
