import base64
import os
import stat

import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, Encoding, NoEncryption, PrivateFormat

from hacrl_fed.errors import UserError
from hacrl_fed.protocol import keys, roster
from hacrl_fed.protocol.digests import genesis_digest, sha256_hex


def public_line():
    return keys.format_public_key(keys.generate().public_key())


def roster_data(**changes):
    agents = [
        {"name": "alpha", "organisation": "Alpha e.V.", "public_key": public_line()},
        {"name": "beta", "organisation": "Université B", "public_key": public_line()},
    ]
    return {"run": "demo", "coordinator": public_line(), "agents": agents} | changes


def test_a_key_survives_its_file_and_only_the_owner_may_read_it(tmp_path):
    key, path = keys.generate(), tmp_path / "a.pem"
    keys.write_private_key(path, key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert keys.load_private_key(path).private_bytes_raw() == key.private_bytes_raw()


def test_a_key_file_is_never_overwritten(tmp_path):
    path = tmp_path / "a.pem"
    keys.write_private_key(path, keys.generate())
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"a\.pem exists already"):
        keys.write_private_key(path, keys.generate())
    assert path.read_bytes() == before


def test_a_key_cannot_be_written_where_there_is_no_folder(tmp_path):
    with pytest.raises(UserError, match="No such file or directory"):
        keys.write_private_key(tmp_path / "none" / "a.pem", keys.generate())


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_key_file_open_to_others_is_refused(tmp_path, mode):
    path = tmp_path / "a.pem"
    keys.write_private_key(path, keys.generate())
    path.chmod(mode)
    with pytest.raises(UserError, match=r"chmod 600 .*a\.pem"):
        keys.load_private_key(path)


def pem(key, encryption) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, encryption)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "not a private key in PEM"),
        (b"\x00\xff", "not a private key in PEM"),
        (pem(ec.generate_private_key(ec.SECP256R1()), NoEncryption()), "private key of another kind"),
        (pem(keys.generate(), BestAvailableEncryption(b"secret")), "passphrase"),
    ],
)
def test_a_file_without_a_usable_key_is_refused(tmp_path, content, sentence):
    path = tmp_path / "a.pem"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(UserError, match=sentence):
        keys.load_private_key(path)


def test_a_missing_or_unreadable_key_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"there is no key file .*none\.pem"):
        keys.load_private_key(tmp_path / "none.pem")
    (tmp_path / "folder.pem").mkdir(mode=0o700)
    with pytest.raises(UserError, match=r"folder\.pem cannot be read"):
        keys.load_private_key(tmp_path / "folder.pem")


def test_a_public_key_is_one_line_and_back():
    # RFC 8032, section 7.1, test 1
    raw = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
    line = "ed25519:" + base64.b64encode(raw).decode()
    key = keys.parse_public_key(line)
    assert key.public_bytes_raw() == raw
    assert keys.format_public_key(key) == line
    assert keys.key_id(key) == sha256_hex(raw)[:16]


@pytest.mark.parametrize(
    "line",
    [
        "",
        "ed25519:",
        "ed25519:AAAA",
        "ed25519:" + "A" * 43,
        "A" * 43 + "=",
        "ed25519:" + "A" * 42 + "B=",  # trailing bits: the same bytes as with a last A
        " ed25519:" + "A" * 43 + "=",
        "ed25519:" + "ä" * 44,
        "rsa:" + "A" * 43 + "=",
    ],
)
def test_no_other_line_is_a_public_key(line):
    with pytest.raises(ValueError, match="ed25519:BASE64"):
        keys.parse_public_key(line)


def test_a_roster_survives_its_file(tmp_path):
    made = roster.parse(roster_data(), "test")
    path = tmp_path / "roster.yaml"
    path.write_text(made.dump(), encoding="utf-8")
    assert roster.load(path) == made
    assert roster.load(path).digest == made.digest
    assert keys.format_public_key(made.agent("beta").key) == made.agents[1].public_key
    assert keys.format_public_key(made.coordinator_key) == made.coordinator


def test_the_digest_is_of_the_content_alone(tmp_path):
    data = roster_data()
    shuffled = {
        "agents": [dict(reversed(agent.items())) for agent in reversed(data["agents"])],
        "coordinator": data["coordinator"],
        "run": data["run"],
    }
    path = tmp_path / "roster.yaml"
    path.write_text(yaml.safe_dump(shuffled, default_flow_style=True, width=30, sort_keys=False))
    digest = roster.parse(data, "test").digest
    assert roster.load(path).digest == digest

    changed = roster_data(**{key: data[key] for key in ("coordinator", "agents")}, run="other")
    assert roster.parse(changed, "test").digest != digest
    changed = data | {"agents": [data["agents"][0] | {"organisation": "Alpha"}, data["agents"][1]]}
    assert roster.parse(changed, "test").digest != digest


def test_an_unlisted_agent_is_told_who_is_listed():
    with pytest.raises(UserError, match=r"'gamma' is not in the roster of run demo, which lists alpha, beta"):
        roster.parse(roster_data(), "test").agent("gamma")


def broken_rosters():
    data = roster_data()
    first, second = data["agents"]
    yield data | {"colour": "red"}, "unknown key colour"
    yield {"run": "demo", "agents": data["agents"]}, "key coordinator is missing"
    yield data | {"agents": []}, "agents"
    yield data | {"run": "a/b"}, "run must be 1 to 64 letters"
    yield data | {"coordinator": "ed25519:x"}, "ed25519:BASE64"
    yield data | {"agents": [first, second | {"name": "../x"}]}, "agents.1.name: an agent's name must be"
    yield data | {"agents": [first, second | {"public_key": "x"}]}, "ed25519:BASE64"
    yield data | {"agents": [first, second | {"pubic_key": "x"}]}, "unknown key agents.1.pubic_key; did you mean"
    yield data | {"agents": [first, second | {"name": "alpha"}]}, "each name must be there only once, not alpha twice"
    yield data | {"agents": [first, second | {"public_key": first["public_key"]}]}, "each public key .* only once"
    yield data | {"coordinator": first["public_key"]}, "each public key .* only once"


@pytest.mark.parametrize(("data", "sentence"), list(broken_rosters()))
def test_a_broken_roster_is_refused_in_one_sentence(tmp_path, data, sentence):
    path = tmp_path / "roster.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(UserError, match=sentence) as caught:
        roster.load(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_the_genesis_digest_depends_on_each_part_and_on_nothing_else():
    a, b = "a" * 64, "b" * 64
    digest = genesis_digest(a, b"config", b)
    assert digest == genesis_digest(a, b"config", b)
    assert (
        len({digest, genesis_digest(b, b"config", a), genesis_digest(a, b"confi", b), genesis_digest(a, b"", b)}) == 4
    )
    with pytest.raises(ValueError, match="roster_digest"):
        genesis_digest("a", b"config", b)
    with pytest.raises(ValueError, match="task_digest"):
        genesis_digest(a, b"config", "B" * 64)


def test_the_key_file_is_private_whatever_the_umask(tmp_path):
    umask = os.umask(0)
    try:
        keys.write_private_key(tmp_path / "a.pem", keys.generate())
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "a.pem").stat().st_mode) == 0o600
