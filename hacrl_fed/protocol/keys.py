"""Private keys in files, and Ed25519 public keys as lines of text."""

import base64
import binascii
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from hacrl_fed.errors import UserError
from hacrl_fed.protocol.digests import sha256_hex

_PREFIX = "ed25519:"
_RAW_BYTES = 32


def generate() -> Ed25519PrivateKey:
    """A new identity of an agent or of a coordinator (RFC 8032)."""
    return Ed25519PrivateKey.generate()


def write_private_key(path: Path, key: Ed25519PrivateKey | EllipticCurvePrivateKey) -> None:
    """Writes a key as PEM (PKCS #8, RFC 5958) that only its owner may read. Raises UserError where the file exists."""
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    write_new_file(path, pem, mode=0o600)


def write_new_file(path: Path, data: bytes, mode: int) -> None:
    """Raises UserError where the file exists, or cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    except FileExistsError:
        raise UserError(f"{path} exists already and is not overwritten: name another file, or move it away") from None
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    with open(descriptor, "wb") as file:
        file.write(data)


def load_private_key(path: Path) -> Ed25519PrivateKey:
    """Raises UserError where the file is missing, readable by others, or no Ed25519 key in PEM without a passphrase."""
    try:
        if path.stat().st_mode & 0o077:
            raise UserError(f"{path} can be read by others, as a private key must not: run chmod 600 {path}")
        pem = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"there is no key file {path}: make one with hacrl-fed keys new --out {path}") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    try:
        key = load_pem_private_key(pem, password=None)
    except TypeError:  # the library's word for an encrypted key
        raise UserError(f"{path} is protected by a passphrase: give a key without one") from None
    except ValueError:
        raise UserError(f"{path} is not a private key in PEM format") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise UserError(f"{path} is a private key of another kind: make an Ed25519 one with hacrl-fed keys new")
    return key


def format_public_key(key: Ed25519PublicKey) -> str:
    """The line ``ed25519:BASE64`` of the 32 raw bytes."""
    return _PREFIX + base64.b64encode(key.public_bytes_raw()).decode("ascii")


def parse_public_key(line: str) -> Ed25519PublicKey:
    """Raises ValueError unless ``line`` is what ``format_public_key`` writes."""
    try:
        raw = base64.b64decode(line.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raw = b""
    if len(raw) == _RAW_BYTES:
        key = Ed25519PublicKey.from_public_bytes(raw)
        # Base64 has several spellings of the same bytes; only one is taken, so that equal keys are equal lines.
        if format_public_key(key) == line:
            return key
    raise ValueError(f"a public key is a line ed25519:BASE64 of {_RAW_BYTES} bytes, not {line!r}")


def key_id(key: Ed25519PublicKey) -> str:
    """A short, stable name of a key: 16 hexadecimal digits of its SHA-256. A hint, not a proof."""
    return sha256_hex(key.public_bytes_raw())[:16]
