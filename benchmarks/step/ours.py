"""Our side: a site's own step, through the classes that a site puts together, with their default settings."""

import random
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import ClassVar

import torch
import transformers

from hacrl_fed.algorithms.hacpo import CapabilityTracker
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, Evaluation, MethodName, Optimizer, RunConfig, SiteConfig, TaskRef
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.learning import training_rollouts
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.rollout import RolloutMaker
from hacrl_fed_client.update import Updater
from step.measuring import Meter, measure_machine
from step.turns import LossBatch
from step.workloads import SAMPLES, Workload

AGENT = "ours"
LEARNING_RATE = 1e-6


def site_config(device: str, dtype: str) -> SiteConfig:
    """A site's defaults on a device, on one CPU thread; the learning rate is constant, as it is after a warm-up."""
    return SiteConfig.model_validate(
        {"device": device, "dtype": dtype, "threads": 1, "optimizer": Optimizer(lr=LEARNING_RATE, warmup_steps=0)}
    )


def run_config(workload: Workload, method: MethodName, steps: int = 1) -> RunConfig:
    """A run of the workload's steps, without KL and evaluation."""
    return RunConfig(
        task=TaskRef(id="benchmark"),
        steps=steps,
        prompts_per_step=workload.prompts,
        group_size=SAMPLES,
        max_prompt_tokens=workload.prompt_tokens,
        max_new_tokens=workload.max_new_tokens,
        algorithm=AlgorithmConfig(method=method, kl_coef=0.0),
        evaluation=Evaluation(prompts=0),
    )


def reward_of(completion: str) -> float:
    """Costs nothing, and is 0 or 1 about equally often, so that every group has both."""
    return float(len(completion) % 2)


class Trivial:
    """A verifier of ``reward_of``. See ``hacrl_fed.verifiers.base.Verifier``."""

    name = "trivial"
    settings: ClassVar[dict[str, str]] = {}
    isolated = False

    def prepare(self) -> None:
        """Needs nothing."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        """Asks only how long the completion is."""
        return Verdict(reward_of(completion), "its length")


class SiteStep:
    """An agent that rolls out and learns; ``learn`` may be given others' rollouts too."""

    def __init__(self, folder: str, workload: Workload, config: SiteConfig, method: MethodName, agent: str = AGENT):
        self.agent = agent
        self.run = run_config(workload, method)
        self.config = config
        self.policy = Policy.load(folder, config, seed=0, with_reference=False)
        self.generator = HfGenerator(self.policy, config.generation_rows, no_check)
        algorithm = self.run.algorithm
        self.updater = Updater(self.policy, agent, algorithm, config.optimizer)
        pool = VerifierPool(Trivial(), timeout_s=1.0, workers=1)
        self._maker = RolloutMaker(
            agent, self.run, config, METHODS[method], self.policy, self.generator, pool, check=no_check
        )
        self._tracker = CapabilityTracker(algorithm.hacpo.window)
        self._prompt_ids: dict[str, tuple[int, ...]] = {}

    def roll_out(self, prompts: Sequence[Prompt], seed: int) -> list[list[AdmittedRollout]]:
        """Generates, verifies and scores, and returns the groups."""
        self._prompt_ids = {prompt.id: tuple(self.policy.render_prompt(prompt.text)) for prompt in prompts}
        return [group for groups in self._maker.make(prompts, self._prompt_ids, seed) for group in groups]

    def learn(self, rollouts: Sequence[AdmittedRollout], seed: int) -> dict[str, float]:
        """Updates on a step's rollouts, of the prompts that were rolled out last."""
        _, trained, _ = training_rollouts(
            rollouts, self._prompt_ids, self.agent, self._tracker, self.run.algorithm, seed
        )
        return self.updater.step(trained, no_check)


def serve(
    connection: Connection, folder: str, workload: Workload, texts: list[str], steps: int, device: str, dtype: str
) -> None:
    """A step whenever it is its turn; then the memory that they took, and the loss of a batch of random rollouts."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = site_config(device, dtype)
    site = SiteStep(folder, workload, config, "gspo")
    meter = Meter(device)
    for step in range(steps):
        prompts = [Prompt(text, "") for text in texts[step * workload.prompts : (step + 1) * workload.prompts]]
        connection.recv()
        meter.start()
        rollouts = [rollout for group in site.roll_out(prompts, step) for rollout in group]
        site.learn(rollouts, step)
        connection.send(meter.stop(len(rollout.completion_ids) for rollout in rollouts))
    connection.send(meter.memory())
    connection.send(measure_machine(device, dtype))
    policy = Policy.load(folder, config, seed=0, with_reference=False)  # with the weights that both sides began with
    batch = _random_batch(policy, workload, texts)
    connection.send(batch)
    connection.send(_loss(policy, batch, site.run.algorithm))


def no_check() -> None:
    """Nothing interrupts a benchmark but the end of its process."""


def _random_batch(policy: Policy, workload: Workload, texts: list[str]) -> LossBatch:
    rng = random.Random(0)
    count = workload.prompts * SAMPLES
    prompts = [policy.render_prompt(texts[row // SAMPLES]) for row in range(count)]
    rows = len(policy.tokenizer) - 1  # without the end token, which the model lacks
    completions = [[rng.randrange(rows) for _ in range(length)] for length in workload.lengths(count, seed=0)]
    with torch.no_grad():
        logps_BT, _ = policy.token_logps(list(zip(prompts, completions, strict=True)))
    # Log-ratios on both sides of both bounds of the clip.
    shifts = [rng.uniform(-1e-3, 1e-3) for _ in range(count)]
    old = [
        (logps_T[: len(completion)] - shift).tolist()
        for logps_T, completion, shift in zip(logps_BT.cpu(), completions, shifts, strict=True)
    ]
    return LossBatch(prompts, completions, [rng.gauss(0, 1) for _ in range(count)], old)


def _loss(policy: Policy, batch: LossBatch, algorithm: AlgorithmConfig) -> float:
    sequences = list(zip(batch.prompts, batch.completions, strict=True))
    logps_BT, mask_BT = policy.token_logps(sequences)
    count = len(sequences)
    loss, _ = METHODS["gspo"].loss(
        logps_BT,
        mask_BT,
        torch.tensor([sum(old) / len(old) for old in batch.old_logps], device=logps_BT.device),
        advantages=torch.tensor(batch.advantages),
        is_self=torch.ones(count, dtype=torch.bool),
        omega=torch.ones(count),
        update_index=0,
        config=algorithm.hacpo,
    )
    return float(loss)
