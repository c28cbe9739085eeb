"""What left a site, for its people: messages and bytes by kind and by step, and what a published rollout holds."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from hacrl_fed.run_folder import read_json_lines

PUBLISH = "Publish"

# By the method that sends it.
_KINDS = {
    "GetRun": "asks for the run's settings: protocol version, digest of the roster",
    "Join": "the task's digest, a random number of the process",
    "Attend": "asks for orders; empty",
    "Subscribe": "asks for the others' rollouts: the step to begin with",
    PUBLISH: "a chunk of rollouts, and its signed header",
    "Reply": "answer to an order: named numbers, such as the newest step's metrics",
    "Report": "a step's metrics: named numbers",
    "Heartbeat": "the step, and a word on what the site is doing",
}

# By the field of the message Rollout.
ROLLOUT_FIELDS = {
    "prompt_id": "SHA-256 of prompt and gold answer; neither of them is sent",
    "sample_index": "number of the completion among those of its prompt",
    "text": "the completion",
    "finish_reason": "whether the model ended it, or the limit on tokens did",
    "reward": "what this site's verifier gave it",
    "logp_sum": "one number: its summed log-prob under this site's model",
    "token_count": "its length in this site's tokens",
    "eos_only": "whether it is empty",
    "token_ids": "its tokens' numbers, for sites with the same tokenizer",
}

_HEADER = (
    "The signed header of a chunk names run, step, agent, process and chunk; digests of the body, of the chunk before and of "
    "the manifest of the step before; sampling settings, the tokenizer's digest, the optimizer updates made, and the time."
)


@dataclass
class Traffic:
    """Messages and their bytes."""

    messages: int = 0
    bytes: int = 0

    def add(self, size: int) -> None:
        """Counts a message."""
        self.messages += 1
        self.bytes += size


@dataclass
class Egress:
    """What left a site, by kind of message, and by step (None: what belongs to no step)."""

    total: Traffic = field(default_factory=Traffic)
    by_kind: dict[str, Traffic] = field(default_factory=dict)
    by_step: dict[int | None, Traffic] = field(default_factory=dict)
    published_by_step: Counter[int | None] = field(default_factory=Counter)


def read_egress(agent_folder: Path) -> Egress:
    """Sums of a site's egress file. Raises UserError where it holds anything but JSON lines."""
    egress = Egress()
    for line in read_json_lines(agent_folder / "egress.jsonl"):
        kind, size, step = line["method"], line["bytes"], line["step"]
        egress.total.add(size)
        egress.by_kind.setdefault(kind, Traffic()).add(size)
        egress.by_step.setdefault(step, Traffic()).add(size)
        if kind == PUBLISH:
            egress.published_by_step[step] += size
    return egress


def render_egress(agent: str, egress: Egress) -> RenderableType:
    """Two tables: by kind, the heaviest first; and by step."""
    kinds = _table("kind", ("messages", "bytes"), "what it holds")
    for kind, traffic in sorted(egress.by_kind.items(), key=lambda item: -item[1].bytes):
        kinds.add_row(kind, f"{traffic.messages:,}", f"{traffic.bytes:,}", _KINDS.get(kind, ""))
    kinds.add_section()
    kinds.add_row("all", f"{egress.total.messages:,}", f"{egress.total.bytes:,}", decimal(egress.total.bytes))
    steps = _table("step", ("messages", "bytes", "of rollouts"))
    for step, traffic in sorted(egress.by_step.items(), key=lambda item: -1 if item[0] is None else item[0]):
        steps.add_row(
            "none" if step is None else str(step),
            f"{traffic.messages:,}",
            f"{traffic.bytes:,}",
            f"{egress.published_by_step[step]:,}",
        )
    title = Text(f"What left the site of agent {agent}", style="bold")
    size = Text("Bytes are those of the serialised messages, before compression and framing.", style="dim")
    return Group(title, "", kinds, "", steps, size, "")


def render_contents() -> RenderableType:
    """What a published rollout holds, field by field."""
    fields = _table("field", (), "what it is")
    for name, meaning in ROLLOUT_FIELDS.items():
        fields.add_row(name, meaning)
    return Group(Text("What a published rollout holds", style="bold"), "", fields, Text(_HEADER, style="dim"), "")


def _table(first: str, numbers: Iterable[str], last: str | None = None) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(first, no_wrap=True)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    if last:
        table.add_column(last)
    return table
