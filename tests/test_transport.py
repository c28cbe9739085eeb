"""Channels and servers over real sockets."""

import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from hacrl_fed.errors import UnreachableError, UserError
from hacrl_fed.protocol import keys, roster, transport
from hacrl_fed.protocol.certs import write_development_ca
from hacrl_fed.protocol.tokens import METADATA_KEY, sign_call
from hacrl_fed.protocol.transport import Address, Caller, ClientTls, ServerTls, parse_address
from hacrl_fed.records import CallToken
from hacrl_fed.v1 import exchange_pb2, exchange_pb2_grpc

ALPHA, STRANGER, COORDINATOR = (keys.generate() for _ in range(3))
ROSTER = roster.parse(
    {
        "run": "demo",
        "coordinator": keys.format_public_key(COORDINATOR.public_key()),
        "agents": [
            {"name": "alpha", "organisation": "Org", "public_key": keys.format_public_key(ALPHA.public_key())},
        ],
    },
    "test",
)
CHUNK_BYTES = 1 << 20
LOCAL = Address("127.0.0.1", 0)
SUBSCRIBE = exchange_pb2.SubscribeRequest()


class Exchange:
    """Notes the tokens that reach it, and sends two events to a subscriber."""

    def __init__(self):
        self.tokens = []

    def Publish(self, request, context, token):  # noqa: N802
        self.tokens.append(token)
        return exchange_pb2.PublishResponse(duplicate=bool(request.body))

    def Subscribe(self, request, context, token):  # noqa: N802
        self.tokens.append(token)
        yield exchange_pb2.ExchangeEvent(chunk=exchange_pb2.Chunk(body=b"one"))
        yield exchange_pb2.ExchangeEvent(chunk=exchange_pb2.Chunk(body=b"two"))


@contextlib.contextmanager
def serving(listen=LOCAL, tls=None, exchange=None, workers=4, **options):
    server, bound = transport.make_server(ROSTER, listen, tls, chunk_bytes=CHUNK_BYTES, workers=workers, **options)
    exchange_pb2_grpc.add_ExchangeServicer_to_server(exchange or Exchange(), server)
    server.start()
    try:
        yield bound
    finally:
        server.stop(None).wait(10)


def caller(key=ALPHA, run_id="demo", agent="alpha", incarnation=lambda: 0):
    return Caller(key, run_id, agent, incarnation)


def open_channel(address, tls=None, who=None, timeout_s=5.0, **options):
    return transport.open_channel(
        address, tls, who or caller(), chunk_bytes=CHUNK_BYTES, timeout_s=timeout_s, **options
    )


def publish(channel, body=b"x"):
    return exchange_pb2_grpc.ExchangeStub(channel).Publish(exchange_pb2.Chunk(body=body), timeout=10)


@contextlib.contextmanager
def refused(code, sentence):
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() is code
    assert sentence in caught.value.details()


@pytest.fixture(scope="module")
def ca(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("ca")
    write_development_ca("coordinator.example", folder)
    return folder


def server_tls(folder, **client_ca):
    return ServerTls(folder / "server.pem", folder / "server-key.pem", **client_ca)


def issue(ca, out, name, days=(-1, 1), names=("localhost",)):
    """A certificate by the development CA, as an operator would have made: out/NAME.pem and out/NAME-key.pem."""
    ca_key = serialization.load_pem_private_key((ca / "ca-key.pem").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((ca / "ca.pem").read_bytes())
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
        .issuer_name(issuer.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + timedelta(days=days[0]))
        .not_valid_after(now + timedelta(days=days[1]))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host) for host in names]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer.public_key()), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    (out / f"{name}.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    keys.write_private_key(out / f"{name}-key.pem", key)
    return out / f"{name}.pem", out / f"{name}-key.pem"


# --- addresses


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [("localhost:80", "localhost", 80), ("10.0.0.1:0", "10.0.0.1", 0), ("[::1]:65535", "::1", 65535)],
)
def test_an_address_is_read_and_written(text, host, port):
    address = parse_address(text)
    assert address == Address(host, port)
    assert str(address) == text


@pytest.mark.parametrize(
    "text", ["", "localhost", ":80", "host:", "host:x", "host:65536", "::1:80", "http://h:80", "a b:1"]
)
def test_no_other_text_is_an_address(text):
    with pytest.raises(UserError, match="HOST:PORT"):
        parse_address(text)


# --- calls


@pytest.mark.parametrize("encrypted", [False, True])
def test_each_call_reaches_its_handler_with_a_fresh_token_of_the_agent(ca, encrypted):
    exchange, incarnation = Exchange(), [0]
    with (
        serving(tls=server_tls(ca) if encrypted else None, exchange=exchange) as bound,
        open_channel(
            bound, ClientTls(ca / "ca.pem") if encrypted else None, caller(incarnation=lambda: incarnation[0])
        ) as channel,
    ):
        assert publish(channel).duplicate
        incarnation[0] = 7
        events = exchange_pb2_grpc.ExchangeStub(channel).Subscribe(SUBSCRIBE, timeout=10)
        assert [event.chunk.body for event in events] == [b"one", b"two"]
    first, second = exchange.tokens
    assert (first.method, second.method) == ("/hacrl_fed.v1.Exchange/Publish", "/hacrl_fed.v1.Exchange/Subscribe")
    assert (first.incarnation, second.incarnation) == (0, 7)
    assert {first.agent, second.agent} == {"alpha"}
    assert first.audience.startswith("sha256:") if encrypted else first.audience == str(bound)


@pytest.mark.parametrize(
    ("who", "sentence"),
    [
        (caller(key=STRANGER), "not signed by agent alpha"),
        (caller(agent="gamma"), "'gamma' is not in the roster of run demo, which lists alpha"),
        (caller(run_id="other"), "for run other, and this server runs demo"),
    ],
)
def test_a_call_without_a_right_to_it_reaches_no_handler(who, sentence):
    exchange = Exchange()
    with serving(exchange=exchange) as bound, open_channel(bound, who=who) as channel:
        with refused(grpc.StatusCode.UNAUTHENTICATED, sentence):
            publish(channel)
        with refused(grpc.StatusCode.UNAUTHENTICATED, sentence):
            list(exchange_pb2_grpc.ExchangeStub(channel).Subscribe(SUBSCRIBE, timeout=10))
    assert exchange.tokens == []


def test_a_call_without_a_token_or_with_two_is_refused():
    with serving() as bound, grpc.insecure_channel(str(bound)) as channel:
        stub = exchange_pb2_grpc.ExchangeStub(channel)
        for metadata in ([], [(METADATA_KEY, b"a"), (METADATA_KEY, b"b")]):
            with refused(grpc.StatusCode.UNAUTHENTICATED, "the call carries no token"):
                stub.Publish(exchange_pb2.Chunk(), metadata=metadata, timeout=10)


def test_a_token_does_not_open_another_method_or_another_server():
    now = 1_700_000_000_000
    with serving() as bound, grpc.insecure_channel(str(bound)) as channel:
        stub = exchange_pb2_grpc.ExchangeStub(channel)
        for method, audience, sentence in (
            ("/hacrl_fed.v1.Exchange/Subscribe", str(bound), "is for method"),
            ("/hacrl_fed.v1.Exchange/Publish", "127.0.0.1:1", "for another server: its caller means 127.0.0.1:1"),
            ("/hacrl_fed.v1.Exchange/Publish", f"example.org:{bound.port}", "for another server"),
            ("/hacrl_fed.v1.Exchange/Publish", str(bound), "has expired"),
        ):
            token = sign_call(ALPHA, CallToken("demo", "alpha", method, audience, now, 0))
            with refused(grpc.StatusCode.UNAUTHENTICATED, sentence):
                stub.Publish(exchange_pb2.Chunk(), metadata=[(METADATA_KEY, token)], timeout=10)


def test_a_stranger_who_never_sends_the_request_holds_no_thread():
    never = threading.Event()

    def requests():
        never.wait(20)
        yield b""

    with serving(workers=1) as bound, grpc.insecure_channel(str(bound)) as channel:
        calls = [
            channel.stream_unary("/hacrl_fed.v1.Exchange/Publish").future(requests(), timeout=10) for _ in range(4)
        ]
        try:
            for call in calls:
                with refused(grpc.StatusCode.UNAUTHENTICATED, "carries no token"):
                    call.result(timeout=10)
            with open_channel(bound) as mine:
                assert publish(mine).duplicate
        finally:
            never.set()


def test_an_unknown_method_is_unimplemented():
    with serving() as bound, open_channel(bound) as channel, refused(grpc.StatusCode.UNIMPLEMENTED, ""):
        channel.unary_unary("/hacrl_fed.v1.Exchange/Guess")(b"", timeout=10)


@pytest.mark.parametrize("dialled", ["localhost", "127.0.0.1"])
def test_a_loopback_server_answers_to_its_aliases(dialled):
    with serving() as bound, open_channel(Address(dialled, bound.port)) as channel:
        assert publish(channel).duplicate


def test_a_wildcard_server_answers_to_any_host_at_its_port_only():
    audiences = transport.server_audiences(Address("0.0.0.0", 50), None)
    assert "coordinator.example:50" in audiences
    assert "[::1]:50" in audiences
    assert "coordinator.example:150" not in audiences
    assert "sha256:50" not in transport.server_audiences(Address("10.0.0.1", 50), None)
    with (
        serving(Address("0.0.0.0", 0), insecure_allow_remote=True) as bound,
        open_channel(Address("localhost", bound.port)) as channel,
    ):
        assert publish(channel).duplicate


# --- ports


def test_two_servers_never_share_a_port():
    with serving() as bound, pytest.raises(UserError, match=f"cannot listen on {bound}: port {bound.port} is in use"):
        transport.make_server(ROSTER, bound, None, chunk_bytes=CHUNK_BYTES, workers=1)


def test_an_address_that_is_not_this_machines_is_refused():
    with pytest.raises(UserError, match=r"cannot listen on 192\.0\.2\.1:0: Cannot assign requested address"):
        transport.make_server(
            ROSTER, Address("192.0.2.1", 0), None, chunk_bytes=CHUNK_BYTES, workers=1, insecure_allow_remote=True
        )


def test_plain_text_stays_on_this_machine_unless_allowed():
    remote = Address("192.0.2.1", 1)
    with pytest.raises(UserError, match="--insecure-allow-remote"):
        transport.make_server(ROSTER, Address("0.0.0.0", 0), None, chunk_bytes=CHUNK_BYTES, workers=1)
    with pytest.raises(UserError, match="--insecure-allow-remote"):
        open_channel(remote)
    with pytest.raises(UserError, match="--insecure-allow-remote"):
        open_channel(Address("coordinator.example", 1))
    assert [Address(host, 1).is_loopback for host in ("127.0.0.9", "::1", "localhost", "localhost.example")] == [
        True,
        True,
        True,
        False,
    ]


# --- TLS


def test_the_development_certificate_holds_for_its_host_and_for_this_machine(ca):
    certificate = x509.load_pem_x509_certificate((ca / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["coordinator.example", "localhost"]
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["127.0.0.1"]
    assert [(ca / name).stat().st_mode & 0o777 for name in ("ca-key.pem", "server-key.pem")] == [0o600, 0o600]


def test_development_certificates_are_for_any_host_and_never_overwritten(tmp_path):
    write_development_ca("192.0.2.7", tmp_path / "ip")
    certificate = x509.load_pem_x509_certificate((tmp_path / "ip" / "server.pem").read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(ip) for ip in names.get_values_for_type(x509.IPAddress)] == ["192.0.2.7", "127.0.0.1"]

    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "server.pem").write_text("mine")
    with pytest.raises(UserError, match=r"server\.pem exists already"):
        write_development_ca("host", tmp_path / "half")
    assert [path.name for path in (tmp_path / "half").iterdir()] == ["server.pem"]

    for host in ("", "host:80", "https://host", "a b"):
        with pytest.raises(UserError, match="--host takes"):
            write_development_ca(host, tmp_path / "bad")


def test_both_sides_of_tls_mean_the_same_certificate(ca):
    with serving(tls=server_tls(ca)) as bound:
        seen = transport.server_audience(bound, ClientTls(ca / "ca.pem"), 5.0)
    assert seen in transport.server_audiences(bound, server_tls(ca))
    # The same as openssl x509 -fingerprint -sha256.
    der = ssl.PEM_cert_to_DER_cert((ca / "server.pem").read_text())
    assert seen == "sha256:" + x509.load_der_x509_certificate(der).fingerprint(hashes.SHA256()).hex()


def test_a_certificate_of_another_ca_is_refused(ca, tmp_path):
    write_development_ca("localhost", tmp_path)
    with serving(tls=server_tls(ca)) as bound, pytest.raises(UserError, match=r"is not signed by the CA in .*ca\.pem"):
        open_channel(bound, ClientTls(tmp_path / "ca.pem"))


@pytest.mark.parametrize(
    ("days", "names", "sentence"),
    [
        ((-1, 1), ("coordinator.example",), "is not for localhost"),
        ((-2, -1), ("localhost",), "has expired"),
        ((1, 2), ("localhost",), "is not valid yet"),
    ],
)
def test_what_is_wrong_with_a_certificate_is_told(ca, tmp_path, days, names, sentence):
    tls = ServerTls(*issue(ca, tmp_path, "server", days, names))
    with serving(tls=tls) as bound, pytest.raises(UserError, match=sentence):
        open_channel(Address("localhost", bound.port), ClientTls(ca / "ca.pem"))


def test_mutual_tls_lets_in_only_clients_with_a_certificate(ca, tmp_path):
    certificate, key = issue(ca, tmp_path, "alpha")
    with serving(tls=server_tls(ca, client_ca=ca / "ca.pem")) as bound:
        with open_channel(bound, ClientTls(ca / "ca.pem", certificate, key)) as channel:
            assert publish(channel).duplicate
        with pytest.raises(UnreachableError, match="may ask for a client certificate"):
            open_channel(bound, ClientTls(ca / "ca.pem"))


def test_one_side_with_tls_and_the_other_without_is_told(ca):
    with serving() as bound, pytest.raises(UnreachableError, match=r"does not answer in TLS .*--insecure"):
        open_channel(bound, ClientTls(ca / "ca.pem"))
    with serving(tls=server_tls(ca)) as bound, pytest.raises(UnreachableError, match="both sides use TLS or neither"):
        open_channel(bound, timeout_s=0.5)


def test_files_that_do_not_do_are_named(ca, tmp_path):
    text = tmp_path / "text.pem"
    text.write_text("no certificate")
    cases = [
        (ServerTls(tmp_path / "none.pem", ca / "server-key.pem"), r"none\.pem cannot be read: No such file"),
        (ServerTls(text, ca / "server-key.pem"), r"text\.pem holds no certificate"),
        (ServerTls(ca / "server.pem", ca / "ca-key.pem"), r"ca-key\.pem is not the private key"),
        (ServerTls(ca / "server.pem", text), r"text\.pem is not the private key"),
        (server_tls(ca, client_ca=tmp_path / "none.pem"), r"none\.pem cannot be read"),
    ]
    for tls, sentence in cases:
        with pytest.raises(UserError, match=sentence):
            transport.make_server(ROSTER, LOCAL, tls, chunk_bytes=CHUNK_BYTES, workers=1)
    for client, sentence in (
        (ClientTls(tmp_path / "none.pem"), r"none\.pem cannot be read"),
        (ClientTls(text), r"text\.pem holds no certificate"),
        (ClientTls(ca / "ca.pem", ca / "server.pem"), "both its file and its key's file"),
    ):
        with pytest.raises(UserError, match=sentence):
            open_channel(Address("localhost", 1), client)


# --- servers that are not there


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_nothing_listens(ca):
    address = Address("127.0.0.1", free_port())
    for tls in (None, ClientTls(ca / "ca.pem")):
        with pytest.raises(UnreachableError, match=f"nothing listens at {address}: connection refused"):
            open_channel(address, tls)


def test_a_host_that_does_not_exist(ca):
    with pytest.raises(UnreachableError, match=r"host name nowhere\.invalid cannot be resolved"):
        open_channel(Address("nowhere.invalid", 1), ClientTls(ca / "ca.pem"))


def test_a_server_that_says_nothing_is_given_up_in_time(ca):
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = Address("127.0.0.1", mute.getsockname()[1])
        for tls in (None, ClientTls(ca / "ca.pem")):
            with pytest.raises(UnreachableError, match=r"answered as a hacrl-fed server within 0\.3 s"):
                open_channel(address, tls, timeout_s=0.3)


def test_a_tls_server_of_another_kind_is_told(ca):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ca / "server.pem", ca / "server-key.pem")

    def answer(listener):
        connection, _ = listener.accept()
        with connection, context.wrap_socket(connection, server_side=True) as secure:
            secure.sendall(b"220 mail.example ESMTP\r\n")
            secure.recv(1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer, args=(listener,))
        thread.start()
        with pytest.raises(UnreachableError, match="is no gRPC server"):
            open_channel(Address("127.0.0.1", listener.getsockname()[1]), ClientTls(ca / "ca.pem"))
        thread.join(10)


# --- limits


def test_a_message_may_be_a_little_larger_than_a_chunk_and_no_more():
    with serving() as bound, open_channel(bound) as channel:
        assert publish(channel, bytes(CHUNK_BYTES + 1024)).duplicate
        with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max"):
            publish(channel, bytes(CHUNK_BYTES + 128 * 1024))


SERVER_IN_A_PROCESS_OF_ITS_OWN = """
import sys
from pathlib import Path
from hacrl_fed.protocol import roster, transport
from hacrl_fed.v1 import exchange_pb2, exchange_pb2_grpc

class Exchange:
    def Publish(self, request, context, token):
        return exchange_pb2.PublishResponse()
    def Subscribe(self, request, context, token):
        yield from ()

server, bound = transport.make_server(
    roster.load(Path(sys.argv[1])), transport.Address("127.0.0.1", 0), None, chunk_bytes=1 << 20, workers=2
)
exchange_pb2_grpc.add_ExchangeServicer_to_server(Exchange(), server)
server.start()
print(bound.port, flush=True)
sys.stdin.read()
server.stop(None).wait(10)
"""


def peak_memory_mib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads a process's peak memory from /proc")
def test_a_gzip_bomb_is_refused_before_it_takes_memory(tmp_path):
    """64 KiB on the wire, 64 MiB when inflated."""
    path = tmp_path / "roster.yaml"
    path.write_text(ROSTER.dump())
    with subprocess.Popen(
        [sys.executable, "-c", SERVER_IN_A_PROCESS_OF_ITS_OWN, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            address = Address("127.0.0.1", int(process.stdout.readline()))
            signer = transport._TokenSigner(caller(), str(address))
            bomb = exchange_pb2.Chunk(body=bytes(64 << 20))
            options = [("grpc.max_send_message_length", -1)]
            with grpc.insecure_channel(str(address), options, grpc.Compression.Gzip) as channel:
                stub = exchange_pb2_grpc.ExchangeStub(grpc.intercept_channel(channel, signer))
                stub.Publish(exchange_pb2.Chunk(), timeout=10)
                before = peak_memory_mib(process.pid)
                with refused(grpc.StatusCode.RESOURCE_EXHAUSTED, "Decompressed message larger than max"):
                    stub.Publish(bomb, timeout=60)
                assert peak_memory_mib(process.pid) - before < 16
        finally:
            process.stdin.close()
            process.wait(20)
