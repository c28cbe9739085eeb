"""Call tokens: what authenticates every RPC. Short-lived, signed by the agent, bound to one method of one server."""

from collections.abc import Container

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hacrl_fed.errors import UserError
from hacrl_fed.protocol.convert import parse_exact, token_from_payload, token_to_payload
from hacrl_fed.protocol.envelope import CALL_TOKEN_TYPE, SignatureError, open_envelope, sign
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import CallToken
from hacrl_fed.v1 import envelope_pb2

# gRPC carries bytes only under names that end in -bin.
METADATA_KEY = "hacrl-token-bin"
LIFETIME_S = 60
CLOCK_SKEW_S = 60


class AuthenticationError(ValueError):
    """A call that is not let in; the message is one sentence for the caller."""


def sign_call(private_key: Ed25519PrivateKey, token: CallToken) -> bytes:
    """A token, signed, as the metadata value that ``verify_call`` takes."""
    return sign(private_key, CALL_TOKEN_TYPE, token_to_payload(token)).SerializeToString(deterministic=True)


def verify_call(data: bytes, roster: Roster, method: str, audiences: Container[str], now_ms: int) -> CallToken:
    """The token of a call, once it is known to be an agent's of the roster, fresh, and meant for this call.

    Args:
        method: full name of the method called, /package.Service/Method.
        audiences: what this server answers to.
        now_ms: Unix time.

    Raises AuthenticationError with one sentence for the first thing that does not hold.
    """
    try:
        envelope = parse_exact(envelope_pb2.Envelope, data)
        # Read before it is verified only to learn whose key to verify it with.
        claimed = token_from_payload(envelope.payload)
    except ValueError as error:
        raise AuthenticationError(f"the call's token is malformed: {error}") from None
    if claimed.run_id != roster.run:
        raise AuthenticationError(f"the call's token is for run {claimed.run_id}, and this server runs {roster.run}")
    try:
        agent = roster.agent(claimed.agent)
        token = token_from_payload(open_envelope(envelope, agent.key, CALL_TOKEN_TYPE))
    except UserError as error:
        raise AuthenticationError(str(error)) from None
    except SignatureError as error:
        raise AuthenticationError(f"the call's token is not signed by agent {claimed.agent}: {error}") from None
    if token.method != method:
        raise AuthenticationError(f"the call's token is for method {token.method}, not {method}")
    if token.audience not in audiences:
        raise AuthenticationError(
            f"the call's token is for another server: its caller means {token.audience}, which is not this server's "
            "certificate or address"
        )
    age_s = (now_ms - token.issued_at_ms) / 1000
    if not -CLOCK_SKEW_S <= age_s <= LIFETIME_S + CLOCK_SKEW_S:
        raise AuthenticationError(
            f"the call's token has expired or is not valid yet: agent {token.agent}'s clock is {abs(age_s):.0f} s "
            f"{'behind' if age_s > 0 else 'ahead of'} this server's: set both by NTP"
        )
    return token
