"""No field of what sites exchange could carry a weight, and the committed code is what the schema generates."""

from pathlib import Path

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from grpc_tools import protoc

from hacrl_fed.v1 import chunk_pb2, envelope_pb2, exchange_pb2, manifest_pb2, rollout_pb2, session_pb2

ROOT = Path(__file__).parent.parent
MODULES = (rollout_pb2, chunk_pb2, manifest_pb2, session_pb2, exchange_pb2)
# Signed payloads, whose schema is checked by itself; and the body, whose schema is ChunkBody.
OPAQUE = {"Envelope.payload", "Envelope.signature", "Chunk.body"}
FLOATS = (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE)


def messages(descriptor: Descriptor, seen: dict[str, Descriptor]) -> dict[str, Descriptor]:
    """A message and all that it contains, by full name."""
    if descriptor.full_name not in seen:
        seen[descriptor.full_name] = descriptor
        for field in descriptor.fields:
            if field.message_type is not None:
                messages(field.message_type, seen)
    return seen


def reachable() -> list[Descriptor]:
    seen: dict[str, Descriptor] = {}
    for module in MODULES:
        for descriptor in module.DESCRIPTOR.message_types_by_name.values():
            messages(descriptor, seen)
    messages(envelope_pb2.CallToken.DESCRIPTOR, seen)
    return list(seen.values())


def named(field: FieldDescriptor) -> str:
    return f"{field.containing_type.name}.{field.name}"


FIELDS = [field for descriptor in reachable() for field in descriptor.fields]


def test_the_walk_reaches_messages_within_messages_and_maps():
    assert {"Rollout.reward", "SamplingParameters.top_p", "MetricsEntry.value", "Scalar.number"} <= set(
        map(named, FIELDS)
    )


def test_no_field_holds_a_list_of_numbers_with_a_fraction():
    assert [named(field) for field in FIELDS if field.is_repeated and field.type in FLOATS] == []


def test_no_list_of_messages_is_a_list_of_numbers_in_disguise():
    """A repeated message with a float in it is a rollout, or a map's entry, which has a name for each number."""
    lists = {
        named(field)
        for field in FIELDS
        if field.is_repeated
        and field.message_type is not None
        and not field.message_type.GetOptions().map_entry
        and any(inner.type in FLOATS for found in messages(field.message_type, {}).values() for inner in found.fields)
    }
    assert lists == {"ChunkBody.rollouts"}


def test_no_field_holds_opaque_bytes_but_the_signed_ones():
    assert {named(field) for field in FIELDS if field.type == FieldDescriptor.TYPE_BYTES} == OPAQUE


def test_nothing_is_typed_outside_this_schema():
    """No Any, Struct or extension, in which anything would fit."""
    assert {descriptor.file.package for descriptor in reachable()} == {"hacrl_fed.v1"}
    assert not any(descriptor.is_extendable for descriptor in reachable())


def test_the_committed_code_is_what_the_schema_generates(tmp_path):
    protos = sorted((ROOT / "protos/hacrl_fed/v1").glob("*.proto"))
    arguments = [f"-I{ROOT / 'protos'}", *(f"--{kind}_out={tmp_path}" for kind in ("python", "pyi", "grpc_python"))]
    assert protoc.main(["protoc", *arguments, *map(str, protos)]) == 0
    generated = {path.name: path.read_text() for path in (tmp_path / "hacrl_fed/v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "hacrl_fed/v1").glob("*_pb2*.py*")}
    assert len(generated) == 3 * len(protos)
    assert generated == committed, "run make protos"


def test_the_only_list_of_numbers_is_bounded():
    """Token ids: records.Rollout refuses another length than its token count."""
    lists = [field for field in FIELDS if field.is_repeated and field.cpp_type <= FieldDescriptor.CPPTYPE_FLOAT]
    assert [named(field) for field in lists] == ["Rollout.token_ids"]
