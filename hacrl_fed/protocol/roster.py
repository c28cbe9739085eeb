"""The roster: which agents may take part in a run, and the public keys of all. Each site pins it itself."""

import json
from functools import cached_property
from pathlib import Path

import yaml
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from pydantic import Field, field_validator, model_validator

from hacrl_fed import config
from hacrl_fed.errors import UserError
from hacrl_fed.protocol.digests import sha256_hex
from hacrl_fed.protocol.keys import parse_public_key
from hacrl_fed.records import check_name


class RosterAgent(config.StrictModel):
    """An agent, the organisation that runs it, and its public key as a line ``ed25519:BASE64``."""

    name: str
    organisation: str
    public_key: str

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        check_name("an agent's name", value)
        return value

    @field_validator("public_key")
    @classmethod
    def _check_public_key(cls, value: str) -> str:
        parse_public_key(value)
        return value

    @cached_property
    def key(self) -> Ed25519PublicKey:
        """The public key, to verify with."""
        return parse_public_key(self.public_key)


class Roster(config.StrictModel):
    """A run's name, its coordinator's public key and its agents, sorted by name."""

    run: str
    coordinator: str
    agents: tuple[RosterAgent, ...] = Field(min_length=1)

    @field_validator("run")
    @classmethod
    def _check_run(cls, value: str) -> str:
        check_name("run", value)
        return value

    @field_validator("coordinator")
    @classmethod
    def _check_coordinator(cls, value: str) -> str:
        parse_public_key(value)
        return value

    @field_validator("agents")
    @classmethod
    def _sort_agents(cls, value: tuple[RosterAgent, ...]) -> tuple[RosterAgent, ...]:
        return tuple(sorted(value, key=lambda agent: agent.name))

    @model_validator(mode="after")
    def _check_unique(self) -> "Roster":
        _check_unique("name", list(self.names))
        _check_unique("public key", [self.coordinator, *(agent.public_key for agent in self.agents)])
        return self

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content as canonical JSON: layout, order of keys and order of agents do not matter."""
        content = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return sha256_hex(content.encode("ascii"))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all agents, sorted."""
        return tuple(agent.name for agent in self.agents)

    @cached_property
    def coordinator_key(self) -> Ed25519PublicKey:
        """The coordinator's public key, to verify with."""
        return parse_public_key(self.coordinator)

    def agent(self, name: str) -> RosterAgent:
        """Raises UserError, with the agents that there are, where ``name`` is not listed."""
        for agent in self.agents:
            if agent.name == name:
                return agent
        raise UserError(f"agent {name!r} is not in the roster of run {self.run}, which lists {', '.join(self.names)}")

    def dump(self) -> str:
        """YAML that ``load`` reads."""
        return yaml.safe_dump(self.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def load(path: Path) -> Roster:
    """Raises UserError with one sentence for the first fault found."""
    return config.load(Roster, path)


def parse(data: object, source: str) -> Roster:
    """A roster from plain data. Raises UserError, its sentence opening with ``source``, for the first fault found."""
    return config.parse(Roster, data, source)


def _check_unique(what: str, values: list[str]) -> None:
    for value in values:
        if values.count(value) > 1:
            raise ValueError(f"each {what} must be there only once, not {value} twice")
