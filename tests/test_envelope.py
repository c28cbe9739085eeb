import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_fed.protocol import keys
from hacrl_fed.protocol.digests import payload_digest, sha256_hex
from hacrl_fed.protocol.envelope import (
    CHUNK_HEADER_TYPE,
    MANIFEST_TYPE,
    SignatureError,
    open_envelope,
    pre_authentication_encoding,
    sign,
)
from hacrl_fed.v1 import envelope_pb2

KEY, OTHER = keys.generate(), keys.generate()


def test_the_published_example_of_the_pre_authentication_encoding():
    # github.com/secure-systems-lab/dsse, protocol.md
    encoded = pre_authentication_encoding("http://example.com/HelloWorld", b"hello world")
    assert encoded == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


@given(st.text(max_size=20), st.binary(max_size=20), st.text(max_size=20), st.binary(max_size=20))
def test_no_two_pairs_share_an_encoding(kind, payload, other_kind, other_payload):
    same = pre_authentication_encoding(kind, payload) == pre_authentication_encoding(other_kind, other_payload)
    assert same == ((kind, payload) == (other_kind, other_payload))


def test_lengths_count_bytes():
    assert pre_authentication_encoding("ä", "€".encode()) == b"DSSEv1 2 \xc3\xa4 3 \xe2\x82\xac"


@given(st.binary(max_size=200))
def test_what_was_signed_opens_after_a_journey(payload):
    received = envelope_pb2.Envelope.FromString(sign(KEY, MANIFEST_TYPE, payload).SerializeToString())
    assert open_envelope(received, KEY.public_key(), MANIFEST_TYPE) == payload
    assert payload_digest(received) == sha256_hex(payload)


def test_another_type_is_refused():
    with pytest.raises(SignatureError, match=r"the envelope holds .*manifest.*, not .*chunk-header"):
        open_envelope(sign(KEY, MANIFEST_TYPE, b"x"), KEY.public_key(), CHUNK_HEADER_TYPE)


def test_a_relabelled_type_is_refused():
    envelope = sign(KEY, MANIFEST_TYPE, b"x")
    envelope.payload_type = CHUNK_HEADER_TYPE
    with pytest.raises(SignatureError, match="signature is not one of key"):
        open_envelope(envelope, KEY.public_key(), CHUNK_HEADER_TYPE)


def test_another_key_is_refused_also_under_a_false_key_id():
    envelope = sign(OTHER, MANIFEST_TYPE, b"x")
    with pytest.raises(SignatureError, match="names key"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)
    envelope.key_id = keys.key_id(KEY.public_key())
    with pytest.raises(SignatureError, match="signature is not one of key"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)


def test_a_false_key_id_is_refused_under_the_right_key():
    envelope = sign(KEY, MANIFEST_TYPE, b"x")
    envelope.key_id = keys.key_id(OTHER.public_key())
    with pytest.raises(SignatureError, match="names key"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)


@given(st.data())
def test_one_flipped_bit_is_refused(data):
    envelope = sign(KEY, MANIFEST_TYPE, b"some payload")
    field = data.draw(st.sampled_from(["payload", "signature"]))
    changed = bytearray(getattr(envelope, field))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    setattr(envelope, field, bytes(changed))
    with pytest.raises(SignatureError, match="signature is not one of key"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)


@pytest.mark.parametrize("signature", [b"", b"x", bytes(64), bytes(65)])
def test_no_signature_is_refused(signature):
    envelope = sign(KEY, MANIFEST_TYPE, b"x")
    envelope.signature = signature
    with pytest.raises(SignatureError, match="signature is not one of key"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)


def test_nothing_unsigned_rides_along():
    hidden = b"\x9a\x06\x01A"  # field 99, a text "A"
    envelope = envelope_pb2.Envelope.FromString(sign(KEY, MANIFEST_TYPE, b"x").SerializeToString() + hidden)
    with pytest.raises(SignatureError, match="Envelope holds fields that its schema lacks"):
        open_envelope(envelope, KEY.public_key(), MANIFEST_TYPE)
