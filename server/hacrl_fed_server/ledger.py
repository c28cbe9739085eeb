"""The coordinator's memory: one SQLite file, an append-only log of chunks and manifests with what is needed to resume.

Every method is safe to call from any thread. A write is on disk when its method returns.
"""

import json
import sqlite3
import threading
from dataclasses import astuple, dataclass
from pathlib import Path

from hacrl_fed.errors import UserError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS agents (name TEXT PRIMARY KEY, incarnation INTEGER NOT NULL, instance TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS chunks (
    seq INTEGER PRIMARY KEY, step INTEGER NOT NULL, agent TEXT NOT NULL, incarnation INTEGER NOT NULL,
    chunk_index INTEGER NOT NULL, final INTEGER NOT NULL, rollouts INTEGER NOT NULL, digest TEXT NOT NULL UNIQUE,
    message BLOB NOT NULL);
CREATE INDEX IF NOT EXISTS chunks_by_step ON chunks (step, agent, incarnation, chunk_index);
CREATE TABLE IF NOT EXISTS manifests (
    step INTEGER PRIMARY KEY, seq INTEGER NOT NULL UNIQUE, digest TEXT NOT NULL, message BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS reports (
    step INTEGER NOT NULL, agent TEXT NOT NULL, metrics TEXT NOT NULL, PRIMARY KEY (step, agent));
"""


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk's place in the log. ``digest`` is that of its header."""

    agent: str
    incarnation: int
    chunk_index: int
    final: bool
    rollouts: int
    digest: str


@dataclass(frozen=True, slots=True)
class StoredEvent:
    """A chunk or a manifest as it was received or signed: a serialised Chunk, or a serialised manifest Envelope."""

    seq: int
    step: int
    is_manifest: bool
    agent: str
    incarnation: int
    message: bytes


class Ledger:
    """One run's log. Raises UserError where the file holds another run, or another configuration of this one."""

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        """Opens or makes the file; ``identity`` (names to digests) must equal what it was made with."""
        self._lock = threading.Lock()
        try:
            self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None, timeout=10)
            # A manifest that was sent must never be forgotten, so each commit reaches the disk.
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.executescript(_SCHEMA)
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} cannot be used as a ledger ({error}); choose another --run-dir") from None
        for key, value in identity.items():
            stored = self.meta(key)
            if stored is None:
                self.set_meta(key, value)
            elif stored != value:
                raise UserError(
                    f"{path.parent} holds a run with another {key}; resume with the same files, or choose another --run-dir"
                )
        self._last_seq = self._scalar(
            "SELECT max(s) FROM (SELECT max(seq) s FROM chunks UNION SELECT max(seq) FROM manifests)"
        )

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._db.close()

    def meta(self, key: str) -> str | None:
        """A named value of the run, or None."""
        with self._lock:
            row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return row[0] if row else None

    def set_meta(self, key: str, value: str) -> None:
        """Stores a named value of the run."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def incarnation(self, agent: str) -> int:
        """The agent's current incarnation, 0 before it first joined."""
        return self._scalar("SELECT incarnation FROM agents WHERE name = ?", agent)

    def admit(self, agent: str, instance: str) -> int:
        """The incarnation of a joining process: the current one for an instance that comes back, else a new one."""
        with self._lock:
            row = self._db.execute("SELECT incarnation, instance FROM agents WHERE name = ?", (agent,)).fetchone()
            if row and row[1] == instance:
                return int(row[0])
            incarnation = (row[0] if row else 0) + 1
            self._db.execute("INSERT OR REPLACE INTO agents VALUES (?, ?, ?)", (agent, incarnation, instance))
            return incarnation

    def append_chunk(self, step: int, chunk: StoredChunk, message: bytes) -> None:
        """Appends a chunk to the log."""
        with self._lock:
            self._last_seq += 1
            self._db.execute(
                "INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (self._last_seq, step, *astuple(chunk), message),
            )

    def append_manifest(self, step: int, digest: str, message: bytes) -> None:
        """Closes a step."""
        with self._lock:
            self._last_seq += 1
            self._db.execute("INSERT INTO manifests VALUES (?, ?, ?, ?)", (step, self._last_seq, digest, message))

    def chunks(self, step: int) -> list[StoredChunk]:
        """A step's chunks, in order within each agent and incarnation."""
        with self._lock:
            rows = self._db.execute(
                "SELECT agent, incarnation, chunk_index, final, rollouts, digest FROM chunks WHERE step = ? "
                "ORDER BY agent, incarnation, chunk_index",
                (step,),
            ).fetchall()
        return [StoredChunk(row[0], row[1], row[2], bool(row[3]), row[4], row[5]) for row in rows]

    def steps_of(self, agent: str) -> set[int]:
        """Steps that the agent has published in."""
        with self._lock:
            rows = self._db.execute("SELECT DISTINCT step FROM chunks WHERE agent = ?", (agent,)).fetchall()
        return {int(row[0]) for row in rows}

    def chain_head(self, agent: str, incarnation: int) -> str:
        """Digest of the incarnation's last header; empty before its first."""
        with self._lock:
            row = self._db.execute(
                "SELECT digest FROM chunks WHERE agent = ? AND incarnation = ? ORDER BY seq DESC LIMIT 1",
                (agent, incarnation),
            ).fetchone()
        return row[0] if row else ""

    def open_step(self) -> int:
        """The first step without a manifest."""
        return self._scalar("SELECT max(step) + 1 FROM manifests")

    def manifest_digest(self, step: int) -> str | None:
        """Digest of a closed step's manifest."""
        with self._lock:
            row = self._db.execute("SELECT digest FROM manifests WHERE step = ?", (step,)).fetchone()
        return row[0] if row else None

    def events(self, first_step: int, after_seq: int, most: int) -> list[StoredEvent]:
        """Up to ``most`` events of ``first_step`` and later, in order, after ``after_seq``."""
        with self._lock:
            rows = self._db.execute(
                "SELECT seq, step, 0, agent, incarnation, message FROM chunks WHERE seq > ?1 AND step >= ?2 UNION ALL "
                "SELECT seq, step, 1, '', 0, message FROM manifests WHERE seq > ?1 AND step >= ?2 ORDER BY seq LIMIT ?3",
                (after_seq, first_step, most),
            ).fetchall()
        return [StoredEvent(row[0], row[1], bool(row[2]), row[3], row[4], row[5]) for row in rows]

    def add_report(self, step: int, agent: str, metrics: dict[str, float]) -> None:
        """Stores an agent's metrics of a step; a step that is done again after a restart replaces them."""
        with self._lock:
            self._db.execute("INSERT OR REPLACE INTO reports VALUES (?, ?, ?)", (step, agent, json.dumps(metrics)))

    def _scalar(self, query: str, *parameters: object) -> int:
        with self._lock:
            row = self._db.execute(query, parameters).fetchone()
        return int(row[0] or 0) if row else 0
