"""The adapter to Flower: messages of its public Message API, and the reduced form in which they travel here.

On the wire a Flower message is named scalars, in one record "config" and one record "metrics", and little of them:
arrays, lists, bytes and other records are refused, so that nothing that could carry a weight fits. What this project
uses of Flower beyond its public API is in this module: Flower makes a message with explicit ``metadata`` only for
itself, and outside its own processes there is no other way to make one that is not a reply.
"""

import hashlib
import time
from collections.abc import Mapping

from flwr.app import ConfigRecord, Error, Message, Metadata, MetricRecord, RecordDict

from hacrl_fed.protocol.convert import refuse_unknown_fields
from hacrl_fed.v1 import session_pb2

ConfigScalar = int | float | bool | str
MetricScalar = int | float

CONFIG = "config"
METRICS = "metrics"
AWAY = 1  # code of the error that answers an order of an agent that went away
SERVER_NODE_ID = 1  # Flower's own for the ServerApp
MAX_MESSAGE_BYTES = 64 * 1024


def node_id(agent: str) -> int:
    """Flower's number for an agent: positive, 63 bits of the SHA-256 of its name."""
    return _stable_id("node", agent)


def run_id(name: str) -> int:
    """Flower's number for a run: positive, 63 bits of the SHA-256 of its name."""
    return _stable_id("run", name)


def make_message(
    *,
    config: Mapping[str, ConfigScalar],
    metrics: Mapping[str, MetricScalar],
    message_type: str,
    dst_node_id: int,
    group_id: str,
    ttl: float,
    run_id: int,
    message_id: str,
) -> Message:
    """A message from the ServerApp, made outside Flower's own processes.

    Args:
        message_type: "train.block" calls the ClientApp's function ``@app.train("block")``.
        ttl: time to live, seconds.

    Raises ValueError where Flower knows no such message type.
    """
    metadata = Metadata(
        run_id=run_id,
        message_id=message_id,
        src_node_id=SERVER_NODE_ID,
        dst_node_id=dst_node_id,
        reply_to_message_id="",
        group_id=group_id,
        created_at=time.time(),
        ttl=ttl,
        message_type=message_type,
    )
    return _message(metadata, content=_content(config, metrics))


def to_proto(message: Message) -> session_pb2.FlowerMessage:
    """The form on the wire. Raises ValueError, naming the record and key, for content that must not travel."""
    metadata = message.metadata
    proto = session_pb2.FlowerMessage(
        message_id=metadata.message_id,
        reply_to_message_id=metadata.reply_to_message_id,
        message_type=metadata.message_type,
        group_id=metadata.group_id,
        created_at=metadata.created_at,
        ttl=metadata.ttl,
    )
    if message.has_error():
        if not 0 < message.error.code < 2**32:
            raise ValueError(f"a Flower error's code must be from 1 to 2^32 - 1, not {message.error.code}")
        proto.error_code = message.error.code
        proto.error_reason = message.error.reason or ""
    else:
        _fill(proto, message.content)
    _check_size(proto)
    return proto


def from_proto(proto: session_pb2.FlowerMessage, *, run_id: int, src_node_id: int, dst_node_id: int) -> Message:
    """The message received on an authenticated session, which says whose it is: the wire does not.

    Raises ValueError for what ``to_proto`` would not have written.
    """
    _check_size(proto)
    refuse_unknown_fields(proto)
    metadata = Metadata(
        run_id=run_id,
        message_id=proto.message_id,
        src_node_id=src_node_id,
        dst_node_id=dst_node_id,
        reply_to_message_id=proto.reply_to_message_id,
        group_id=proto.group_id,
        created_at=proto.created_at,
        ttl=proto.ttl,
        message_type=proto.message_type,
    )
    if proto.error_code:
        if proto.config or proto.metrics:
            raise ValueError("a Flower message carries an error or content, not both")
        return _message(metadata, error=Error(proto.error_code, proto.error_reason or None))
    config = {key: _value(key, scalar) for key, scalar in proto.config.items()}
    metrics = {key: _number(key, _value(key, scalar)) for key, scalar in proto.metrics.items()}
    return _message(metadata, content=_content(config, metrics))


def _fill(proto: session_pb2.FlowerMessage, content: RecordDict) -> None:
    for name, record in content.items():
        if name == CONFIG and isinstance(record, ConfigRecord):
            target = proto.config
        elif name == METRICS and isinstance(record, MetricRecord):
            target = proto.metrics
        else:
            raise ValueError(
                f"a Flower message here holds a ConfigRecord {CONFIG!r} and a MetricRecord {METRICS!r}, "
                f"and no {type(record).__name__} {name!r}"
            )
        for key, value in record.items():
            target[key].CopyFrom(_scalar(key, value))


def _scalar(key: str, value: object) -> session_pb2.Scalar:
    try:
        match value:
            case bool():  # before int, of which it is a subclass
                return session_pb2.Scalar(boolean=value)
            case int():
                return session_pb2.Scalar(integer=value)
            case float():
                return session_pb2.Scalar(number=value)
            case str():
                return session_pb2.Scalar(text=value)
    except ValueError as error:
        raise ValueError(f"{key!r} cannot be sent: {error}") from None
    raise ValueError(f"{key!r} must be a number, a truth value or text, not {type(value).__name__}")


def _value(key: str, scalar: session_pb2.Scalar) -> ConfigScalar:
    kind = scalar.WhichOneof("value")
    if kind is None:
        raise ValueError(f"{key!r} has no value")
    value: ConfigScalar = getattr(scalar, kind)
    return value


def _number(key: str, value: ConfigScalar) -> MetricScalar:
    if isinstance(value, bool | str):
        raise ValueError(f"metric {key!r} must be a number, not {type(value).__name__}")
    return value


def _content(config: Mapping[str, ConfigScalar], metrics: Mapping[str, MetricScalar]) -> RecordDict:
    return RecordDict({CONFIG: ConfigRecord(dict(config)), METRICS: MetricRecord(dict(metrics))})


def _message(metadata: Metadata, content: RecordDict | None = None, error: Error | None = None) -> Message:
    return Message(metadata=metadata, content=content, error=error)  # type: ignore[call-overload, no-any-return]


def _check_size(proto: session_pb2.FlowerMessage) -> None:
    if proto.ByteSize() > MAX_MESSAGE_BYTES:
        raise ValueError(f"a Flower message may weigh {MAX_MESSAGE_BYTES} bytes here, not {proto.ByteSize()}")


def _stable_id(kind: str, name: str) -> int:
    digest = hashlib.sha256(f"{kind} {name}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
