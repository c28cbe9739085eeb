"""Checks a coordinator's ledger from outside, without writing to it: does every manifest follow from what is stored?"""

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hacrl_fed.errors import UserError
from hacrl_fed.protocol import convert, digests, envelope
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import Manifest, ManifestEntry, Participation
from hacrl_fed.v1 import envelope_pb2, exchange_pb2

_SHOWN_DIGITS = 16


@dataclass(frozen=True, slots=True)
class ClosedStep:
    """A step's manifest, with the digest that its own bytes give."""

    manifest: Manifest
    digest: str


@dataclass(frozen=True, slots=True)
class Audit:
    """What a ledger holds, and what of it does not hold together.

    Attributes:
        genesis: the run's genesis digest; empty before a first agent has joined.
        open_chunks: chunks of steps that are not closed yet.
        signatures: whether they were checked, against a roster.
        fault: the first thing that does not hold together, after ``steps``; empty where the chain verifies.
    """

    genesis: str
    steps: tuple[ClosedStep, ...]
    open_chunks: int
    signatures: bool
    fault: str


def audit_ledger(path: Path, roster: Roster | None) -> Audit:
    """Checks that the manifests form one chain from the genesis, and that they list stored, unchanged chunks.

    With ``roster``, also all signatures. Raises UserError where it is not the run's, or the file cannot be read.
    """
    with _read_only(path) as db:
        meta = dict(db.execute("SELECT key, value FROM meta"))
        if roster and meta.get("roster") != roster.digest:
            raise UserError(f"the roster is not the one that the run in {path} was made with: name that one")
        fault = ""
        steps = []
        previous = meta.get("genesis", "")
        for step, (number, digest, message) in enumerate(
            db.execute("SELECT step, digest, message FROM manifests ORDER BY step")
        ):
            try:
                if number != step:
                    raise ValueError(f"its manifest is missing; the next is that of step {number}")
                closed = _open_manifest(message, roster)
                if closed.digest != digest:
                    raise ValueError("its manifest's bytes are not those that its digest names")
                _check_manifest(closed.manifest, step, previous, roster)
                for entry in closed.manifest.entries:
                    _check_entry(db, step, entry, roster)
            except ValueError as error:
                fault = f"step {step}: {error}"
                break
            steps.append(closed)
            previous = closed.digest
        (open_chunks,) = db.execute(
            "SELECT count(*) FROM chunks WHERE step NOT IN (SELECT step FROM manifests)"
        ).fetchone()
    return Audit(meta.get("genesis", ""), tuple(steps), open_chunks, roster is not None, fault)


def render_audit(audit: Audit) -> RenderableType:
    """A table of the closed steps, and whether their chain verifies."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("step", justify="right", no_wrap=True)
    for participation in Participation:
        table.add_column(participation.value)
    for column in ("chunks", "rollouts"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("manifest", no_wrap=True)
    for closed in audit.steps:
        entries = closed.manifest.entries
        table.add_row(
            str(closed.manifest.step),
            *(
                ", ".join(entry.agent for entry in entries if entry.participation is participation) or "-"
                for participation in Participation
            ),
            f"{sum(len(entry.chunks) for entry in entries):,}",
            f"{sum(entry.rollout_count for entry in entries):,}",
            closed.digest[:_SHOWN_DIGITS],
        )
    title = Text("What the coordinator closed", style="bold")
    if not audit.steps and not audit.fault:
        return Group(title, "no step: this method shares no rollouts, or the first step is still open", "")
    return Group(title, "", table, _verdict(audit), "")


def _verdict(audit: Audit) -> Text:
    if audit.fault:
        return Text(f"the chain of manifests does not verify: {audit.fault}", style="red")
    signatures = "and so do all signatures" if audit.signatures else "signatures were not checked: give --roster"
    pending = f"; {audit.open_chunks} chunks of the open step" if audit.open_chunks else ""
    return Text(
        f"the chain of {len(audit.steps)} manifests verifies from the genesis {audit.genesis[:_SHOWN_DIGITS]}; "
        f"{signatures}{pending}",
        style="green",
    )


@contextmanager
def _read_only(path: Path) -> Iterator[sqlite3.Connection]:
    # Without a write-ahead log beside it nobody is writing; SQLite would make one to read a file in WAL mode.
    mode = "mode=ro" if path.with_name(path.name + "-wal").exists() else "mode=ro&immutable=1"
    try:
        db = sqlite3.connect(f"{path.absolute().as_uri()}?{mode}", uri=True, timeout=10)
        try:
            yield db
        finally:
            db.close()
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} cannot be read as a ledger of hacrl-fed: {error}") from None


def _open_manifest(message: bytes, roster: Roster | None) -> ClosedStep:
    signed = convert.parse_exact(envelope_pb2.Envelope, message)
    if roster:
        envelope.open_envelope(signed, roster.coordinator_key, envelope.MANIFEST_TYPE)
    return ClosedStep(convert.manifest_from_payload(signed.payload), digests.payload_digest(signed))


def _check_manifest(manifest: Manifest, step: int, previous: str, roster: Roster | None) -> None:
    if manifest.step != step:
        raise ValueError(f"its manifest is one of step {manifest.step}")
    if roster and manifest.run_id != roster.run:
        raise ValueError(f"its manifest is one of run {manifest.run_id}")
    if manifest.previous_manifest != previous:
        raise ValueError("its manifest does not follow the one before")


def _check_entry(db: sqlite3.Connection, step: int, entry: ManifestEntry, roster: Roster | None) -> None:
    """Raises ValueError unless the entry's chunks are stored as the manifest lists them."""
    rollouts = 0
    for digest in entry.chunks:
        row = db.execute("SELECT message FROM chunks WHERE digest = ?", (digest,)).fetchone()
        if row is None:
            raise ValueError(f"chunk {digest[:_SHOWN_DIGITS]} of {entry.agent} is not in the ledger")
        chunk = convert.parse_exact(exchange_pb2.Chunk, row[0])
        if roster:
            envelope.open_envelope(chunk.header, roster.agent(entry.agent).key, envelope.CHUNK_HEADER_TYPE)
        header = convert.header_from_payload(chunk.header.payload)
        if digests.payload_digest(chunk.header) != digest or digests.sha256_hex(chunk.body) != header.body_sha256:
            raise ValueError(f"chunk {digest[:_SHOWN_DIGITS]} of {entry.agent} is not the one that was published")
        if (header.agent, header.step, header.incarnation) != (entry.agent, step, entry.incarnation):
            raise ValueError(f"chunk {digest[:_SHOWN_DIGITS]} is not one of {entry.agent} in this step")
        rollouts += header.rollout_count
    if rollouts != entry.rollout_count:
        raise ValueError(f"the chunks of {entry.agent} hold {rollouts} rollouts, not {entry.rollout_count}")
