"""An agent's process of a federation that is measured: a site's own parts, each called when it is its turn."""

from multiprocessing.connection import Connection

import transformers

from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import digests, transport
from hacrl_fed.protocol.identity import load_agent
from hacrl_fed.records import SamplingParameters
from hacrl_fed.tasks.base import Prompt, build_task
from hacrl_fed.tasks.schedule import step_prompts
from hacrl_fed.verifiers.pool import WORKERS, VerifierPool
from hacrl_fed_client.admission import Admission, StepExpectation
from hacrl_fed_client.egress import Egress
from hacrl_fed_client.inbox import Inbox
from hacrl_fed_client.loading import load_tokenizer
from hacrl_fed_client.publisher import OwnStep, Publisher
from hacrl_fed_client.retokenize import Retokenizer
from hacrl_fed_client.session import Session
from step.federated import Files
from step.measuring import Meter
from step.ours import SiteStep, Trivial, site_config
from step.workloads import Workload

_CONNECT_S = 60.0
_EXCHANGE_S = 600.0


def serve(
    connection: Connection,
    agent: str,
    address: str,
    files: Files,
    workload: Workload,
    texts: list[str],
    steps: int,
) -> None:
    """Joins; then rolls out, exchanges and learns, ``steps`` times, each part when it is told to."""
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = site_config("cpu", "float32")
    roster, key = load_agent(files.roster, files.key(agent), agent)
    task = build_task("benchmark", [Prompt(text, "-") for text in texts], 0.0, Trivial())
    egress = Egress(files.run_dir(agent), config.limits.egress_bytes_per_step)
    tls = transport.ClientTls(files.tls("ca"))
    session = Session(
        transport.parse_address(address), tls, False, key, roster, agent, _CONNECT_S, egress, lambda sentence: None
    )
    run, payload = session.get_run()
    genesis = digests.genesis_digest(roster.digest, payload, task.digest)
    site = SiteStep(str(files.model(agent)), workload, config, "hacpo", agent)
    session.join(task.digest, 0)
    session.attend(lambda status: None)

    def prompts_of(step: int) -> tuple[Prompt, ...]:
        return step_prompts(task.train, run.prompts_per_step, run.seed, step)

    def expect(step: int, previous_manifest: str) -> StepExpectation:
        return StepExpectation(step, previous_manifest, {prompt.id: prompt for prompt in prompts_of(step)})

    verifiers = VerifierPool(task.verifier, config.verifier_timeout_s, WORKERS)
    retokenizer = Retokenizer(load_tokenizer(site.policy.name), site.policy.eos_ids)
    digest = site.policy.tokenizer_digest
    admission = Admission(agent, roster, run.limits, run.group_size, run.max_new_tokens, verifiers, retokenizer, digest)
    inbox = Inbox(roster, admission, expect, 0, genesis)
    sampling = SamplingParameters(run.max_new_tokens)
    publisher = Publisher(session, inbox, key, roster.run, agent, sampling, digest, run.limits.chunk_bytes)
    session.run_beside(lambda: inbox.read(session.subscribe(lambda: inbox.reading_step)))
    connection.send(True)
    meter = Meter("cpu")
    previous = genesis
    for step in range(steps):
        connection.recv()
        meter.start()
        groups = site.roll_out(prompts_of(step), step)
        own = [len(rollout.completion_ids) for group in groups for rollout in group]
        connection.send(meter.stop(own))
        connection.recv()
        meter.start()
        publisher.publish(OwnStep(step, previous, site.updater.updates_made), groups, final=True)
        closed = inbox.wait_closed(step, _EXCHANGE_S, session.check)
        rollouts, missing = closed.rollouts()
        connection.send(meter.stop(len(rollout.completion_ids) for rollout in rollouts if rollout.source != agent))
        if missing or len(rollouts) < len(own) * 1.5:
            raise HacrlFedError(f"too few rollouts came in: {missing} chunks are missing, refused: {admission.refused}")
        connection.recv()
        meter.start()
        site.learn(rollouts, step)
        connection.send(meter.stop(len(rollout.completion_ids) for rollout in rollouts))
        previous = closed.digest
        inbox.forget(step)
