"""A training run with all agents in one process: the site's own code for every part of a step, and no network."""

import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hacrl_fed.algorithms.hacpo import CapabilityTracker
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, RunConfig, SiteConfig, TaskRef
from hacrl_fed.records import FinishReason
from hacrl_fed.tasks.base import Prompt, Task
from hacrl_fed.tasks.schedule import step_prompts
from hacrl_fed.verifiers.pool import WORKERS, VerifierPool
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.evaluate import MODES, measure
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.learning import training_rollouts, without_foreign_sources
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.rollout import RolloutMaker
from hacrl_fed_client.update import Updater
from study import tasks
from study.regimes import Seat
from study.units import Training

_MAX_PROMPT_TOKENS = 16
_MAX_NEW_TOKENS = 34  # the longest answer takes 33 characters, and then the end token
_VERIFIER_S = 10.0


def train(unit: Training, models: Mapping[str, Path]) -> dict[str, Any]:
    """Trains the agents of a unit from their model folders, by seat, and returns the reported ones' results as JSON.

    Of each: ``curve``, a list of step, own_rollouts and greedy accuracy on the curve's held-out prompts, the first and the
    last with sampled; ``final``, greedy and sampled on all; ``live_share_positive`` of cross rollouts over the run; the
    share of a step's peers that were ``left_out``; and the median ratios of cross rollouts, of all and of rewarded ones,
    before the updates of the steps that are evaluated.
    """
    started, started_cpu = time.monotonic(), time.process_time()
    plan, task = unit.plan, tasks.load(unit.task)
    algorithm = unit.algorithm()
    with VerifierPool(task.verifier, _VERIFIER_S, WORKERS) as verifiers:
        agents = [_Agent(seat, models[seat.name], unit, algorithm, task, verifiers) for seat in unit.seats]
        for step in range(plan.steps):
            present = [agent for agent in agents if agent.joins <= step]
            evaluating = step % plan.evaluate_every == 0
            for agent in present:
                if evaluating or step == agent.joins:
                    agent.evaluate(step)
            prompts = step_prompts(task.train, plan.prompts_per_step, unit.seed, step)
            # All before any update: a step's rollouts come from the policies that began it.
            rollouts = {agent.seat.name: agent.roll_out(step, prompts) for agent in present}
            for agent in present:
                if agent.seat.learns:
                    agent.learn(step, rollouts, measuring=evaluating)
        for agent in agents:
            agent.evaluate(plan.steps)
    return {
        "agents": {agent.seat.name: agent.result() for agent in agents if agent.reported},
        "cpu_s": time.process_time() - started_cpu,
        "wall_s": time.monotonic() - started,
    }


class _Agent:
    def __init__(
        self,
        seat: Seat,
        model: Path,
        unit: Training,
        algorithm: AlgorithmConfig,
        task: Task,
        verifiers: VerifierPool,
    ) -> None:
        plan = unit.plan
        self.seat = seat
        self.joins = int(seat.joins_at * plan.steps)
        self.reported = seat.name in unit.reported
        self._unit = unit
        self._algorithm = algorithm
        self._verifiers = verifiers
        method = METHODS[algorithm.method]
        # Generates the rows of a step at once, and of an evaluation too.
        rows = max(plan.prompts_per_step * plan.group_size * method.group_multiplier, plan.final_prompts)
        optimizer = unit.optimizer
        config = SiteConfig(device="cpu", threads=1, optimizer=optimizer, generation_rows=rows)
        run = RunConfig(
            task=TaskRef(id=task.id),
            steps=plan.steps,
            seed=unit.seed,
            prompts_per_step=plan.prompts_per_step,
            group_size=plan.group_size,
            max_prompt_tokens=_MAX_PROMPT_TOKENS,
            max_new_tokens=_MAX_NEW_TOKENS,
            algorithm=algorithm,
        )
        self._policy = Policy.load(str(model), config, unit.seed, with_reference=algorithm.kl_coef > 0)
        self._generator = HfGenerator(self._policy, rows, _no_check)
        self._maker = RolloutMaker(
            seat.name, run, config, method, self._policy, self._generator, verifiers, check=_no_check
        )
        self._updater = Updater(self._policy, seat.name, algorithm, optimizer)
        self._tracker = CapabilityTracker(algorithm.hacpo.window)
        self._held_out = task.held_out[plan.first_prompt : plan.first_prompt + plan.final_prompts]
        self._prompt_ids: dict[str, tuple[int, ...]] = {}
        self._curve: list[dict[str, float]] = []
        self._final: dict[str, float] = {}
        self._own_rollouts = 0
        self._offered = 0
        self._left_out = 0
        self._positives = 0
        self._live_positives = 0.0
        self._ratios: list[float] = []
        self._rewarded_ratios: list[float] = []

    def roll_out(self, step: int, prompts: Sequence[Prompt]) -> list[AdmittedRollout]:
        made = self._maker.make(prompts, self._rendered(prompts), self._seed(f"step {step}"))
        rollouts = [rollout for groups in made for group in groups for rollout in group]
        self._own_rollouts += len(rollouts)
        return rollouts

    def learn(self, step: int, rollouts: Mapping[str, list[AdmittedRollout]], *, measuring: bool) -> None:
        """Learns from a step's rollouts, by agent, as an agent's site does once they are admitted."""
        received: list[AdmittedRollout] = []
        for source in sorted(rollouts):
            received += rollouts[source] if source == self.seat.name else self._admitted(step, source, rollouts[source])
        taken, medians = without_foreign_sources(
            received,
            self._prompt_ids,
            self._policy,
            self.seat.name,
            self._algorithm.hacpo,
            _no_check,
        )
        _, trained, _ = training_rollouts(
            taken, self._prompt_ids, self.seat.name, self._tracker, self._algorithm, self._seed(f"sample {step}")
        )
        if measuring:
            self._measure_ratios([admitted for admitted in received if admitted.source != self.seat.name])
        metrics = self._updater.step(trained, _no_check)
        self._left_out += len(medians.keys() - {admitted.source for admitted in taken})
        self._offered += len(rollouts) - 1
        positives = sum(row.source != self.seat.name and row.advantage > 0 for row in trained)
        self._positives += positives
        self._live_positives += positives * metrics.get("cross/live_share_positive", 0.0)

    def evaluate(self, step: int) -> None:
        """Measures a reported agent before ``step``'s updates; at the end, on all held-out prompts of the plan."""
        if not self.reported:
            return
        plan = self._unit.plan
        last = step == plan.steps
        prompts = self._held_out if last else self._held_out[: plan.curve_prompts]
        point: dict[str, float] = {"step": step, "own_rollouts": self._own_rollouts}
        # Sampled accuracy is told of the two ends only: it costs as much as greedy.
        for mode in MODES if last or not self._curve else MODES[:1]:
            accuracy = measure(
                mode,
                prompts,
                self._rendered(prompts),
                self._generator,
                self._maker.retokenizer,
                self._verifiers,
                _MAX_NEW_TOKENS,
                self._seed("evaluation"),
                _no_check,
            )
            assert not accuracy.unverified, "the study's verifiers score everything"
            point[mode] = statistics.fmean(accuracy.rewards[: plan.curve_prompts])
            if last:
                self._final[mode] = statistics.fmean(accuracy.rewards)
        self._curve.append(point)

    def result(self) -> dict[str, Any]:
        """See ``train``. Of a run without cross rollouts, ratios and shares are None."""
        return {
            "curve": self._curve,
            "final": self._final,
            "live_share_positive": self._live_positives / self._positives if self._positives else None,
            "median_ratio": statistics.median(self._ratios) if self._ratios else None,
            "median_rewarded_ratio": statistics.median(self._rewarded_ratios) if self._rewarded_ratios else None,
            "left_out": self._left_out / self._offered if self._offered else None,
        }

    def _admitted(self, step: int, source: str, rollouts: Sequence[AdmittedRollout]) -> list[AdmittedRollout]:
        """A peer's rollouts in this agent's tokens, without those that it cannot express."""
        flipped = next(seat.flipped for seat in self._unit.seats if seat.name == source)
        rng = random.Random(self._seed(f"flips of {source} {step}"))
        peers = [
            replace(admitted.rollout, reward=1 - admitted.rollout.reward)
            if rng.random() < flipped
            else admitted.rollout
            for admitted in rollouts
        ]
        finished = [rollout.finish_reason is FinishReason.STOP for rollout in peers]
        completions = self._maker.retokenizer.encode([rollout.text for rollout in peers], finished)
        return [
            AdmittedRollout(source, rollout, tuple(ids)) for rollout, ids in zip(peers, completions, strict=True) if ids
        ]

    def _measure_ratios(self, cross: Sequence[AdmittedRollout]) -> None:
        sequences = [(self._prompt_ids[row.rollout.prompt_id], row.completion_ids) for row in cross]
        logp_sums = self._policy.score(sequences, _no_check)
        bound = self._algorithm.hacpo.max_abs_log_ratio
        for admitted, logp_sum in zip(cross, logp_sums, strict=True):
            log_ratio = logp_sum / len(admitted.completion_ids) - admitted.rollout.mean_logp
            ratio = math.exp(max(-bound, min(bound, log_ratio)))
            self._ratios.append(ratio)
            if admitted.rollout.reward == 1:
                self._rewarded_ratios.append(ratio)

    def _rendered(self, prompts: Sequence[Prompt]) -> dict[str, tuple[int, ...]]:
        for prompt in prompts:
            if prompt.id not in self._prompt_ids:
                self._prompt_ids[prompt.id] = tuple(self._policy.render_prompt(prompt.text))
        return {prompt.id: self._prompt_ids[prompt.id] for prompt in prompts}

    def _seed(self, purpose: str) -> int:
        # By what the agent is, not by its seat: trained alone or with others, it draws the same from the same.
        return derive_seed(self._unit.seed, self.seat.spec.label, purpose)


def _no_check() -> None:
    """Nothing interrupts a unit but the end of its process."""
