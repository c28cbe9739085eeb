"""One agent's training: roll out, share, wait for the manifest, learn; step by step, in the order in which things happen."""

import json
import logging
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hacrl_fed.algorithms.hacpo import CapabilityTracker
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import AlgorithmConfig, RunConfig, SiteConfig
from hacrl_fed.errors import UserError
from hacrl_fed.records import Participation
from hacrl_fed.run_folder import writing
from hacrl_fed.tasks.base import Prompt, Task
from hacrl_fed.tasks.schedule import step_prompts
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client import checkpoint
from hacrl_fed_client.admission import Admission, AdmittedRollout
from hacrl_fed_client.console import SiteConsole
from hacrl_fed_client.evaluate import MODES, measure
from hacrl_fed_client.generation.base import Generator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.inbox import ClosedStep, Inbox
from hacrl_fed_client.learning import few_live_share, training_rollouts, without_foreign_sources
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.progress import Progress
from hacrl_fed_client.publisher import OwnStep, Publisher
from hacrl_fed_client.rollout import RolloutMaker
from hacrl_fed_client.session import Joined, Session, StepClosedError
from hacrl_fed_client.summary import write_summary
from hacrl_fed_client.update import Updater

_log = logging.getLogger(__name__)

_LENGTH_RATIO = 8  # of a peer's completion in this site's tokens to max_new_tokens, at most


@dataclass(frozen=True, slots=True)
class Exchanging:
    """What a site has while it shares rollouts."""

    inbox: Inbox
    admission: Admission
    publisher: Publisher
    joined: Joined


class Site:
    """Does what the coordinator orders with this site's policy. Every method may be called again after a restart."""

    def __init__(
        self,
        agent: str,
        run: RunConfig,
        algorithm: AlgorithmConfig,
        config: SiteConfig,
        task: Task,
        policy: Policy,
        generator: Generator,
        updater: Updater,
        tracker: CapabilityTracker,
        verifiers: VerifierPool,
        session: Session,
        exchanging: Exchanging | None,
        progress: Progress,
        run_dir: Path,
        console: SiteConsole,
    ) -> None:
        """``exchanging`` is None for a method that trains alone."""
        self._agent = agent
        self._run = run
        self._algorithm = algorithm
        self._config = config
        self._task = task
        self._policy = policy
        self._generator = generator
        method = METHODS[algorithm.method]
        self._maker = RolloutMaker(agent, run, config, method, policy, generator, verifiers, check=session.check)
        self._updater = updater
        self._tracker = tracker
        self._verifiers = verifiers
        self._session = session
        self._exchanging = exchanging
        self.progress = progress
        self._run_dir = run_dir
        self._console = console
        self._started = time.monotonic()
        self._too_long: Counter[str] = Counter()
        self._earlier = progress.as_json()  # counts of earlier processes
        self._prompt_limit = run.max_prompt_tokens
        if policy.context_length is not None:
            self._prompt_limit = min(self._prompt_limit, policy.context_length - run.max_new_tokens)

    def check_prompts(self) -> None:
        """Tells how many prompts are too long for this site.

        Raises UserError where none is short enough, or where the site's configuration refuses any that is too long.
        """
        lengths = {prompt.id: len(self._policy.render_prompt(prompt.text)) for prompt in self._task.train}
        too_long = [prompt_id for prompt_id, length in lengths.items() if length > self._prompt_limit]
        if len(too_long) == len(lengths):
            raise UserError(
                f"every prompt of task {self._task.id} is longer for this model than the {self._prompt_limit} tokens that "
                f"max_prompt_tokens and the model's context leave (the shortest has {min(lengths.values())}): raise "
                "max_prompt_tokens or lower max_new_tokens in run.yaml, or take a model with a longer context"
            )
        self.progress.totals["prompts_too_long"] = len(too_long)
        if too_long and self._config.overlong_prompts == "refuse":
            raise UserError(
                f"{len(too_long)} of {len(lengths)} training prompts are longer for this model than {self._prompt_limit} "
                f"tokens (the first, {too_long[0]}, has {lengths[too_long[0]]}): raise max_prompt_tokens in run.yaml, or "
                "set overlong_prompts to drop in site.yaml to leave them out"
            )
        if too_long:
            self._console.tell(
                f"{len(too_long)} of {len(lengths)} training prompts are longer than {self._prompt_limit} tokens and left out"
            )

    def train_until(self, until_step: int) -> dict[str, float]:
        """Does all steps before ``until_step`` that are not done yet. Returns the newest step's metrics."""
        self.evaluate("before")
        metrics: dict[str, float] = {}
        while self.progress.next_step < min(until_step, self._run.steps):
            metrics = self._step(self.progress.next_step) or metrics
        self._finish_if_last()
        return metrics

    def evaluate(self, when: str) -> dict[str, float]:
        """Held-out accuracy, greedy and sampled; measured once for each ``when`` and then remembered."""
        if not self._run.evaluation.prompts:
            return {}
        if when in self.progress.evaluations:
            self._finish_if_last()
            return self.progress.evaluations[when]
        prompts = self._task.held_out[: self._run.evaluation.prompts]
        prompt_ids = self._prompt_ids(prompts)
        prompts = tuple(prompt for prompt in prompts if prompt.id in prompt_ids)
        accuracies: dict[str, float] = {}
        for mode in MODES:
            self._doing(f"evaluating {when} training, {mode}")
            accuracy = measure(
                mode,
                prompts,
                prompt_ids,
                self._generator,
                self._maker.retokenizer,
                self._verifiers,
                self._run.max_new_tokens,
                self._seed("evaluation"),
                self._session.check,
            )
            if accuracy.mean is not None:
                accuracies[mode] = accuracy.mean
        self.progress.evaluations[when] = accuracies
        self._console.evaluated(when, accuracies)
        self._save()
        self._finish_if_last()
        return accuracies

    def _finish_if_last(self) -> None:
        """Writes the final model and the summary, before the coordinator is told that all is done and may end."""
        if self.progress.is_last(self._run.steps, bool(self._run.evaluation.prompts)):
            self._doing("saving the model")
            self._policy.save_pretrained(self._run_dir / "model")
            self.write_summary()

    def write_summary(self) -> None:
        """Writes what the run comes to so far."""
        self._count()
        write_summary(
            self._run_dir,
            self._agent,
            self._run,
            self._algorithm.method,
            self.progress,
            self._session.egress,
            self._policy.weight_bytes,
        )

    def _step(self, step: int) -> dict[str, float] | None:
        """One step; None where it was closed while this site was away, and nothing is learned from it."""
        started = time.monotonic()
        prompts = step_prompts(self._task.train, self._run.prompts_per_step, self._run.seed, step)
        prompt_ids = self._prompt_ids(prompts)
        if self._exchanging is None:
            rollouts = [
                rollout for groups in self._roll_out(step, prompts, prompt_ids) for group in groups for rollout in group
            ]
            manifest = self.progress.previous_manifest
        else:
            closed = self._share(self._exchanging, step, prompts, prompt_ids)
            manifest = closed.digest
            entry = closed.manifest.by_agent.get(self._agent)
            away = step < self._exchanging.joined.open_step
            if away and (entry is None or entry.participation is Participation.ABSENT):
                self._advance(step, manifest)
                return None
            rollouts, missing = closed.rollouts()
            self.progress.totals["missing_chunks"] += missing
            rollouts = self._trainable(rollouts, prompt_ids)
        generated_at = time.monotonic()
        metrics = self._learn(step, rollouts, prompt_ids)
        metrics |= {"rollout_s": generated_at - started, "update_s": time.monotonic() - generated_at}
        # Before the checkpoint: a step that is learned from again is reported again, and none is left out.
        self._report(step, metrics)
        self._advance(step, manifest)
        return metrics

    def _share(
        self, exchanging: Exchanging, step: int, prompts: tuple[Prompt, ...], prompt_ids: Mapping[str, tuple[int, ...]]
    ) -> ClosedStep:
        """Publishes own rollouts of an open step, where no earlier process has, and waits for its manifest."""
        joined = exchanging.joined
        if step > joined.open_step or (step == joined.open_step and not joined.open_step_finished):
            own_step = OwnStep(step, self.progress.previous_manifest, self._updater.updates_made)
            left = len(prompts)
            try:
                for groups in self._roll_out(step, prompts, prompt_ids):
                    if exchanging.inbox.has_closed(step):
                        raise StepClosedError
                    left -= len(groups)
                    exchanging.publisher.publish(own_step, groups, final=left == 0)
            except StepClosedError:
                _log.warning("step %d was closed before this site had finished its rollouts", step)
        self._doing("waiting for the others")
        deadlines = self._run.deadlines
        patience_s = deadlines.join_s + deadlines.step_s + deadlines.pause_s
        return exchanging.inbox.wait_closed(step, patience_s, self._session.check)

    def _trainable(
        self, rollouts: list[AdmittedRollout], prompt_ids: Mapping[str, tuple[int, ...]]
    ) -> list[AdmittedRollout]:
        """The rollouts that fit this site's model: a peer's text may have many more tokens here than at its source."""
        longest = _LENGTH_RATIO * self._run.max_new_tokens
        context = self._policy.context_length or sys.maxsize
        kept = []
        for admitted in rollouts:
            prompt = prompt_ids.get(admitted.rollout.prompt_id)
            length = len(admitted.completion_ids)
            if prompt is not None and length <= longest and len(prompt) + length <= context:
                kept.append(admitted)
            elif prompt is not None:
                self._too_long[f"{admitted.source}/length"] += 1
        return kept

    def _roll_out(
        self, step: int, prompts: tuple[Prompt, ...], prompt_ids: Mapping[str, tuple[int, ...]]
    ) -> Iterator[list[list[AdmittedRollout]]]:
        """Own groups of the step, a few at a time; a prompt that is too long for this site has an empty one."""
        self._doing(f"generating, 0 of {len(prompts)} prompts done")
        rollable = [prompt for prompt in prompts if prompt.id in prompt_ids]
        done = len(prompts) - len(rollable)
        if done:
            yield [[] for _ in range(done)]
        for groups in self._maker.make(rollable, prompt_ids, self._seed(str(step))):
            done += len(groups)
            self._doing(f"generating, {done} of {len(prompts)} prompts done")
            yield groups

    def _learn(
        self, step: int, rollouts: list[AdmittedRollout], prompt_ids: Mapping[str, tuple[int, ...]]
    ) -> dict[str, float]:
        self._doing("updating")
        taken, medians = without_foreign_sources(
            rollouts,
            prompt_ids,
            self._policy,
            self._agent,
            self._algorithm.hacpo,
            self._session.check,
        )
        foreign = sorted(medians.keys() - {admitted.source for admitted in taken})
        if foreign:
            self._console.foreign(step, {source: medians[source] for source in foreign}, self._algorithm)
        if not taken:
            _log.warning("step %d has no rollouts to learn from", step)
            return {}
        learned, trained, metrics = training_rollouts(
            taken, prompt_ids, self._agent, self._tracker, self._algorithm, self._seed(f"{step}/sample")
        )
        metrics |= self._updater.step(trained, self._session.check)
        self.progress.totals.update(
            own_rollouts=int(metrics["own_rollouts"]), cross_rollouts=int(metrics["cross_rollouts"])
        )
        metrics |= {f"source_ratio/{source}": ratio for source, ratio in medians.items()}
        metrics |= {f"left_out/{source}": 1.0 for source in foreign}
        own = [rollout for rollout in rollouts if rollout.source == self._agent]
        metrics["round_trip_share"] = self._maker.round_trip_share(own)
        if self._maker.sampler_gaps:
            metrics["sampler_logp_gap"] = statistics.fmean(self._maker.sampler_gaps)
        live = few_live_share(trained, self._agent, metrics)
        if live is not None:
            self._console.few_live(step, live, self._algorithm)
        _write_rollouts(
            self._run_dir / "rollouts" / f"step-{step:06d}.jsonl", learned, [row.advantage for row in trained]
        )
        return metrics

    def _advance(self, step: int, manifest: str) -> None:
        self.progress.next_step = step + 1
        self.progress.previous_manifest = manifest
        if self._exchanging:
            self._exchanging.inbox.forget(step)
        if self.progress.next_step % self._config.checkpoint_every == 0 or self.progress.next_step == self._run.steps:
            self._save()

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        path = self._run_dir / "metrics.jsonl"
        with writing(path), path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "agent": self._agent, **metrics}) + "\n")
        self._session.report(step, metrics)
        self._console.stepped(step, metrics)

    def _save(self) -> None:
        self._count()
        optimizer, scheduler = self._updater.state()
        state = checkpoint.Checkpoint(
            step=self.progress.next_step,
            policy=self._policy.trainable_state(),
            optimizer=optimizer,
            scheduler=scheduler,
            random_state=checkpoint.capture_random_state(),
            extra={"progress": self.progress.as_json(), "capabilities": self._tracker.state_dict()},
        )
        checkpoint.save(self._run_dir / "checkpoints", state, self._config.keep_checkpoints)

    def _count(self) -> None:
        """Brings the progress's counts up to now: those of earlier processes, and this one's."""
        refused, disagreements = Counter(self._earlier["refused"]), Counter(self._earlier["reward_disagreements"])
        refused += self._too_long
        for reason, count in self._maker.left_out.items():
            refused[f"{self._agent}/{reason}"] += count
        if self._exchanging:
            admission = self._exchanging.admission
            # Copies: the reading thread goes on counting.
            for (agent, reason), count in list(admission.refused.items()):
                refused[f"{agent}/{reason}"] += count
            disagreements.update(dict(admission.reward_disagreements))
        self.progress.refused, self.progress.reward_disagreements = +refused, disagreements
        self.progress.received_bytes = self._session.egress.received_bytes
        self.progress.wall_s = self._earlier["wall_s"] + time.monotonic() - self._started

    def _prompt_ids(self, prompts: tuple[Prompt, ...]) -> dict[str, tuple[int, ...]]:
        """Rendered prompts by id, without those that are too long in this site's tokens."""
        rendered = {prompt.id: tuple(self._policy.render_prompt(prompt.text)) for prompt in prompts}
        return {key: ids for key, ids in rendered.items() if len(ids) <= self._prompt_limit}

    def _seed(self, purpose: str) -> int:
        return derive_seed(self._run.seed, self._agent, purpose)

    def idle(self) -> None:
        """Says that what was ordered is done."""
        self._doing("waiting for orders")

    def _doing(self, phase: str) -> None:
        self._session.doing(self.progress.next_step, phase)
        self._console.doing(self.progress.next_step, phase)


def _write_rollouts(path: Path, rollouts: list[AdmittedRollout], advantages: list[float]) -> None:
    lines = []
    for admitted, advantage in zip(rollouts, advantages, strict=True):
        rollout = admitted.rollout
        line = {
            "source": admitted.source,
            "prompt_id": rollout.prompt_id,
            "sample_index": rollout.sample_index,
            "text": rollout.text,
            "finish_reason": rollout.finish_reason.value,
            "reward": rollout.reward,
            "advantage": advantage,
            "source_mean_logp": rollout.mean_logp,
        }
        lines.append(json.dumps(line) + "\n")
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines), encoding="utf-8")
