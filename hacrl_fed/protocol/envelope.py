"""Signed envelopes: DSSE v1 (github.com/secure-systems-lab/dsse, protocol.md) with Ed25519 (RFC 8032).

Bytes are signed and verified as they are, never serialised again.
"""

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from hacrl_fed.protocol.convert import refuse_unknown_fields
from hacrl_fed.protocol.keys import key_id
from hacrl_fed.v1 import envelope_pb2

CALL_TOKEN_TYPE = "application/vnd.hacrl-fed.call-token.v1+protobuf"
CHUNK_HEADER_TYPE = "application/vnd.hacrl-fed.chunk-header.v1+protobuf"
MANIFEST_TYPE = "application/vnd.hacrl-fed.manifest.v1+protobuf"
RUN_CONFIG_TYPE = "application/vnd.hacrl-fed.run-config.v1+json"


class SignatureError(ValueError):
    """An envelope that the expected key did not sign, or not for this purpose."""


def pre_authentication_encoding(payload_type: str, payload: bytes) -> bytes:
    """DSSE's PAE: both parts with their lengths, so that the signed bytes can be read in one way only."""
    kind = payload_type.encode("utf-8")
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def sign(private_key: Ed25519PrivateKey, payload_type: str, payload: bytes) -> envelope_pb2.Envelope:
    """An envelope of ``payload``, which ``open_envelope`` opens."""
    return envelope_pb2.Envelope(
        payload_type=payload_type,
        payload=payload,
        key_id=key_id(private_key.public_key()),
        signature=private_key.sign(pre_authentication_encoding(payload_type, payload)),
    )


def open_envelope(envelope: envelope_pb2.Envelope, public_key: Ed25519PublicKey, expected_payload_type: str) -> bytes:
    """The payload, once its signature is verified. Raises SignatureError that says what does not hold."""
    try:
        refuse_unknown_fields(envelope)
    except ValueError as error:
        raise SignatureError(str(error)) from None
    if envelope.payload_type != expected_payload_type:
        raise SignatureError(f"the envelope holds {envelope.payload_type!r}, not {expected_payload_type}")
    if envelope.key_id != key_id(public_key):
        raise SignatureError(f"the envelope names key {envelope.key_id!r}, not {key_id(public_key)} as expected")
    try:
        public_key.verify(envelope.signature, pre_authentication_encoding(envelope.payload_type, envelope.payload))
    except InvalidSignature:
        raise SignatureError(f"the signature is not one of key {envelope.key_id} over this payload") from None
    return envelope.payload
