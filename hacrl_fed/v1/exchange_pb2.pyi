from hacrl_fed.v1 import envelope_pb2 as _envelope_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Chunk(_message.Message):
    __slots__ = ("header", "body")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    header: _envelope_pb2.Envelope
    body: bytes
    def __init__(self, header: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ..., body: _Optional[bytes] = ...) -> None: ...

class PublishResponse(_message.Message):
    __slots__ = ("duplicate",)
    DUPLICATE_FIELD_NUMBER: _ClassVar[int]
    duplicate: bool
    def __init__(self, duplicate: _Optional[bool] = ...) -> None: ...

class SubscribeRequest(_message.Message):
    __slots__ = ("first_step",)
    FIRST_STEP_FIELD_NUMBER: _ClassVar[int]
    first_step: int
    def __init__(self, first_step: _Optional[int] = ...) -> None: ...

class ExchangeEvent(_message.Message):
    __slots__ = ("chunk", "manifest")
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    chunk: Chunk
    manifest: _envelope_pb2.Envelope
    def __init__(self, chunk: _Optional[_Union[Chunk, _Mapping]] = ..., manifest: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ...) -> None: ...
