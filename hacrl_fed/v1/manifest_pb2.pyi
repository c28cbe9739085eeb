from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Participation(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PARTICIPATION_UNSPECIFIED: _ClassVar[Participation]
    PARTICIPATION_COMPLETE: _ClassVar[Participation]
    PARTICIPATION_PARTIAL: _ClassVar[Participation]
    PARTICIPATION_ABSENT: _ClassVar[Participation]
PARTICIPATION_UNSPECIFIED: Participation
PARTICIPATION_COMPLETE: Participation
PARTICIPATION_PARTIAL: Participation
PARTICIPATION_ABSENT: Participation

class ManifestEntry(_message.Message):
    __slots__ = ("agent", "participation", "incarnation", "rollout_count", "chunks")
    AGENT_FIELD_NUMBER: _ClassVar[int]
    PARTICIPATION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    agent: str
    participation: Participation
    incarnation: int
    rollout_count: int
    chunks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, agent: _Optional[str] = ..., participation: _Optional[_Union[Participation, str]] = ..., incarnation: _Optional[int] = ..., rollout_count: _Optional[int] = ..., chunks: _Optional[_Iterable[str]] = ...) -> None: ...

class Manifest(_message.Message):
    __slots__ = ("protocol_version", "run_id", "step", "previous_manifest", "entries", "closed_at_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    CLOSED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    run_id: str
    step: int
    previous_manifest: str
    entries: _containers.RepeatedCompositeFieldContainer[ManifestEntry]
    closed_at_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., previous_manifest: _Optional[str] = ..., entries: _Optional[_Iterable[_Union[ManifestEntry, _Mapping]]] = ..., closed_at_ms: _Optional[int] = ...) -> None: ...
