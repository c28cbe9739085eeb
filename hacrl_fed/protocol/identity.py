"""Who this process is: its private key, checked against the roster, before anything else is loaded or sent."""

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from hacrl_fed.errors import UserError
from hacrl_fed.protocol import keys, roster
from hacrl_fed.protocol.roster import Roster


def load_coordinator(roster_file: Path, key_file: Path) -> tuple[Roster, Ed25519PrivateKey]:
    """The roster and the coordinator's key. Raises UserError where they do not belong together."""
    loaded, key = roster.load(roster_file), keys.load_private_key(key_file)
    if keys.format_public_key(key.public_key()) != loaded.coordinator:
        raise UserError(f"{key_file} is not the key of the coordinator that {roster_file} names")
    return loaded, key


def load_agent(roster_file: Path, key_file: Path, agent: str) -> tuple[Roster, Ed25519PrivateKey]:
    """The roster and an agent's key. Raises UserError where they do not belong together."""
    loaded, key = roster.load(roster_file), keys.load_private_key(key_file)
    if keys.format_public_key(key.public_key()) != loaded.agent(agent).public_key:
        raise UserError(
            f"{key_file} is not the key of agent {agent} in {roster_file}: give the one that the roster lists"
        )
    return loaded, key
