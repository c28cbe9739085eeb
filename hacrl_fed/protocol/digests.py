"""Digests that chain a run's messages: always SHA-256 in lower-case hexadecimal."""

import hashlib

from hacrl_fed.records import check_digest
from hacrl_fed.v1 import envelope_pb2

_GENESIS_TAG = b"hacrl-fed genesis v1\n"


def sha256_hex(data: bytes) -> str:
    """SHA-256 of ``data`` in lower-case hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def payload_digest(envelope: envelope_pb2.Envelope) -> str:
    """Digest of a signed chunk header or manifest: over its payload bytes as received."""
    return sha256_hex(envelope.payload)


def genesis_digest(roster_digest: str, run_config_payload: bytes, task_digest: str) -> str:
    """What stands for the previous manifest's digest at step 0: it ties the chain to roster, settings and task.

    Raises ValueError where a digest is not one.
    """
    check_digest("roster_digest", roster_digest)
    check_digest("task_digest", task_digest)
    # Pieces of fixed size after a tag, so that no two triples give the same bytes.
    pieces = (roster_digest, sha256_hex(run_config_payload), task_digest)
    return sha256_hex(_GENESIS_TAG + b"".join(bytes.fromhex(piece) for piece in pieces))
