"""A step of two agents with a real coordinator between them: what computing takes at a site, and what exchanging does.

Both sites compute before either exchanges, so that neither waits for the other: in a run, waiting for a slower peer is not
the federation's cost but the peer's. Publishing overlaps generation there, and does not here.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from string import ascii_lowercase
from tempfile import TemporaryDirectory

from hacrl_fed.protocol import certs, keys
from hacrl_fed.protocol import roster as rosters
from step.turns import Side, StepCost
from step.workloads import ModelSize, Workload

AGENTS = {
    "a": ascii_lowercase,
    "b": ascii_lowercase[::-1],
}  # with the order of letters that makes their tokenizers differ
_HOST = "127.0.0.1"
_DEADLINE_S = 1800.0


@dataclass(frozen=True, slots=True)
class FederatedStep:
    """An agent's step in its parts; generating, verifying and scoring are its rolling out."""

    roll_out: StepCost
    exchange: StepCost
    learn: StepCost


@dataclass(frozen=True, slots=True)
class Files:
    """Keys, roster, certificates, models and run folders of a federation, all in one folder."""

    folder: Path

    @property
    def roster(self) -> Path:
        """The roster's file."""
        return self.folder / "roster.yaml"

    def key(self, name: str) -> Path:
        """The private key of an agent or of the coordinator."""
        return self.folder / f"{name}.key"

    def tls(self, name: str) -> Path:
        """A file of the development CA's."""
        return self.folder / "tls" / f"{name}.pem"

    def model(self, agent: str) -> Path:
        """An agent's model."""
        return self.folder / "models" / agent

    def run_dir(self, name: str) -> Path:
        """The run folder of an agent or of the coordinator."""
        return self.folder / name

    def write(self) -> None:
        """Makes all but the models."""
        public = {}
        for name in ("coordinator", *AGENTS):
            key = keys.generate()
            keys.write_private_key(self.key(name), key)
            public[name] = keys.format_public_key(key.public_key())
            self.run_dir(name).mkdir()
        agents = [{"name": agent, "organisation": agent, "public_key": public[agent]} for agent in AGENTS]
        roster = rosters.parse({"run": "benchmark", "coordinator": public["coordinator"], "agents": agents}, "roster")
        self.roster.write_text(roster.dump(), encoding="utf-8")
        certs.write_development_ca(_HOST, self.folder / "tls")


def federated_steps(size: ModelSize, workload: Workload, steps: int) -> list[FederatedStep]:
    """HACPO steps of two agents with different weights and tokenizers, those of both, after a first one.

    Raises HacrlFedError where a process fails.
    """
    texts = workload.texts(steps + 1, seed=0)
    with TemporaryDirectory() as scratch, ExitStack() as stack:
        files = Files(Path(scratch))
        files.write()
        for agent, letters in AGENTS.items():
            arguments = (size, workload, files.model(agent), "cpu", "float32", letters)
            with Side("making a model", "step.models", *arguments, deadline_s=_DEADLINE_S) as maker:
                maker.answer(bool)
        shared = (files, workload, texts, steps + 1)
        server = stack.enter_context(Side("the coordinator", "step.coordinator", *shared, deadline_s=_DEADLINE_S))
        address = server.answer(str)
        sites = [
            stack.enter_context(Side(f"agent {agent}", "step.agent", agent, address, *shared, deadline_s=_DEADLINE_S))
            for agent in AGENTS
        ]
        for site in sites:
            site.answer(bool)
        found = [_step(sites) for _ in range(steps + 1)]
    return [row for rows in found[1:] for row in rows]


def _step(sites: list[Side]) -> list[FederatedStep]:
    parts: list[list[StepCost]] = [[] for _ in sites]

    def one_by_one() -> None:
        for site, costs in zip(sites, parts, strict=True):
            site.tell("your turn")
            costs.append(site.answer(StepCost))

    one_by_one()
    for site in sites:
        site.tell("exchange")
    for site, costs in zip(sites, parts, strict=True):
        costs.append(site.answer(StepCost))
    one_by_one()
    return [FederatedStep(*costs) for costs in parts]
