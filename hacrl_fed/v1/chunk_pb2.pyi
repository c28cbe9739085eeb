from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SamplingParameters(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_new_tokens")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_new_tokens: int
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_new_tokens: _Optional[int] = ...) -> None: ...

class ChunkHeader(_message.Message):
    __slots__ = ("protocol_version", "run_id", "step", "agent", "incarnation", "chunk_index", "final", "rollout_count", "total_rollouts", "body_sha256", "previous_chunk", "previous_manifest", "sampling", "tokenizer_digest", "policy_step", "created_at_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    AGENT_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CHUNK_INDEX_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROLLOUTS_FIELD_NUMBER: _ClassVar[int]
    BODY_SHA256_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_CHUNK_FIELD_NUMBER: _ClassVar[int]
    PREVIOUS_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    POLICY_STEP_FIELD_NUMBER: _ClassVar[int]
    CREATED_AT_MS_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, protocol_version: _Optional[int] = ..., run_id: _Optional[str] = ..., step: _Optional[int] = ..., agent: _Optional[str] = ..., incarnation: _Optional[int] = ..., chunk_index: _Optional[int] = ..., final: _Optional[bool] = ..., rollout_count: _Optional[int] = ..., total_rollouts: _Optional[int] = ..., body_sha256: _Optional[str] = ..., previous_chunk: _Optional[str] = ..., previous_manifest: _Optional[str] = ..., sampling: _Optional[_Union[SamplingParameters, _Mapping]] = ..., tokenizer_digest: _Optional[str] = ..., policy_step: _Optional[int] = ..., created_at_ms: _Optional[int] = ...) -> None: ...
