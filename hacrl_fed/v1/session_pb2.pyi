from hacrl_fed.v1 import envelope_pb2 as _envelope_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetRunRequest(_message.Message):
    __slots__ = ("protocol_version", "roster_digest")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROSTER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    roster_digest: str
    def __init__(self, protocol_version: _Optional[int] = ..., roster_digest: _Optional[str] = ...) -> None: ...

class GetRunResponse(_message.Message):
    __slots__ = ("run_config",)
    RUN_CONFIG_FIELD_NUMBER: _ClassVar[int]
    run_config: _envelope_pb2.Envelope
    def __init__(self, run_config: _Optional[_Union[_envelope_pb2.Envelope, _Mapping]] = ...) -> None: ...

class JoinRequest(_message.Message):
    __slots__ = ("task_digest", "instance_id")
    TASK_DIGEST_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_ID_FIELD_NUMBER: _ClassVar[int]
    task_digest: str
    instance_id: str
    def __init__(self, task_digest: _Optional[str] = ..., instance_id: _Optional[str] = ...) -> None: ...

class JoinResponse(_message.Message):
    __slots__ = ("incarnation", "open_step", "open_step_finished")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEP_FIELD_NUMBER: _ClassVar[int]
    OPEN_STEP_FINISHED_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    open_step: int
    open_step_finished: bool
    def __init__(self, incarnation: _Optional[int] = ..., open_step: _Optional[int] = ..., open_step_finished: _Optional[bool] = ...) -> None: ...

class Scalar(_message.Message):
    __slots__ = ("number", "integer", "boolean", "text")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    number: float
    integer: int
    boolean: bool
    text: str
    def __init__(self, number: _Optional[float] = ..., integer: _Optional[int] = ..., boolean: _Optional[bool] = ..., text: _Optional[str] = ...) -> None: ...

class FlowerMessage(_message.Message):
    __slots__ = ("message_id", "reply_to_message_id", "message_type", "group_id", "created_at", "ttl", "config", "metrics", "error_code", "error_reason")
    class ConfigEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Scalar
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Scalar, _Mapping]] = ...) -> None: ...
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Scalar
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Scalar, _Mapping]] = ...) -> None: ...
    MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    REPLY_TO_MESSAGE_ID_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_TYPE_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    CONFIG_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    ERROR_CODE_FIELD_NUMBER: _ClassVar[int]
    ERROR_REASON_FIELD_NUMBER: _ClassVar[int]
    message_id: str
    reply_to_message_id: str
    message_type: str
    group_id: str
    created_at: float
    ttl: float
    config: _containers.MessageMap[str, Scalar]
    metrics: _containers.MessageMap[str, Scalar]
    error_code: int
    error_reason: str
    def __init__(self, message_id: _Optional[str] = ..., reply_to_message_id: _Optional[str] = ..., message_type: _Optional[str] = ..., group_id: _Optional[str] = ..., created_at: _Optional[float] = ..., ttl: _Optional[float] = ..., config: _Optional[_Mapping[str, Scalar]] = ..., metrics: _Optional[_Mapping[str, Scalar]] = ..., error_code: _Optional[int] = ..., error_reason: _Optional[str] = ...) -> None: ...

class AttendRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Status(_message.Message):
    __slots__ = ("step", "text", "present", "awaited")
    STEP_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PRESENT_FIELD_NUMBER: _ClassVar[int]
    AWAITED_FIELD_NUMBER: _ClassVar[int]
    step: int
    text: str
    present: _containers.RepeatedScalarFieldContainer[str]
    awaited: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, step: _Optional[int] = ..., text: _Optional[str] = ..., present: _Optional[_Iterable[str]] = ..., awaited: _Optional[_Iterable[str]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class SessionEvent(_message.Message):
    __slots__ = ("order", "status", "finished")
    ORDER_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    order: FlowerMessage
    status: Status
    finished: Finished
    def __init__(self, order: _Optional[_Union[FlowerMessage, _Mapping]] = ..., status: _Optional[_Union[Status, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ...) -> None: ...

class ReplyResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class HeartbeatRequest(_message.Message):
    __slots__ = ("step", "phase")
    STEP_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    step: int
    phase: str
    def __init__(self, step: _Optional[int] = ..., phase: _Optional[str] = ...) -> None: ...

class HeartbeatResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StepReport(_message.Message):
    __slots__ = ("step", "metrics")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    step: int
    metrics: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., metrics: _Optional[_Mapping[str, float]] = ...) -> None: ...

class StepReportResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
