"""The command line. Each command's work is elsewhere, and imported only by the command that needs it."""

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal, NoReturn

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.text import Text

from hacrl_fed.errors import HacrlFedError, InterruptedRunError, UserError
from hacrl_fed.protocol.transport import ClientTls, ServerTls
from hacrl_fed.status import printable

app = typer.Typer(
    name="hacrl-fed",
    help="Organisations train their own language models by reinforcement learning together, without sharing weights.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
keys_app = typer.Typer(help="Identities of agents and of coordinators.", no_args_is_help=True)
roster_app = typer.Typer(help="Who may take part in a run.", no_args_is_help=True)
app.add_typer(keys_app, name="keys")
app.add_typer(roster_app, name="roster")

# What the extra "client" installs, beside what a coordinator needs.
_CLIENT_MODULES = frozenset(
    {"accelerate", "datasets", "math_verify", "pebble", "peft", "reasoning_gym", "tenacity", "torch", "transformers"}
)

RunDir = Annotated[Path, typer.Option(help="Folder of the run; the same command with the same folder resumes.")]
RosterFile = Annotated[Path, typer.Option(help="The run's roster.")]
KeyFile = Annotated[Path, typer.Option(help="This side's private key.")]
Overrides = Annotated[list[str] | None, typer.Option("--set", help="Override a setting: section.key=value.")]
Insecure = Annotated[bool, typer.Option("--insecure", help="Plain text instead of TLS; on this machine only.")]
InsecureRemote = Annotated[
    bool, typer.Option("--insecure-allow-remote", help="With --insecure: plain text to other machines too.")
]


@keys_app.command("new")
def keys_new(out: Annotated[Path, typer.Option(help="File for the private key; must not exist.")]) -> None:
    """Makes an Ed25519 identity; prints its public line for the roster."""
    from hacrl_fed.protocol import keys

    key = keys.generate()
    keys.write_private_key(out, key)
    print(keys.format_public_key(key.public_key()))


@roster_app.command("new")
def roster_new(
    run: Annotated[str, typer.Option(help="Name of the run.")],
    coordinator: Annotated[str, typer.Option(help="The coordinator's public line.")],
    agent: Annotated[list[str], typer.Option(help="NAME=PUB, once for each agent.")],
    out: Annotated[Path, typer.Option(help="File for the roster; must not exist.")],
) -> None:
    """Writes a roster, which every site checks and keeps a copy of."""
    from hacrl_fed.protocol import roster
    from hacrl_fed.protocol.keys import write_new_file

    agents = []
    for entry in agent:
        name, separator, line = entry.partition("=")
        if not separator:
            raise UserError(f"--agent takes NAME=PUB, not {entry!r}")
        agents.append({"name": name, "organisation": name, "public_key": line})
    data = {"run": run, "coordinator": coordinator, "agents": agents}
    write_new_file(out, roster.parse(data, "roster new").dump().encode(), mode=0o644)


@app.command()
def certs(
    host: Annotated[str, typer.Option(help="Name or address under which sites reach the server.")],
    out: Annotated[Path, typer.Option(help="Folder for ca.pem, ca-key.pem, server.pem and server-key.pem.")],
) -> None:
    """Makes a development certificate authority and a server certificate."""
    from hacrl_fed.protocol.certs import write_development_ca

    write_development_ca(host, out)


@app.command()
def server(
    config: Annotated[Path, typer.Option(help="The run's configuration (run.yaml).")],
    roster: RosterFile,
    key: KeyFile,
    listen: Annotated[str, typer.Option(help="HOST:PORT to listen on; port 0 takes a free one.")],
    run_dir: RunDir,
    tls_cert: Annotated[Path | None, typer.Option(help="The server's certificate.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    client_ca: Annotated[Path | None, typer.Option(help="Ask for client certificates of this authority.")] = None,
    insecure: Insecure = False,
    insecure_allow_remote: InsecureRemote = False,
    set_: Overrides = None,
) -> None:
    """Coordinates a run: takes signed rollouts, hands them on, closes each step by a signed manifest."""
    from hacrl_fed.config import RunConfig, load
    from hacrl_fed.protocol.identity import load_coordinator
    from hacrl_fed_server.coordinator import run_server

    tls = _server_tls(tls_cert, tls_key, client_ca, insecure)
    loaded_roster, private_key = load_coordinator(roster, key)
    with _interruptible(f"the same command with --run-dir {run_dir} resumes"):
        run_server(
            run=load(RunConfig, config, set_),
            roster=loaded_roster,
            key=private_key,
            listen=listen,
            run_dir=run_dir,
            tls=tls,
            allow_remote=insecure_allow_remote,
            console=Console(),
        )


@app.command()
def client(
    server: Annotated[str, typer.Option(help="HOST:PORT of the coordinator.")],
    agent: Annotated[str, typer.Option(help="This agent's name in the roster.")],
    model: Annotated[str, typer.Option(help="A model folder, or a hub id.")],
    roster: RosterFile,
    key: KeyFile,
    run_dir: RunDir,
    ca: Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the server's.")] = None,
    client_cert: Annotated[
        Path | None, typer.Option(help="This side's certificate, where the server asks for one.")
    ] = None,
    client_key: Annotated[Path | None, typer.Option(help="Its private key.")] = None,
    insecure: Insecure = False,
    insecure_allow_remote: InsecureRemote = False,
    config: Annotated[Path | None, typer.Option(help="The site's own configuration (site.yaml).")] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="GPUs that train together; all that there are without it.")
    ] = None,
    set_: Overrides = None,
) -> None:
    """Trains this site's model on its own rollouts and on those that the other agents share."""
    from hacrl_fed.config import SiteConfig, load
    from hacrl_fed.protocol.identity import load_agent

    if insecure == (ca is not None):
        raise UserError("give --ca FILE for TLS, or --insecure for plain text on this machine, and not both")
    with _interruptible(f"the same command with --run-dir {run_dir} resumes"):
        overrides = [*(set_ or []), *([f"devices={devices}"] if devices is not None else [])]
        site_config = load(SiteConfig, config, overrides)
        loaded_roster, private_key = load_agent(roster, key, agent)
        tls = ClientTls(ca, *(_pair(client_cert, client_key, "--client-cert", "--client-key") or ())) if ca else None
        console = Console()
        # Takes seconds, in which Ctrl-C must work too.
        with console.status(f"{agent}: loading the training stack"):
            from hacrl_fed_client.run import run_client

        run_client(
            address=server,
            agent=agent,
            model=model,
            roster=loaded_roster,
            key=private_key,
            run_dir=run_dir,
            tls=tls,
            allow_remote=insecure_allow_remote,
            site_config=site_config,
            base_dir=config.parent if config else Path(),
            console=console,
        )


@app.command()
def simulate(
    config: Annotated[Path, typer.Option(help="The federation: the run, its agents and what to compare with.")] = Path(
        "configs/demo.yaml"
    ),
    method: Annotated[str | None, typer.Option(help="Train by this method, and compare with no other.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of the run.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the run.")] = None,
    run_dir: Annotated[Path | None, typer.Option(help="Folder of the run; the same one resumes.")] = None,
    set_: Overrides = None,
) -> None:
    """Runs a whole federation on this machine: a coordinator and a process for each agent, over TLS."""
    from hacrl_fed.simulate import run_simulation

    overrides = list(set_ or [])
    if method is not None:
        overrides += [f"run.algorithm.method={method}", "compare=[]"]
    overrides += [f"run.steps={steps}"] if steps is not None else []
    overrides += [f"run.seed={seed}"] if seed is not None else []
    with _interruptible():
        run_simulation(config, overrides, run_dir, Console())


@app.command("demo-model")
def demo_model(
    name: Annotated[Literal["a", "b"], typer.Argument(help="a (Qwen3, character tokens) or b (Llama, other tokens).")],
    out: Annotated[Path, typer.Option(help="Folder for the model; must not exist.")],
    seed: Annotated[int, typer.Option(help="Seed of its weights and demonstrations.")] = 0,
) -> None:
    """Makes one of the demo's two small models, warm-started on demonstrations in about 20 s."""
    from hacrl_fed_client.demo_models import make_demo_model

    if out.exists():
        raise UserError(f"{out} exists already and is not overwritten: name another folder, or move it away")
    with _interruptible(), Console().status(f"warm-starting model {name}, about 20 s"):
        make_demo_model(name, seed, out)
    print(f"model {name} is in {out}")


RunFolderArgument = Annotated[Path, typer.Argument(help="Run folder of a client, of a server or of simulate.")]
TaskId = Annotated[str, typer.Option(help="The task's id.")]
SiteFile = Annotated[
    Path | None, typer.Option(help="The site's own configuration (site.yaml), which may define tasks.")
]


@app.command()
def score(task: TaskId, config: SiteFile = None, set_: Overrides = None) -> None:
    """Scores completions: JSON lines in ("prompt_id" or "prompt", and "completion"), with a reward and a reason out."""
    from hacrl_fed.config import SiteConfig, load
    from hacrl_fed.scoring import read_completions
    from hacrl_fed.scoring import score as score_all
    from hacrl_fed.tasks.registry import load_task
    from hacrl_fed.verifiers.pool import WORKERS, VerifierPool

    with _interruptible():
        site = load(SiteConfig, config, set_)
        loaded = load_task(task, site.tasks, config.parent if config else Path())
        items = read_completions(sys.stdin.buffer, loaded)
        with VerifierPool(loaded.verifier, site.verifier_timeout_s, WORKERS) as verifiers:
            for line in score_all(items, verifiers):
                print(line, flush=True)


@app.command("eval")
def evaluate(
    model: Annotated[str, typer.Option(help="A model folder, or a hub id.")],
    task: TaskId,
    config: SiteFile = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts to take at most.")] = 200,
    max_prompt_tokens: Annotated[int, typer.Option(min=1, help="Longer prompts are left out.")] = 1024,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Where completions are cut: 4096, or what the model's context leaves.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampled completions.")] = 0,
    set_: Overrides = None,
) -> None:
    """Measures a model's held-out accuracy on a task, greedy and sampled, as a site does before and after training."""
    from hacrl_fed.config import SiteConfig, load
    from hacrl_fed_client.evaluate import run_evaluation

    with _interruptible():
        run_evaluation(
            model=model,
            task_id=task,
            site_config=load(SiteConfig, config, set_),
            base_dir=config.parent if config else Path(),
            prompts=prompts,
            max_prompt_tokens=max_prompt_tokens,
            max_new_tokens=max_new_tokens,
            seed=seed,
            console=Console(),
        )


@app.command()
def inspect(
    run_dir: RunFolderArgument,
    roster: Annotated[
        Path | None, typer.Option(help="Check the signatures in a server's ledger by this roster.")
    ] = None,
) -> None:
    """Shows what left a site, what a published rollout holds, and whether a server's chain of manifests verifies."""
    from hacrl_fed import inspection
    from hacrl_fed.protocol import roster as rosters
    from hacrl_fed.run_folder import open_run_folder
    from hacrl_fed_server.audit import audit_ledger, render_audit

    console = Console()
    faults = []
    runs = open_run_folder(run_dir)
    for run in runs:
        if len(runs) > 1:
            console.rule(Text(run.method))
        for agent, folder in run.agents.items():
            console.print(inspection.render_egress(agent, inspection.read_egress(folder)))
        if run.ledger:
            pinned = roster or run.roster
            audit = audit_ledger(run.ledger, rosters.load(pinned) if pinned else None)
            console.print(render_audit(audit))
            faults += [f"{run.ledger}: {audit.fault}"] if audit.fault else []
    if any(run.agents for run in runs):
        console.print(inspection.render_contents())
    if faults:
        raise HacrlFedError(f"the chain of manifests does not verify: {faults[0]}")


@app.command()
def report(run_dir: RunFolderArgument) -> None:
    """Shows how the agents of a run do, also while it goes on: accuracy, learning curves, sharing, seconds a step."""
    from hacrl_fed.report import render_run
    from hacrl_fed.run_folder import open_run_folder

    runs = [run for run in open_run_folder(run_dir) if run.agents]
    if not runs:
        raise UserError(f"{run_dir} holds no agent's metrics: name the run folder of a client or of simulate")
    console = Console()
    for run in runs:
        console.print(render_run(run))


@app.command()
def doctor(
    server: Annotated[str | None, typer.Option(help="HOST:PORT of a coordinator that should be reachable.")] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate of the authority that signed the server's.")] = None,
    insecure: Insecure = False,
) -> None:
    """Looks for what would get in the way of a run on this machine; exit code 1 where there is a problem."""
    from hacrl_fed.doctor import Level, examine_machine, examine_server, render
    from hacrl_fed.protocol.transport import parse_address

    if (ca is not None) + insecure != (server is not None):
        raise UserError("--server goes with --ca FILE for TLS, or with --insecure for plain text, and not with both")
    findings = list(examine_machine(Path()))
    if server is not None:
        findings.append(examine_server(parse_address(server), ClientTls(ca) if ca else None))
    Console().print(render(findings))
    if any(finding.level is Level.PROBLEM for finding in findings):
        raise typer.Exit(1)


def main() -> None:
    """Runs a command; an error of ours is one sentence and its exit code."""
    # Asks for sys.stderr at each line, so that what moves at the bottom of a terminal is not written over.
    handler = RichHandler(console=Console(stderr=True), show_time=False, show_path=False)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    try:
        app()
    except HacrlFedError as error:
        _fail(error)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in _CLIENT_MODULES:
            raise
        _fail(
            UserError(f"this command needs {error.name}: install the training stack, pip install 'hacrl-fed[client]'")
        )


def _fail(error: HacrlFedError) -> NoReturn:
    kind = "" if isinstance(error, InterruptedRunError) else "error: "
    Console(stderr=True, soft_wrap=True).print(Text.assemble((kind, "bold red"), printable(str(error))))
    sys.exit(error.exit_code)


@contextmanager
def _interruptible(hint: str = "") -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into a clean stop that says how to resume."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    # SIGINT too: a shell has jobs in its background ignore it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        raise InterruptedRunError(f"interrupted; {hint}" if hint else "interrupted") from None


def _server_tls(cert: Path | None, key: Path | None, client_ca: Path | None, insecure: bool) -> ServerTls | None:
    pair = _pair(cert, key, "--tls-cert", "--tls-key")
    if insecure == (pair is not None):
        raise UserError(
            "give --tls-cert and --tls-key (hacrl-fed certs makes them), or --insecure for plain text on this machine, "
            "and not both"
        )
    return ServerTls(*pair, client_ca) if pair else None


def _pair(first: Path | None, second: Path | None, first_name: str, second_name: str) -> tuple[Path, Path] | None:
    if first is None and second is None:
        return None
    if first is None or second is None:
        raise UserError(f"{first_name} and {second_name} go together")
    return first, second
