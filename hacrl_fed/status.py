"""What a run is doing, for people: the snapshot that a coordinator keeps, writes to its run folder and shows."""

import os
from dataclasses import asdict, dataclass, field
from json import dumps, loads
from pathlib import Path

from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

FILE_NAME = "status.json"


def printable(text: str) -> str:
    """Text from elsewhere without what a terminal would obey."""
    return "".join(character if character.isprintable() else " " for character in text)


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """One agent: whether its session lives, what it is doing, and the mean reward of its newest step."""

    present: bool = False
    phase: str = ""
    step: int = 0
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class RunStatus:
    """A run at one moment. ``address`` is what the coordinator listens on."""

    run: str
    method: str
    address: str
    step: int
    steps: int
    text: str
    awaited: tuple[str, ...] = ()
    agents: dict[str, AgentStatus] = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Replaces the folder's status file in one move, so that a reader never sees half of it."""
        path = folder / FILE_NAME
        beside = path.with_suffix(".new")
        beside.write_text(dumps(asdict(self)), encoding="utf-8")
        os.replace(beside, path)

    @classmethod
    def read(cls, folder: Path) -> "RunStatus | None":
        """The folder's status, or None before there is one."""
        try:
            data = loads((folder / FILE_NAME).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        agents = {name: AgentStatus(**agent) for name, agent in data.pop("agents").items()}
        return cls(**{**data, "awaited": tuple(data["awaited"])}, agents=agents)


def line(status: RunStatus) -> str:
    """The same in one line, for a log."""
    rewards = ", ".join(
        f"{name} {agent.reward:.2f}" for name, agent in status.agents.items() if agent.reward is not None
    )
    return f"{status.method}: step {status.step}/{status.steps}; rewards: {rewards or 'none yet'}; {status.text}"


def render(status: RunStatus) -> RenderableType:
    """A few lines for a terminal: how far the run is, who is awaited, and how each agent does."""
    table = Table.grid(padding=(0, 2))
    for name, agent in status.agents.items():
        reward = "" if agent.reward is None else f"reward {agent.reward:.2f}"
        state = agent.phase if agent.present else "away"
        style = "yellow" if name in status.awaited else "green" if agent.present else "red"
        table.add_row(f"  {name}", reward, Text(state, style=style))
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"{status.run} · {status.method}", style="bold"),
        f"step {min(status.step + 1, status.steps)}/{status.steps}",
        ProgressBar(total=status.steps, completed=min(status.step, status.steps), width=30),
    )
    return Group(head, Text(f"  {status.text}", style="dim"), table)
