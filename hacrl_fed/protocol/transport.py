"""Channels and servers: addresses, TLS, limits, and the token that authenticates each call.

What a token is bound to (its audience) is the server's certificate under TLS, and the address dialled in plain text. A
client learns the certificate by a short TLS connection of its own, which also finds out what is wrong where something
is: gRPC reports every fault of a connection as the same UNAVAILABLE.
"""

# gRPC's classes take type parameters in its stubs only, so annotations must not be evaluated.
from __future__ import annotations

import errno
import ipaddress
import re
import socket
import ssl
import time
from collections.abc import Callable, Container, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding

from hacrl_fed.errors import UnreachableError, UserError
from hacrl_fed.protocol.digests import sha256_hex
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.protocol.tokens import METADATA_KEY, AuthenticationError, sign_call, verify_call
from hacrl_fed.records import CallToken

# Load balancers and NAT boxes cut connections that are idle for 240 s.
_KEEPALIVE_MS = 210_000
# Room for a chunk's signed header beside its body, so that the named limit on the body answers first.
_MESSAGE_OVERHEAD_BYTES = 64 * 1024
_CALLS_A_CONNECTION = 16
# OpenSSL's X509_V_ERR_CERT_NOT_YET_VALID, _CERT_HAS_EXPIRED, _HOSTNAME_MISMATCH and _IP_ADDRESS_MISMATCH.
_NOT_YET_VALID, _EXPIRED, _WRONG_NAMES = 9, 10, (62, 64)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (a DNS name or an IP address) and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can be at the other end."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback

    @property
    def is_wildcard(self) -> bool:
        """Whether a server that listens here takes calls to any of the machine's addresses."""
        ip = _ip(self.host)
        return ip is not None and ip.is_unspecified


@dataclass(frozen=True, slots=True)
class ServerTls:
    """A server's certificate (chain) and key, PEM files. With ``client_ca``, clients must show a certificate of it."""

    certificate: Path
    key: Path
    client_ca: Path | None = None


@dataclass(frozen=True, slots=True)
class ClientTls:
    """The CA that a client trusts, and the client's own certificate and key where the server wants one; PEM files."""

    ca: Path
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """Who calls: what goes into the tokens. ``incarnation`` is asked at each call, 0 before joining assigned one."""

    private_key: Ed25519PrivateKey
    run_id: str
    agent: str
    incarnation: Callable[[], int]


def parse_address(text: str) -> Address:
    """``HOST:PORT`` or ``[IPV6]:PORT``. Raises UserError."""
    match = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^\s:\[\]/]+)):(\d{1,5})", text)
    if match is None or int(match[3]) > 65535:
        raise UserError(f"an address is HOST:PORT, with a port from 0 to 65535, not {text!r}")
    return Address(match[1] or match[2], int(match[3]))


def make_server(
    roster: Roster,
    listen: Address,
    tls: ServerTls | None,
    *,
    chunk_bytes: int,
    workers: int,
    insecure_allow_remote: bool = False,
) -> tuple[grpc.Server, Address]:
    """A server that lets in only calls with an agent's valid token, its port bound, not yet started.

    Each handler is called as ``handler(request, context, token)``, with the verified CallToken. A stream of responses
    holds one of the ``workers`` threads for as long as it is open.

    Returns the server, and the address with the port that it got where ``listen`` names port 0.

    Raises UserError where the address cannot be listened on, plain text would leave the machine, or a file of ``tls``
    does not do.
    """
    verifier = _TokenVerifier(roster)
    server = grpc.server(
        ThreadPoolExecutor(workers, thread_name_prefix="grpc"),
        interceptors=[verifier],
        options=[
            # By default two servers on one port share its connections, silently.
            ("grpc.so_reuseport", 0),
            ("grpc.max_concurrent_streams", _CALLS_A_CONNECTION),
            # Below the clients' interval, else the server closes their connections for "too many pings".
            ("grpc.http2.min_ping_interval_without_data_ms", _KEEPALIVE_MS // 2),
            *_common_options(chunk_bytes),
        ],
        compression=grpc.Compression.Gzip,
    )
    bound = server_port(server, listen, tls, insecure_allow_remote=insecure_allow_remote)
    verifier.audiences = server_audiences(bound, tls)
    return server, bound


def server_port(
    server: grpc.Server, listen: Address, tls: ServerTls | None, *, insecure_allow_remote: bool = False
) -> Address:
    """Binds a server to its address, as ``make_server`` does, with the same errors. Returns the address bound."""
    credentials = None if tls is None else _server_credentials(tls)
    if credentials is None:
        _check_plain_text(listen, insecure_allow_remote)
    try:
        if credentials is None:
            port = server.add_insecure_port(str(listen))
        else:
            port = server.add_secure_port(str(listen), credentials)
    except RuntimeError:
        raise UserError(f"cannot listen on {listen}: {_why_not_bound(listen)}") from None
    return Address(listen.host, port)


def server_audiences(bound: Address, tls: ServerTls | None) -> Container[str]:
    """What a caller may call this server: its certificate's digest, or in plain text its address and aliases of it."""
    if tls is not None:
        return {_fingerprint(_leaf_certificate(tls.certificate))}
    if bound.is_wildcard:
        return _AnyHost(bound.port)
    aliases = {bound.host, "localhost", "127.0.0.1", "::1"} if bound.is_loopback else {bound.host}
    return {str(Address(host, bound.port)) for host in aliases}


def open_channel(
    address: Address,
    tls: ClientTls | None,
    caller: Caller,
    *,
    chunk_bytes: int,
    timeout_s: float,
    insecure_allow_remote: bool = False,
) -> grpc.Channel:
    """A channel to a server that was there a moment ago; each call on it carries a fresh token of ``caller``.

    Raises UnreachableError where no gRPC server answers within ``timeout_s`` seconds, and UserError where the server is
    not the one that ``tls`` trusts, plain text would leave the machine, or the files do not do.
    """
    options = [
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", 20_000),
        # A site is idle towards the server for as long as it generates.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # The connection that looked for the server's certificate went there directly, and so must this one.
        ("grpc.enable_http_proxy", 0),
        *_common_options(chunk_bytes),
    ]
    if tls is None:
        _check_plain_text(address, insecure_allow_remote)
    audience = server_audience(address, tls, timeout_s)
    if tls is None:
        channel = grpc.insecure_channel(str(address), options, grpc.Compression.Gzip)
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=_read(tls.ca),
            private_key=_read(tls.key) if tls.key else None,
            certificate_chain=_read(tls.certificate) if tls.certificate else None,
        )
        channel = grpc.secure_channel(str(address), credentials, options, grpc.Compression.Gzip)
    return grpc.intercept_channel(channel, _TokenSigner(caller, audience))


def server_audience(address: Address, tls: ClientTls | None, timeout_s: float) -> str:
    """What a token for the server at ``address`` is bound to; found out by a connection of its own.

    Raises UnreachableError and UserError as ``open_channel`` does.
    """
    context = None if tls is None else _client_context(tls)
    deadline = time.monotonic() + timeout_s
    try:
        with socket.create_connection((address.host, address.port), timeout_s) as connection:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            if context is None:
                _check_http2(connection, address)
                return str(address)
            with context.wrap_socket(connection, server_hostname=address.host) as secure:
                _check_http2(secure, address)
                certificate = secure.getpeercert(binary_form=True)
                assert certificate is not None  # the context verified one
                return _fingerprint(certificate)
    except ssl.SSLCertVerificationError as error:
        raise UserError(_certificate_fault(address, tls, error)) from None
    except ssl.SSLError as error:
        raise UnreachableError(
            f"{address} does not answer in TLS ({error.reason}): if that server runs without, say --insecure here too"
        ) from None
    except socket.gaierror as error:
        raise UnreachableError(f"the host name {address.host} cannot be resolved: {error.strerror}") from None
    except TimeoutError:
        raise UnreachableError(
            f"nothing at {address} answered as a hacrl-fed server within {timeout_s:g} s: check the address and "
            "firewalls, and that both sides use TLS or neither"
        ) from None
    except ConnectionRefusedError:
        raise UnreachableError(
            f"nothing listens at {address}: connection refused; check the address, and that the server runs"
        ) from None
    except OSError as error:
        raise UnreachableError(f"{address} cannot be reached: {error.strerror or error}") from None


class _AnyHost:
    """The audiences of a server that listens on all of its machine's addresses, whatever they are called."""

    def __init__(self, port: int) -> None:
        self._suffix = f":{port}"

    def __contains__(self, audience: object) -> bool:
        return isinstance(audience, str) and audience.endswith(self._suffix)


class _TokenVerifier(grpc.ServerInterceptor):  # type: ignore[type-arg]
    """Verifies each call's token before its handler runs, and hands the token to the handler."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.audiences: Container[str] = ()

    def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], grpc.RpcMethodHandler[Any, Any] | None],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return None
        try:
            token = self._verify(handler_call_details)
        except AuthenticationError as error:
            return _refusal(str(error))
        codecs = handler.request_deserializer, handler.response_serializer
        if handler.unary_unary is not None:
            return grpc.unary_unary_rpc_method_handler(_with_token(handler.unary_unary, token), *codecs)
        assert handler.unary_stream is not None  # no service here takes a stream of requests
        return grpc.unary_stream_rpc_method_handler(_with_token(handler.unary_stream, token), *codecs)

    def _verify(self, details: grpc.HandlerCallDetails) -> CallToken:
        values = [value for key, value in details.invocation_metadata if key == METADATA_KEY]
        if len(values) != 1 or not isinstance(values[0], bytes):
            raise AuthenticationError(f"the call carries no token: it belongs in the metadata, as {METADATA_KEY}")
        return verify_call(values[0], self._roster, details.method, self.audiences, time.time_ns() // 1_000_000)


def _with_token(handler: Callable[..., Any], token: CallToken) -> Callable[[Any, grpc.ServicerContext], Any]:
    return lambda request, context: handler(request, context, token)


def _refusal(sentence: str) -> grpc.RpcMethodHandler[Any, Any]:
    def refuse(_requests: Iterator[Any], context: grpc.ServicerContext) -> NoReturn:
        context.abort(grpc.StatusCode.UNAUTHENTICATED, sentence)

    # As a method with streams it need not read the request first, on which a stranger could let a thread wait.
    return grpc.stream_stream_rpc_method_handler(refuse)


@dataclass(frozen=True, slots=True)
class _CallDetails(grpc.ClientCallDetails):
    method: str
    timeout: float | None
    metadata: Any
    credentials: grpc.CallCredentials | None
    wait_for_ready: bool | None
    compression: grpc.Compression | None


class _TokenSigner(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[type-arg]
    """Attaches a fresh token to each call."""

    def __init__(self, caller: Caller, audience: str) -> None:
        self._caller = caller
        self._audience = audience

    def intercept_unary_unary(
        self, continuation: Any, client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(self._signed(client_call_details), request)

    def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.ClientCallDetails, request: Any
    ) -> Any:
        return continuation(self._signed(client_call_details), request)

    def _signed(self, details: grpc.ClientCallDetails) -> grpc.ClientCallDetails:
        token = CallToken(
            run_id=self._caller.run_id,
            agent=self._caller.agent,
            method=details.method,
            audience=self._audience,
            issued_at_ms=time.time_ns() // 1_000_000,
            incarnation=self._caller.incarnation(),
        )
        return _CallDetails(
            method=details.method,
            timeout=details.timeout,
            metadata=[*(details.metadata or ()), (METADATA_KEY, sign_call(self._caller.private_key, token))],
            credentials=details.credentials,
            wait_for_ready=details.wait_for_ready,
            compression=details.compression,
        )


def _common_options(chunk_bytes: int) -> list[tuple[str, int]]:
    # gRPC holds a received message to its limit after decompression too, and stops inflating there.
    limit = chunk_bytes + _MESSAGE_OVERHEAD_BYTES
    return [("grpc.max_receive_message_length", limit), ("grpc.max_send_message_length", limit)]


def _check_plain_text(address: Address, allow_remote: bool) -> None:
    if not (address.is_loopback or allow_remote):
        raise UserError(
            f"without TLS all traffic with {address} could be read and changed on its way: use TLS (hacrl-fed certs "
            "makes certificates to try it with), or say --insecure-allow-remote too"
        )


def _check_http2(connection: socket.socket, address: Address) -> None:
    # An HTTP/2 server speaks first (RFC 9113, section 3.4). In TLS 1.3 one that refuses the client's certificate says
    # so only now, after the handshake: by an alert, or as gRPC does by closing.
    try:
        first = connection.recv(1)
    except ssl.SSLError:
        first = b""
    if isinstance(connection, ssl.SSLSocket) and not first:
        raise UnreachableError(
            f"{address} closed the connection after the TLS handshake: it may ask for a client certificate, signed by "
            "a CA of its own"
        )
    if not first or (isinstance(connection, ssl.SSLSocket) and connection.selected_alpn_protocol() != "h2"):
        raise UnreachableError(f"what listens at {address} is no gRPC server: check the address")


def _client_context(tls: ClientTls) -> ssl.SSLContext:
    _read(tls.ca)
    try:
        context = ssl.create_default_context(cafile=str(tls.ca))
    except ssl.SSLError:
        raise UserError(f"{tls.ca} holds no certificate in PEM format") from None
    context.set_alpn_protocols(["h2"])
    if (tls.certificate is None) != (tls.key is None):
        raise UserError("a client certificate needs both its file and its key's file")
    if tls.certificate is not None and tls.key is not None:
        _load_pair(context, tls.certificate, tls.key)
    return context


def _server_credentials(tls: ServerTls) -> grpc.ServerCredentials:
    _load_pair(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls.certificate, tls.key)
    return grpc.ssl_server_credentials(
        [(_read(tls.key), _read(tls.certificate))],
        root_certificates=_read(tls.client_ca) if tls.client_ca else None,
        require_client_auth=tls.client_ca is not None,
    )


def _load_pair(context: ssl.SSLContext, certificate: Path, key: Path) -> None:
    _leaf_certificate(certificate)
    _read(key)
    try:
        # An empty passphrase fails at once, where none would ask for it at the terminal.
        context.load_cert_chain(certificate, key, password="")
    except ssl.SSLError:
        raise UserError(f"{key} is not the private key, in PEM format, of the certificate {certificate}") from None


def _leaf_certificate(path: Path) -> bytes:
    """The first certificate of a PEM file, in DER."""
    try:
        return x509.load_pem_x509_certificate(_read(path)).public_bytes(Encoding.DER)
    except ValueError:
        raise UserError(f"{path} holds no certificate in PEM format") from None


def _fingerprint(der: bytes) -> str:
    return f"sha256:{sha256_hex(der)}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None


def _certificate_fault(address: Address, tls: ClientTls | None, error: ssl.SSLCertVerificationError) -> str:
    assert tls is not None
    if error.verify_code in _WRONG_NAMES:
        return (
            f"the certificate of {address} is not for {address.host}: dial a name that it holds, or have it made anew"
        )
    if error.verify_code == _EXPIRED:
        return f"the certificate of {address}, or its CA's, has expired: have it made anew, or set this machine's clock"
    if error.verify_code == _NOT_YET_VALID:
        return f"the certificate of {address} is not valid yet: set this machine's clock"
    return f"the certificate of {address} is not signed by the CA in {tls.ca} ({error.verify_message})"


def _why_not_bound(listen: Address) -> str:
    """gRPC does not say; the system does when asked again."""
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            listen.host, listen.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(target)
    except socket.gaierror as error:
        return f"the host name cannot be resolved: {error.strerror}"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {listen.port} is in use: choose another, or stop the program that has it"
        return str(error.strerror)
    return f"port {listen.port} was in use a moment ago: try again"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
