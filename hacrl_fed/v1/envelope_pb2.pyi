from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Optional as _Optional

DESCRIPTOR: _descriptor.FileDescriptor

class Envelope(_message.Message):
    __slots__ = ("payload_type", "payload", "key_id", "signature")
    PAYLOAD_TYPE_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    KEY_ID_FIELD_NUMBER: _ClassVar[int]
    SIGNATURE_FIELD_NUMBER: _ClassVar[int]
    payload_type: str
    payload: bytes
    key_id: str
    signature: bytes
    def __init__(self, payload_type: _Optional[str] = ..., payload: _Optional[bytes] = ..., key_id: _Optional[str] = ..., signature: _Optional[bytes] = ...) -> None: ...

class CallToken(_message.Message):
    __slots__ = ("run_id", "agent", "method", "audience", "issued_at_ms", "incarnation")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    AUDIENCE_FIELD_NUMBER: _ClassVar[int]
    ISSUED_AT_MS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    agent: str
    method: str
    audience: str
    issued_at_ms: int
    incarnation: int
    def __init__(self, run_id: _Optional[str] = ..., agent: _Optional[str] = ..., method: _Optional[str] = ..., audience: _Optional[str] = ..., issued_at_ms: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...
