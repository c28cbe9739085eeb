"""The coordinator process: one run, one port. Puts the parts together and drives the run's ServerApp."""

import sqlite3
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, RecordDict
from rich.console import Console
from rich.live import Live

from hacrl_fed.config import SHARING_METHODS, RunConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed.protocol import digests, envelope, flower, transport
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.run_folder import locked
from hacrl_fed.status import RunStatus, line, render
from hacrl_fed.v1 import exchange_pb2_grpc, session_pb2_grpc
from hacrl_fed_server.app import build_server_app
from hacrl_fed_server.exchange import Exchange
from hacrl_fed_server.grid import CoordinatorGrid
from hacrl_fed_server.ledger import Ledger
from hacrl_fed_server.services import ExchangeService, SessionService
from hacrl_fed_server.sessions import Sessions
from hacrl_fed_server.steps import Decision, StepBarrier

_TICK_S = 0.25
_FAREWELL_S = 30.0


def run_server(
    run: RunConfig,
    roster: Roster,
    key: Ed25519PrivateKey,
    listen: str,
    run_dir: Path,
    tls: transport.ServerTls | None,
    allow_remote: bool,
    console: Console,
) -> None:
    """Serves a run until its last step is done. Raises UserError for what the user has to mend."""
    if run.min_agents > len(roster.names):
        raise UserError(f"min_agents is {run.min_agents}, and the roster lists {len(roster.names)} agents")
    with locked(run_dir):
        payload = run.model_dump_json().encode()
        identity = {"roster": roster.digest, "run configuration": digests.sha256_hex(payload)}
        with closing(Ledger(run_dir / "ledger.sqlite", identity)) as ledger:
            (run_dir / "config.json").write_text(run.model_dump_json(indent=2), encoding="utf-8")
            if ledger.meta("complete"):
                console.print(
                    f"this run is complete already; see hacrl-fed inspect {run_dir}; a new run needs another --run-dir"
                )
                return
            coordinator = _Coordinator(run, roster, key, payload, ledger, run_dir)
            # A call holds a thread until its request is whole, and a stream until it ends. So many a connection may have
            # open that one site's cannot take all threads (transport.make_server).
            server, address = transport.make_server(
                roster,
                transport.parse_address(listen),
                tls,
                chunk_bytes=run.message_bytes(len(roster.names)),
                workers=16 * (1 + len(roster.names)),
                insecure_allow_remote=allow_remote,
            )
            try:
                coordinator.serve(server, str(address), console)
            except (OSError, sqlite3.Error) as error:
                raise HacrlFedError(
                    f"the run folder {run_dir} cannot be written ({error}): make room and resume"
                ) from None


class _Coordinator:
    def __init__(
        self, run: RunConfig, roster: Roster, key: Ed25519PrivateKey, payload: bytes, ledger: Ledger, run_dir: Path
    ) -> None:
        self._run = run
        self._roster = roster
        self._run_dir = run_dir
        self._ledger = ledger
        started = ledger.meta("genesis") is not None
        barrier = StepBarrier(roster.names, run.min_agents, run.deadlines, time.monotonic(), started)
        self._exchange = Exchange(run, roster, key, ledger, barrier)
        self._resumed_at = self._exchange.open_step if started else None
        self._sessions = Sessions(run, roster, payload, ledger, barrier, self._exchange.changed)
        self._run_config = envelope.sign(key, envelope.RUN_CONFIG_TYPE, payload)
        self._stop = threading.Event()

    def serve(self, server: grpc.Server, address: str, console: Console) -> None:
        session_service = SessionService(self._roster, self._run_config, self._sessions, self._exchange)
        session_pb2_grpc.add_SessionServicer_to_server(session_service, server)
        exchange_pb2_grpc.add_ExchangeServicer_to_server(ExchangeService(self._sessions, self._exchange), server)
        server.start()
        console.print(f"listening on {address}; run {self._roster.run}, agents {', '.join(self._roster.names)}")
        with (
            Live(console=console, auto_refresh=False, transient=True) as live,
            ThreadPoolExecutor(1, thread_name_prefix="ticker") as pool,
        ):
            ticker = pool.submit(self._tick, address, live)
            try:
                grid = CoordinatorGrid(self._roster, self._sessions, lambda: _raise_failure(ticker))
                build_server_app(self._run, self._resumed_at)(grid, _context(grid))
                if self._run.algorithm.method in SHARING_METHODS and not self._exchange.complete:
                    raise HacrlFedError(
                        f"the sites say that all steps are done, but {self._run_dir} holds {self._exchange.open_step} of"
                        f" {self._run.steps}: their run folders are of another try; start all with new ones"
                    )
                self._ledger.set_meta("complete", "yes")
                self._sessions.finish("the run is complete")
                self._await_farewell()
            finally:
                self._stop.set()
                server.stop(grace=1).wait()
        console.print(f"the run is complete: {self._run.steps} steps; see hacrl-fed inspect {self._run_dir}")

    def _tick(self, address: str, live: Live) -> None:
        """Closes steps when their time has come, expires sessions and shows what the run is doing."""
        shown = None
        while not self._stop.is_set():
            with self._exchange.changed:
                now = time.monotonic()
                self._sessions.expire(now)
                status = self._status(address, self._exchange.advance(now))
                if status == shown:
                    self._exchange.changed.wait(_TICK_S)
                    continue
                self._sessions.show(status)
            status.write(self._run_dir)
            if live.console.is_terminal:
                live.update(render(status), refresh=True)
            elif shown is None or status.step != shown.step:
                live.console.print(line(status))
            shown = status

    def _status(self, address: str, decision: Decision) -> RunStatus:
        agents = self._sessions.agents()
        if self._run.algorithm.method in SHARING_METHODS:
            step, awaited = self._exchange.open_step, decision.awaited
            text = "all steps are closed" if self._exchange.complete else decision.text
        else:
            step = min(agent.step for agent in agents.values())
            awaited = tuple(name for name, agent in agents.items() if not agent.present)
            text = f"waiting for {', '.join(awaited)} to join" if awaited else "each agent trains alone"
        return RunStatus(
            self._roster.run, self._run.algorithm.method, address, step, self._run.steps, text, awaited, agents
        )

    def _await_farewell(self) -> None:
        """Lets the sites take in that the run is over, so that none finds the server gone instead."""
        deadline = time.monotonic() + _FAREWELL_S
        with self._exchange.changed:
            while self._sessions.present() and time.monotonic() < deadline:
                self._exchange.changed.wait(_TICK_S)


def _raise_failure(work: Future[None]) -> None:
    if work.done():
        work.result()


def _context(grid: CoordinatorGrid) -> Context:
    return Context(
        run_id=grid.run.run_id, node_id=flower.SERVER_NODE_ID, node_config={}, state=RecordDict(), run_config={}
    )
