"""A development certificate authority, to try TLS with. A real deployment brings its own certificates."""

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from hacrl_fed.errors import UserError
from hacrl_fed.protocol.keys import write_new_file, write_private_key

_VALID = timedelta(days=365)
# A certificate made now must hold on a machine whose clock is a little behind.
_BACKDATED = timedelta(hours=1)


def write_development_ca(host: str, out: Path) -> None:
    """Writes ca.pem, ca-key.pem, server.pem and server-key.pem (X.509, RFC 5280; ECDSA P-256) into ``out``.

    The server's certificate holds for ``host`` (a DNS name or an IP address), for localhost and for 127.0.0.1.

    Raises UserError where ``host`` is neither, or one of the files exists.
    """
    names = _alternative_names(host)
    files = {name: out / name for name in ("ca.pem", "ca-key.pem", "server.pem", "server-key.pem")}
    for path in files.values():
        # Before the first write, so that a refusal leaves no half of a set behind.
        if path.exists():
            raise UserError(f"{path} exists already and is not overwritten: name another folder, or move it away")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{out} cannot be made: {error.strerror}") from None

    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("hacrl-fed development CA")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    server = (
        _builder(_name("hacrl-fed coordinator"), ca_name, server_key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(server_key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    write_private_key(files["ca-key.pem"], ca_key)
    write_private_key(files["server-key.pem"], server_key)
    write_new_file(files["ca.pem"], ca.public_bytes(Encoding.PEM), mode=0o644)
    write_new_file(files["server.pem"], server.public_bytes(Encoding.PEM), mode=0o644)


def _alternative_names(host: str) -> list[x509.GeneralName]:
    names: list[x509.GeneralName] = []
    for candidate in dict.fromkeys((host, "localhost", "127.0.0.1")):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(candidate)))
        except ValueError:
            names.append(_dns_name(candidate))
    return names


def _dns_name(host: str) -> x509.DNSName:
    try:
        # What a certificate holds of a name in other letters is its IDNA form.
        name = host.encode("idna").decode("ascii")
    except UnicodeError:
        name = ""
    if not name or not all(part and part.replace("-", "a").isalnum() for part in name.split(".")):
        raise UserError(f"--host takes a DNS name or an IP address, without a port, not {host!r}")
    return x509.DNSName(name)


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BACKDATED)
        .not_valid_after(now + _VALID)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
