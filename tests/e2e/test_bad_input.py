"""What can go wrong before and at joining: one clear sentence on stderr, the right exit code, and no traceback."""

import dataclasses
import json
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from processes import Commands, Ended, Federation, assert_one_sentence, free_address, read_json, read_lines, write_run

from hacrl_fed.protocol.certs import write_development_ca

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the task "digits"."""
    return write_run(tmp_path_factory.mktemp("config"))


@pytest.fixture(scope="module")
def address(commands: Commands, federation: Federation, config: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A server with TLS that waits for both agents."""
    listen = free_address()
    folder = tmp_path_factory.mktemp("server")
    commands.start(*federation.server(config, listen, folder)).await_output("listening on")
    return listen


@pytest.fixture(scope="module")
def plain_address(
    commands: Commands, federation: Federation, config: Path, tmp_path_factory: pytest.TempPathFactory
) -> str:
    """A server in plain text."""
    listen = free_address()
    folder = tmp_path_factory.mktemp("plain")
    commands.start(*federation.server(config, listen, folder, tls=["--insecure"])).await_output("listening on")
    return listen


@pytest.fixture
def taken_port() -> Iterator[str]:
    """An address that something else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield f"127.0.0.1:{other.getsockname()[1]}"


def with_option(arguments: list[str], option: str, value: object) -> list[str]:
    """A command line with another value for one of its options."""
    index = arguments.index(option) + 1
    return [*arguments[:index], str(value), *arguments[index + 1 :]]


# The server


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--set", "stpes=3"], ["unknown key stpes", "steps"]),
        (["--set", "algorithm.hacpo.alhpa=3"], ["unknown key algorithm.hacpo.alhpa", "alpha"]),
        (["--set", "steps"], ["--set", "key.path=value", "'steps'"]),
        (["--set", "steps=[1"], ["steps", "'[1'", "YAML"]),
        (["--set", "steps=many"], ["steps", "integer"]),
        (["--set", "steps.x=1"], ["steps is a value"]),
        (["--set", "min_agents=3"], ["min_agents is 3", "2 agents"]),
    ],
)
def test_server_refuses_settings(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path, more: list[str], words: list[str]
) -> None:
    ended = commands.run(*federation.server(config, free_address(), tmp_path / "run", *more))
    assert_one_sentence(ended, 2, *words)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--config", "none.yaml", ["no configuration file", "none.yaml"]),
        ("--roster", "none.yaml", ["none.yaml"]),
        ("--key", "none.key", ["no key file", "none.key", "keys new"]),
        ("--tls-cert", "none.pem", ["none.pem"]),
        ("--listen", "127.0.0.1", ["HOST:PORT", "'127.0.0.1'"]),
    ],
)
def test_server_refuses_missing_files(
    commands: Commands,
    federation: Federation,
    config: Path,
    tmp_path: Path,
    option: str,
    value: str,
    words: list[str],
) -> None:
    arguments = with_option(federation.server(config, free_address(), tmp_path / "run"), option, value)
    assert_one_sentence(commands.run(*arguments), 2, *words)


def test_server_refuses_a_key_that_is_not_the_coordinators(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path
) -> None:
    arguments = with_option(federation.server(config, free_address(), tmp_path), "--key", federation.key("a"))
    assert_one_sentence(commands.run(*arguments), 2, "a.key", "not the key of the coordinator")


def test_server_says_that_its_port_is_in_use(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path, taken_port: str
) -> None:
    ended = commands.run(*federation.server(config, taken_port, tmp_path))
    assert_one_sentence(ended, 2, f"cannot listen on {taken_port}", "in use")


@pytest.mark.parametrize("tls", [[], ["--tls-cert", "server.pem"]])
def test_server_needs_tls_options_or_insecure(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path, tls: list[str]
) -> None:
    ended = commands.run(*federation.server(config, free_address(), tmp_path, tls=tls))
    assert_one_sentence(ended, 2, "--tls-cert", "--tls-key")


def test_server_refuses_plain_text_beyond_loopback(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path
) -> None:
    ended = commands.run(*federation.server(config, "0.0.0.0:0", tmp_path, tls=["--insecure"]))
    assert_one_sentence(ended, 2, "TLS", "--insecure-allow-remote")


def test_server_refuses_a_folder_of_another_run(
    commands: Commands, federation: Federation, config: Path, tmp_path: Path
) -> None:
    first = commands.start(*federation.server(config, free_address(), tmp_path))
    first.await_output("listening on")
    first.interrupt()
    assert_one_sentence(first.wait(), 130, "resumes", opening="interrupted")
    ended = commands.run(*federation.server(config, free_address(), tmp_path, "--set", "steps=5"))
    assert_one_sentence(ended, 2, "another run configuration", "--run-dir")


# The client


@dataclass(frozen=True, slots=True)
class Given:
    """What a client's bad command line is made from."""

    federation: Federation
    site_file: Path
    address: str
    plain_address: str
    nobody: str
    folder: Path

    def client(self, *more: str, address: str | None = None, tls: list[str] | None = None) -> list[str]:
        """A good command line of agent a, but for what is said here."""
        address = address or self.address
        return self.federation.client("a", address, self.folder / "run", self.site_file, *more, tls=tls)

    def with_option(self, option: str, value: object) -> list[str]:
        """A good command line of agent a, but for one option."""
        return with_option(self.client(), option, value)

    def other_authority(self) -> Path:
        """A CA that did not sign the server's certificate."""
        write_development_ca("127.0.0.1", self.folder / "tls")
        return self.folder / "tls" / "ca.pem"

    def other_roster(self) -> Path:
        """A roster that differs from the server's in an organisation's name."""
        path = self.folder / "roster.yaml"
        path.write_text(self.federation.roster.read_text().replace("organisation: b", "organisation: other"))
        return path

    def broken_model(self) -> Path:
        """A model folder whose weights end too early."""
        path = self.folder / "model"
        shutil.copytree(self.federation.models["a"], path)
        weights = path / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1000])
        return path


BRIEFLY = ("--set", "connect_s=2")

# By name: the command line, the exit code and words of the sentence, in which {address} and its like stand for the real one.
CLIENT_CASES: dict[str, tuple[Callable[[Given], list[str]], int, list[str]]] = {
    "no configuration": (
        lambda given: given.with_option("--config", "none.yaml"),
        2,
        ["no configuration file", "none.yaml"],
    ),
    "unknown key": (lambda given: given.client("--set", "optimiser.lr=1"), 2, ["key optimiser", "mean optimizer?"]),
    "unknown deep key": (lambda given: given.client("--set", "lora.rank=8"), 2, ["unknown key lora.rank"]),
    "garbage in --set": (lambda given: given.client("--set", "=1"), 2, ["--set", "'=1'"]),
    "TLS and plain text": (lambda given: given.client("--insecure"), 2, ["--ca", "--insecure", "not both"]),
    "neither TLS nor plain text": (lambda given: given.client(tls=[]), 2, ["--ca", "--insecure"]),
    "wrong key": (
        lambda given: given.with_option("--key", given.federation.key("b")),
        2,
        ["b.key", "not the key of agent a"],
    ),
    "agent not in the roster": (
        lambda given: given.with_option("--agent", "c"),
        2,
        ["'c'", "not in the roster", "a, b"],
    ),
    "no model": (lambda given: given.with_option("--model", "./none"), 2, ["no model folder ./none"]),
    "no such hub id": (lambda given: given.with_option("--model", "no-such-model"), 2, ["no-such-model"]),
    "broken model": (
        lambda given: given.with_option("--model", given.broken_model()),
        2,
        ["{folder}/model", "does not load"],
    ),
    "no CA file": (lambda given: given.with_option("--ca", "none.pem"), 2, ["none.pem"]),
    "other CA": (
        lambda given: given.with_option("--ca", given.other_authority()),
        2,
        ["{address}", "certificate", "ca.pem"],
    ),
    # An address of documentation (RFC 5737): the refusal must come before anything is sent there.
    "plain text to a remote host": (
        lambda given: given.client(address="192.0.2.1:443", tls=["--insecure"]),
        2,
        ["192.0.2.1:443", "TLS", "--insecure-allow-remote"],
    ),
    "no server": (
        lambda given: given.client(*BRIEFLY, address=given.nobody),
        1,
        ["{nobody}", "connection refused", "2 s"],
    ),
    "plain text to a server with TLS": (
        lambda given: given.client(*BRIEFLY, tls=["--insecure"]),
        1,
        ["{address}", "TLS"],
    ),
    "TLS to a server in plain text": (
        lambda given: given.client(*BRIEFLY, address=given.plain_address),
        1,
        ["{plain_address}", "TLS", "--insecure"],
    ),
    "unknown task": (
        lambda given: given.with_option("--config", ROOT / "configs" / "site-demo.yaml"),
        2,
        ["task digits", "digit-maps", "site.yaml"],
    ),
    "other roster": (lambda given: given.with_option("--roster", given.other_roster()), 3, ["roster", "differs"]),
}


@pytest.fixture(scope="module")
def givens(
    federation: Federation,
    site_file: Path,
    address: str,
    plain_address: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Given]:
    """A folder of its own for each case."""
    nobody = free_address()
    return {
        name: Given(federation, site_file, address, plain_address, nobody, tmp_path_factory.mktemp("client"))
        for name in CLIENT_CASES
    }


@pytest.fixture(scope="module")
def endings(commands: Commands, givens: dict[str, Given]) -> Iterator[dict[str, "Future[Ended]"]]:
    """How each case's client ends; two run at once, since each imports the training stack."""
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(commands.run, *CLIENT_CASES[name][0](given)) for name, given in givens.items()}
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", CLIENT_CASES)
def test_client_says_what_is_wrong(name: str, givens: dict[str, Given], endings: dict[str, "Future[Ended]"]) -> None:
    _, code, words = CLIENT_CASES[name]
    places = dataclasses.asdict(givens[name])
    assert_one_sentence(endings[name].result(), code, *(word.format(**places) for word in words))


def test_client_says_why_while_it_tries_again(endings: dict[str, "Future[Ended]"]) -> None:
    said = endings["no server"].result().stdout
    assert "connection refused" in said and "trying again for 2 s" in said


def test_second_process_with_a_key_ends_the_first_and_another_task_is_refused(
    commands: Commands, federation: Federation, site_file: Path, tmp_path: Path, address: str
) -> None:
    older = commands.start(*federation.client("a", address, tmp_path / "older", site_file))
    older.await_that((tmp_path / "older" / "checkpoints").exists)  # it has joined, and evaluated its model
    other_site = tmp_path / "site.yaml"
    settings = read_json(site_file)
    settings["tasks"]["digits"]["extract"] = "whole"
    other_site.write_text(json.dumps(settings))
    shutil.copy(site_file.parent / "digits.jsonl", tmp_path)
    other = commands.start(*federation.client("b", address, tmp_path / "b", other_site))
    newer = commands.start(*federation.client("a", address, tmp_path / "newer", site_file))
    assert_one_sentence(other.wait(), 3, "task digits differs")
    assert_one_sentence(older.wait(), 3, "agent a", "superseded by a newer one with the same key")
    assert newer.popen.poll() is None, newer.output()
    assert not read_lines(tmp_path / "older" / "metrics.jsonl"), "nobody else has joined: no step was done"
