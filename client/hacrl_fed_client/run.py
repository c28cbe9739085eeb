"""The client process: checks the user's files, joins the run, puts the site together and follows the coordinator's orders."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Context, RecordDict
from rich.console import Console

from hacrl_fed.algorithms.hacpo import CapabilityTracker
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, RunConfig, SiteConfig, merged_algorithm, parse, rooted
from hacrl_fed.errors import HacrlFedError, RefusedError, UnreachableError, UserError
from hacrl_fed.protocol import digests, flower, transport
from hacrl_fed.protocol.roster import Roster
from hacrl_fed.records import SamplingParameters
from hacrl_fed.run_folder import keep_json_lines, locked, read_json, write_whole
from hacrl_fed.tasks.base import Task
from hacrl_fed.tasks.registry import load_task
from hacrl_fed.tasks.schedule import step_prompts
from hacrl_fed.verifiers.pool import WORKERS, VerifierPool
from hacrl_fed_client import checkpoint
from hacrl_fed_client.admission import Admission, StepExpectation
from hacrl_fed_client.app import MESSAGE_TYPES, build_client_app
from hacrl_fed_client.console import SiteConsole
from hacrl_fed_client.devices.sharded import Plan, Training, training_on_devices
from hacrl_fed_client.egress import Egress
from hacrl_fed_client.inbox import Inbox
from hacrl_fed_client.loading import load_tokenizer
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.progress import Progress
from hacrl_fed_client.publisher import Publisher
from hacrl_fed_client.retokenize import Retokenizer
from hacrl_fed_client.session import Joined, Session
from hacrl_fed_client.site import Exchanging, Site
from hacrl_fed_client.summary import FILE_NAME, write_summary

_FAREWELL_S = 2.0  # to reach a server that may have ended, when nothing but an answer to it is left to do
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"


@dataclass(frozen=True, slots=True)
class _Joining:
    """What is known once the site has joined."""

    run: RunConfig
    algorithm: AlgorithmConfig
    task: Task
    genesis: str
    joined: Joined


def run_client(
    address: str,
    agent: str,
    model: str,
    roster: Roster,
    key: Ed25519PrivateKey,
    run_dir: Path,
    tls: transport.ClientTls | None,
    allow_remote: bool,
    site_config: SiteConfig,
    base_dir: Path,
    console: Console,
) -> None:
    """Trains until the run is over. Raises UserError for what the user has to mend, RefusedError for what the server refuses.

    ``base_dir`` is what relative paths in ``site_config`` are relative to.
    """
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    site_config = rooted(site_config, base_dir)
    # What can be wrong on this side is found out before anything leaves it.
    server_address = transport.parse_address(address)
    load_tokenizer(model)
    shown = SiteConsole(console, agent)
    with (
        locked(run_dir),
        shown.running(),
        _told_apart(),
        closing(Egress(run_dir, site_config.limits.egress_bytes_per_step)) as egress,
    ):
        saved = checkpoint.latest(run_dir / "checkpoints")
        finished = (run_dir / FILE_NAME).exists() or (
            saved is not None and _finish_alone(saved, run_dir, agent, model, site_config, egress)
        )
        connect_s = site_config.connect_s
        if finished:
            shown.tell(
                f"this run is complete; the model is in {run_dir / 'model'}; a new run needs another --run-dir; the "
                "server is told, should it still wait for this agent"
            )
            if saved is None:
                return  # there is nothing left to answer the server with
            connect_s = min(connect_s, _FAREWELL_S)
        session = Session(server_address, tls, allow_remote, key, roster, agent, connect_s, egress, shown.tell)
        try:
            with closing(session), ExitStack() as devices:
                run, payload = session.get_run()
                shown.joined(run.steps)
                algorithm = merged_algorithm(run, site_config)
                task = load_task(run.task.id, site_config.tasks, base_dir)
                genesis = digests.genesis_digest(roster.digest, payload, task.digest)
                _keep_config(run_dir, agent, model, genesis, run, site_config)
                shown.doing(0, "loading the model")
                plan = Plan(model, site_config, run.seed, agent, algorithm)
                training = devices.enter_context(training_on_devices(plan, session.check))
                if training.policy.tokenizer.chat_template is None:
                    shown.tell(
                        "no chat template: prompts are given as plain text; where the model was trained on chats, set "
                        "chat_template in site.yaml to a file with its template"
                    )
                next_step = saved.step if saved else 0
                shares = METHODS[algorithm.method].shares
                joined = session.join(task.digest, next_step if shares else 0)
                joining = _Joining(run, algorithm, task, genesis, joined)
                # The session ends before the verifiers do: its reading thread uses them.
                with (
                    VerifierPool(task.verifier, site_config.verifier_timeout_s, WORKERS) as verifiers,
                    closing(session),
                ):
                    site = _build_site(
                        joining, saved, training, verifiers, session, key, roster, agent, site_config, run_dir, shown
                    )
                    site.check_prompts()
                    session.attend(shown.status)
                    _follow_orders(session, site, roster, agent)
                site.write_summary()  # again, with the last messages counted
        except (UnreachableError, RefusedError):
            # The server has ended, and could only have been told that all is done here.
            if not finished:
                raise
            return
    shown.tell(f"the run is complete; the model is in {run_dir / 'model'}, and hacrl-fed report {run_dir} tells more")


def _build_site(
    joining: _Joining,
    saved: checkpoint.Checkpoint | None,
    training: Training,
    verifiers: VerifierPool,
    session: Session,
    key: Ed25519PrivateKey,
    roster: Roster,
    agent: str,
    config: SiteConfig,
    run_dir: Path,
    shown: SiteConsole,
) -> Site:
    """The site, as its newest checkpoint left it."""
    run, algorithm, policy = joining.run, joining.algorithm, training.policy
    tracker = CapabilityTracker(algorithm.hacpo.window)
    progress = Progress(genesis=joining.genesis, next_step=0, previous_manifest=joining.genesis)
    if saved:
        policy.load_trainable_state(saved.policy)
        training.updater.load_state(saved.optimizer, saved.scheduler)
        checkpoint.restore_random_state(saved.random_state)
        tracker.load_state_dict(saved.extra["capabilities"])
        progress = Progress(**saved.extra["progress"])
        session.egress.received(progress.received_bytes)
        shown.tell(f"resuming from the checkpoint before step {progress.next_step + 1}")
    # Steps after the checkpoint are learned from again, and reported again.
    keep_json_lines(run_dir / "metrics.jsonl", lambda line: line["step"] < progress.next_step)
    exchanging = None
    if METHODS[algorithm.method].shares:
        exchanging = _build_exchanging(joining, policy, verifiers, session, key, roster, agent, progress)
    return Site(
        agent=agent,
        run=run,
        algorithm=algorithm,
        config=config,
        task=joining.task,
        policy=policy,
        generator=training.generator,
        updater=training.updater,
        tracker=tracker,
        verifiers=verifiers,
        session=session,
        exchanging=exchanging,
        progress=progress,
        run_dir=run_dir,
        console=shown,
    )


def _build_exchanging(
    joining: _Joining,
    policy: Policy,
    verifiers: VerifierPool,
    session: Session,
    key: Ed25519PrivateKey,
    roster: Roster,
    agent: str,
    progress: Progress,
) -> Exchanging:
    run, task = joining.run, joining.task

    def expect(step: int, previous_manifest: str) -> StepExpectation:
        prompts = step_prompts(task.train, run.prompts_per_step, run.seed, step)
        return StepExpectation(step, previous_manifest, {prompt.id: prompt for prompt in prompts})

    admission = Admission(
        agent,
        roster,
        run.limits,
        run.group_size,
        run.max_new_tokens,
        verifiers,
        # Of its own, since a tokenizer is not safe to use from two threads.
        Retokenizer(load_tokenizer(policy.name), policy.eos_ids),
        policy.tokenizer_digest,
    )
    inbox = Inbox(roster, admission, expect, progress.next_step, progress.previous_manifest)
    publisher = Publisher(
        session,
        inbox,
        key,
        roster.run,
        agent,
        SamplingParameters(run.max_new_tokens),
        policy.tokenizer_digest,
        run.limits.chunk_bytes,
    )
    session.run_beside(lambda: inbox.read(session.subscribe(lambda: inbox.reading_step)))
    return Exchanging(inbox, admission, publisher, joining.joined)


def _follow_orders(session: Session, site: Site, roster: Roster, agent: str) -> None:
    """Calls the site's ClientApp for every order, until the run is over."""
    app = build_client_app(site)
    node_id, run_id = flower.node_id(agent), flower.run_id(roster.run)
    context = Context(run_id=run_id, node_id=node_id, node_config={}, state=RecordDict(), run_config={})
    for order in session.orders():
        try:
            message = flower.from_proto(order, run_id=run_id, src_node_id=flower.SERVER_NODE_ID, dst_node_id=node_id)
        except ValueError as error:
            raise HacrlFedError(f"the coordinator's order is not valid: {error}") from None
        if message.metadata.message_type not in MESSAGE_TYPES:
            raise HacrlFedError(f"the coordinator orders {message.metadata.message_type!r}, which no site does")
        session.reply(flower.to_proto(app(message, context)))
        site.idle()


@contextmanager
def _told_apart() -> Iterator[None]:
    """Says what to do where a device, or the machine itself, has too little memory."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        # On CPUs torch has no class for it. torch.OutOfMemoryError is a RuntimeError.
        if not isinstance(error, MemoryError | torch.OutOfMemoryError) and _NO_MEMORY not in str(error):
            raise
        reason = (str(error).splitlines() or ["out of memory"])[0]
        raise HacrlFedError(
            "the memory does not suffice: lower micro_batch_tokens or set gradient_checkpointing (updates), lower "
            "generation_rows (generation), or train with lora; then run the same command to go on from the last checkpoint "
            f"({reason})"
        ) from None


def _keep_config(run_dir: Path, agent: str, model: str, genesis: str, run: RunConfig, site: SiteConfig) -> None:
    """Writes the resolved configuration. Raises UserError where the folder is of another run."""
    path = run_dir / "config.json"
    if read_json(path).get("genesis", genesis) != genesis:
        raise UserError(
            f"{run_dir} is the folder of another run, or of another configuration: choose another --run-dir"
        )
    resolved = {
        "agent": agent,
        "model": model,
        "genesis": genesis,
        "run": run.model_dump(mode="json"),
        "site": site.model_dump(mode="json"),
    }
    write_whole(path, json.dumps(resolved, indent=2))


def _finish_alone(
    saved: checkpoint.Checkpoint, run_dir: Path, agent: str, model: str, site_config: SiteConfig, egress: Egress
) -> bool:
    """Writes model and summary where an earlier process did all steps, and the coordinator may be gone."""
    run = parse(RunConfig, read_json(run_dir / "config.json").get("run", {}), str(run_dir / "config.json"))
    progress = Progress(**saved.extra["progress"])
    if not progress.is_last(run.steps, bool(run.evaluation.prompts)):
        return False
    policy = Policy.load(model, site_config, run.seed, with_reference=False)
    policy.load_trainable_state(saved.policy)
    policy.save_pretrained(run_dir / "model")
    egress.received(progress.received_bytes)
    method = merged_algorithm(run, site_config).method
    write_summary(run_dir, agent, run, method, progress, egress, policy.weight_bytes)
    return True
