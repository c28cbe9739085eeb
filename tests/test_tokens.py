import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_fed.protocol import keys, roster
from hacrl_fed.protocol.convert import token_to_payload
from hacrl_fed.protocol.envelope import CALL_TOKEN_TYPE, MANIFEST_TYPE, sign
from hacrl_fed.protocol.tokens import AuthenticationError, sign_call, verify_call
from hacrl_fed.records import CallToken

ALPHA, BETA, COORDINATOR, STRANGER = (keys.generate() for _ in range(4))
ROSTER = roster.parse(
    {
        "run": "demo",
        "coordinator": keys.format_public_key(COORDINATOR.public_key()),
        "agents": [
            {"name": name, "organisation": "Org", "public_key": keys.format_public_key(key.public_key())}
            for name, key in (("alpha", ALPHA), ("beta", BETA))
        ],
    },
    "test",
)
METHOD = "/hacrl_fed.v1.Exchange/Publish"
NOW = 1_700_000_000_000
TOKEN = CallToken("demo", "alpha", METHOD, "sha256:aa", NOW, 3)


def verify(data, now_ms=NOW):
    return verify_call(data, ROSTER, METHOD, {"sha256:aa", "sha256:bb"}, now_ms)


def test_a_signed_token_is_let_in_with_what_it_says():
    assert verify(sign_call(ALPHA, TOKEN)) == TOKEN


@pytest.mark.parametrize("age_s", [-60, 0, 60, 120])
def test_clocks_may_differ_by_a_minute(age_s):
    assert verify(sign_call(ALPHA, TOKEN), NOW + 1000 * age_s) == TOKEN


@pytest.mark.parametrize(
    ("age_s", "sentence"), [(121, "alpha's clock is 121 s behind"), (-61, "alpha's clock is 61 s ahead of this")]
)
def test_beyond_that_the_difference_is_told(age_s, sentence):
    with pytest.raises(AuthenticationError, match=sentence):
        verify(sign_call(ALPHA, TOKEN), NOW + 1000 * age_s)


@pytest.mark.parametrize(
    ("key", "change", "sentence"),
    [
        (ALPHA, {"run_id": "other"}, "for run other, and this server runs demo"),
        (ALPHA, {"agent": "gamma"}, "'gamma' is not in the roster of run demo, which lists alpha, beta"),
        (BETA, {}, "not signed by agent alpha"),
        (STRANGER, {}, "not signed by agent alpha"),
        (COORDINATOR, {}, "not signed by agent alpha"),
        (ALPHA, {"method": "/hacrl_fed.v1.Session/Join"}, "for method /hacrl_fed.v1.Session/Join, not .*Publish"),
        (ALPHA, {"audience": "sha256:cc"}, "for another server: its caller means sha256:cc"),
    ],
)
def test_each_cause_of_refusal_is_told(key, change, sentence):
    with pytest.raises(AuthenticationError, match=sentence):
        verify(sign_call(key, dataclasses.replace(TOKEN, **change)))


def test_a_signature_made_for_something_else_is_no_token():
    payload = token_to_payload(TOKEN)
    assert verify(sign(ALPHA, CALL_TOKEN_TYPE, payload).SerializeToString()) == TOKEN
    with pytest.raises(AuthenticationError, match="not signed by agent alpha: the envelope holds"):
        verify(sign(ALPHA, MANIFEST_TYPE, payload).SerializeToString())


@given(st.binary(max_size=200))
def test_hostile_bytes_are_refused(data):
    with pytest.raises(AuthenticationError, match="malformed"):
        verify(data)


@given(st.data())
def test_one_flipped_bit_is_refused(data):
    changed = bytearray(sign_call(ALPHA, TOKEN))
    changed[data.draw(st.integers(0, len(changed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(AuthenticationError):
        verify(bytes(changed))
