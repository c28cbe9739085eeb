"""A whole federation on one machine: the same commands as on separate machines, each in a process of its own.

The coordinator and the agents talk over TLS on 127.0.0.1, with keys, a roster and certificates made for the run.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hacrl_fed.config import SimulationConfig, load, rooted
from hacrl_fed.errors import HacrlFedError, InterruptedRunError, RefusedError, UserError
from hacrl_fed.protocol import certs, keys
from hacrl_fed.protocol import roster as rosters
from hacrl_fed.status import RunStatus, line, render

_POLL_S = 0.25
_NO_ADDRESS = "127.0.0.1:0"
_START_S = 60.0
_STOP_S = 30.0
_MODEL_S = 600.0


@dataclass
class _Process:
    name: str
    popen: "subprocess.Popen[bytes]"
    log: Path


def run_simulation(config_file: Path, overrides: list[str], run_dir: Path | None, console: Console) -> None:
    """Trains by the configured method, then the same agents by each of ``compare``, and prints how they did.

    Raises UserError for what the user has to mend, and HacrlFedError where a process fails.
    """
    config = load(SimulationConfig, config_file, overrides)
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = (run_dir or Path("runs") / f"{config.run.algorithm.method}-seed{config.run.seed}-{stamp}").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    _keep_config(folder, config)
    console.print(f"run folder: {folder}")
    try:
        federation = _prepare(folder, config, config_file.parent, console)
        summaries: dict[str, dict[str, Any]] = {}
        for method in dict.fromkeys((config.run.algorithm.method, *config.compare)):
            own = method == config.run.algorithm.method
            summaries[method] = _run_method(federation, method, folder if own else folder / method, console)
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; the same command with --run-dir {folder} resumes") from None
    console.print(_results(summaries, config))
    console.print(_means(summaries))
    console.print(f"run folder: {folder}")


@dataclass(frozen=True, slots=True)
class _Federation:
    """What all methods of a simulation have in common."""

    config: SimulationConfig
    base_dir: Path
    files: Path
    models: dict[str, str]


def _keep_config(folder: Path, config: SimulationConfig) -> None:
    path = folder / "config.json"
    text = config.model_dump_json(indent=2)
    if path.exists() and path.read_text(encoding="utf-8") != text:
        raise UserError(f"{folder} holds a run with another configuration: choose another --run-dir")
    path.write_text(text, encoding="utf-8")


def _prepare(folder: Path, config: SimulationConfig, base_dir: Path, console: Console) -> _Federation:
    """Makes keys, roster, certificates and demo models, where an earlier call has not."""
    files = folder / "federation"
    if not (files / "roster.yaml").exists():
        files.mkdir(exist_ok=True)
        lines = {}
        for name in ("coordinator", *(f"agent-{agent}" for agent in config.agents)):
            key = keys.generate()
            (files / f"{name}.key").unlink(missing_ok=True)
            keys.write_private_key(files / f"{name}.key", key)
            lines[name] = keys.format_public_key(key.public_key())
        if not (files / "tls" / "ca.pem").exists():
            certs.write_development_ca("127.0.0.1", files / "tls")
        agents = [
            {"name": agent, "organisation": agent, "public_key": lines[f"agent-{agent}"]} for agent in config.agents
        ]
        roster = rosters.parse({"run": "simulation", "coordinator": lines["coordinator"], "agents": agents}, "roster")
        (files / "roster.yaml").write_text(roster.dump(), encoding="utf-8")
    return _Federation(config, base_dir, files, _models(folder, config, base_dir, console))


def _models(folder: Path, config: SimulationConfig, base_dir: Path, console: Console) -> dict[str, str]:
    """The agents' models; warm-starts the demo's side by side, once for a seed."""
    models: dict[str, str] = {}
    making: list[_Process] = []
    for name, agent in config.agents.items():
        if agent.model is not None:
            path = base_dir / agent.model
            models[name] = str(path) if path.exists() else agent.model
            continue
        out = folder / "models" / name
        models[name] = str(out)
        if not out.exists():
            arguments = ["demo-model", str(agent.demo_model), "--seed", str(config.run.seed), "--out", str(out)]
            making.append(_start(f"model {name}", arguments, folder / "models" / f"{name}.log"))
    try:
        if making:
            with console.status("warm-starting the demo's two models"):
                deadline = time.monotonic() + _MODEL_S
                while any(process.popen.poll() is None for process in making) and time.monotonic() < deadline:
                    time.sleep(_POLL_S)
            for process in making:
                _check_ended(process)
    finally:
        _stop(making)
    return models


def _run_method(federation: _Federation, method: str, folder: Path, console: Console) -> dict[str, Any]:
    """One run of all agents by one method, in processes of their own. Returns its summary."""
    if (folder / "summary.json").exists():
        return _read_json(folder / "summary.json")
    started = time.monotonic()
    config, files = federation.config, federation.files
    algorithm = config.run.algorithm.model_copy(update={"method": method})
    run = config.run.model_copy(update={"algorithm": algorithm})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.yaml").write_text(run.model_dump_json(indent=2), encoding="utf-8")
    (folder / "server").mkdir(exist_ok=True)
    # The port of an earlier try is not the port of this one.
    (folder / "server" / "status.json").unlink(missing_ok=True)
    roster = ["--roster", str(files / "roster.yaml")]
    tls = files / "tls"
    processes: list[_Process] = []
    try:
        server_arguments = [
            *("server", "--config", str(folder / "run.yaml"), *roster, "--key", str(files / "coordinator.key")),
            *("--listen", "127.0.0.1:0", "--run-dir", str(folder / "server")),
            *("--tls-cert", str(tls / "server.pem"), "--tls-key", str(tls / "server-key.pem")),
        ]
        processes.append(_start("server", server_arguments, folder / "server" / "server.log"))
        address = _await_address(processes[0], folder / "server")
        for name, agent in config.agents.items():
            agent_folder = folder / "agents" / name
            agent_folder.mkdir(parents=True, exist_ok=True)
            site_file = agent_folder / "site.yaml"
            # In another folder, which its paths are not relative to.
            site_file.write_text(rooted(agent.site, federation.base_dir).model_dump_json(indent=2), encoding="utf-8")
            arguments = [
                *("client", "--server", address, "--agent", name, "--model", federation.models[name], *roster),
                *("--key", str(files / f"agent-{name}.key"), "--run-dir", str(agent_folder)),
                *("--ca", str(tls / "ca.pem"), "--config", str(site_file)),
            ]
            processes.append(_start(f"agent {name}", arguments, agent_folder / "client.log"))
        _watch(processes, folder / "server", console)
    finally:
        _stop(processes)
    agents: dict[str, Any] = {}
    for name in config.agents:
        agents |= _read_json(folder / "agents" / name / "summary.json")["agents"]
    summary = {
        "method": method,
        "seed": run.seed,
        "steps": run.steps,
        "wall_s": round(time.monotonic() - started, 3),
        "agents": agents,
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2), encoding="utf-8")
    console.print(f"{method}: {run.steps} steps of {len(agents)} agents in {summary['wall_s']:.0f} s")
    return summary


def _start(name: str, arguments: list[str], log: Path) -> _Process:
    log.parent.mkdir(parents=True, exist_ok=True)
    # Threads of several processes that spin while they wait take the cores from each other.
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "COLUMNS": "200", **os.environ}
    with ExitStack() as stack:
        output: TextIO = stack.enter_context(log.open("a", encoding="utf-8"))
        popen = subprocess.Popen(
            [sys.executable, "-m", "hacrl_fed", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=environment,
            # Ctrl-C is for this process, which then stops the others in order.
            start_new_session=True,
        )
    return _Process(name, popen, log)


def _await_address(server: _Process, folder: Path) -> str:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        if status := RunStatus.read(folder):
            return status.address
        if server.popen.poll() is not None:
            _check_ended(server)
            return _NO_ADDRESS  # it was complete; what is left to do, the sites do alone
        time.sleep(0.05)
    raise HacrlFedError(f"the server did not start within {_START_S:.0f} s; see {server.log}")


def _watch(processes: list[_Process], server_folder: Path, console: Console) -> None:
    """Shows the run until all processes have ended. Raises HacrlFedError for the first that fails."""
    shown = None
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while any(process.popen.poll() is None for process in processes):
            for process in processes:
                if process.popen.poll():
                    _check_ended(process)
            status = RunStatus.read(server_folder)
            if status and status != shown:
                if console.is_terminal:
                    live.update(render(status), refresh=True)
                elif shown is None or status.step != shown.step:
                    console.print(line(status))
                shown = status
            time.sleep(_POLL_S)
    for process in processes:
        _check_ended(process)


def _check_ended(process: _Process) -> None:
    code = process.popen.poll()
    if code is None:
        raise HacrlFedError(f"{process.name} did not end in time; see {process.log}")
    if code != 0:
        lines = [
            line for line in process.log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
        last = lines[-1].removeprefix("error: ") if lines else f"exit code {code}"
        kind = {error.exit_code: error for error in (UserError, RefusedError)}.get(code, HacrlFedError)
        raise kind(f"{process.name}: {last} (log: {process.log})")


def _stop(processes: list[_Process]) -> None:
    """Interrupts what still runs, as Ctrl-C would, and kills what does not end then."""
    for process in reversed(processes):
        if process.popen.poll() is None:
            # Not SIGINT, which a shell has its background jobs ignore, and their children with them.
            process.popen.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + _STOP_S
    for process in processes:
        try:
            process.popen.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.popen.kill()
            process.popen.wait()


def _read_json(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data


def _results(summaries: dict[str, dict[str, Any]], config: SimulationConfig) -> Table:
    """Held-out accuracy, rollouts and traffic of every agent under every method."""
    table = Table(
        title="held-out accuracy before → after training",
        title_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
    )
    table.add_column("agent", no_wrap=True)
    table.add_column("method", no_wrap=True)
    for column in ("greedy", "sampled", "rollouts", "sent", "weights"):
        table.add_column(column, justify="right", no_wrap=True)
    for name in config.agents:
        for method, summary in summaries.items():
            agent = summary["agents"][name]
            main = method == config.run.algorithm.method
            table.add_row(
                name if main else "",
                Text(method, style="bold" if main else ""),
                *(_change(agent, mode) for mode in ("greedy", "sampled")),
                f"{agent['own_rollouts']:,}",
                decimal(agent["egress_bytes"]),
                decimal(agent["weight_bytes"]),
            )
        table.add_section()
    return table


def _means(summaries: dict[str, dict[str, Any]]) -> str:
    """The mean over agents of the final greedy accuracy, by method."""
    finals = {
        method: [agent["after"]["greedy"] for agent in summary["agents"].values() if "greedy" in agent["after"]]
        for method, summary in summaries.items()
    }
    means = [f"{method} {statistics.fmean(values):.3f}" for method, values in finals.items() if values]
    return f"mean greedy accuracy after training: {', '.join(means) or 'not measured'}"


def _change(agent: dict[str, Any], mode: str) -> str:
    if mode not in agent["before"] or mode not in agent["after"]:
        return "-"
    return f"{agent['before'][mode]:.2f} → {agent['after'][mode]:.2f}"
