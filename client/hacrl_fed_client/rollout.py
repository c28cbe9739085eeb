"""A site's own rollouts: generated, verified and scored, a few groups at a time."""

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from hacrl_fed.algorithms.methods import Method
from hacrl_fed.config import RunConfig, SiteConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import convert
from hacrl_fed.records import FinishReason, Rollout
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.generation.base import Completion, Generator
from hacrl_fed_client.generation.sampling import derive_seed
from hacrl_fed_client.policy import NOT_FINITE, Policy
from hacrl_fed_client.retokenize import Retokenizer

_log = logging.getLogger(__name__)


class RolloutMaker:
    """Makes one agent's rollouts. Where they are shared, they are scored by the training pass.

    Alone they are not: nobody is told their log-probs, which are then the generation's, and no ratio is taken to them.

    Attributes:
        left_out: counts, by reason, of completions that never became one.
        sampler_gaps: of the newest step's completions, by how much the generation's mean log-prob a token lies off the
            training pass's, in nats; none where there was no such pass.
    """

    def __init__(
        self,
        agent: str,
        run: RunConfig,
        config: SiteConfig,
        method: Method,
        policy: Policy,
        generator: Generator,
        verifiers: VerifierPool,
        check: Callable[[], None],
    ) -> None:
        """``check`` is called between micro-batches of scoring, and may raise to end the work; generation has its own."""
        self._agent = agent
        self._run = run
        self._config = config
        self._group_size = run.group_size * method.group_multiplier
        self._shares = method.shares
        self._policy = policy
        self.retokenizer = Retokenizer(policy.tokenizer, policy.eos_ids)
        self._generator = generator
        self._verifiers = verifiers
        self._check = check
        self.left_out: Counter[str] = Counter()
        self.sampler_gaps: list[float] = []

    def make(
        self, prompts: Sequence[Prompt], prompt_ids: Mapping[str, tuple[int, ...]], seed: int
    ) -> Iterator[list[list[AdmittedRollout]]]:
        """Yields the groups of the prompts, in order, several at a time: as many as are generated at once.

        Completions follow from ``seed`` and each prompt's id.

        Raises HacrlFedError where the policy's log-probs are not finite.
        """
        self.sampler_gaps = []
        generated = self._generator.generate(
            [prompt_ids[prompt.id] for prompt in prompts],
            self._group_size,
            self._run.max_new_tokens,
            greedy=False,
            seeds=[derive_seed(seed, prompt.id) for prompt in prompts],
        )
        at_once = max(1, self._config.generation_rows // self._group_size)
        batch: list[tuple[Prompt, list[Completion]]] = []
        for number, (prompt, completions) in enumerate(zip(prompts, generated, strict=True), start=1):
            batch.append((prompt, completions))
            if len(batch) == at_once or number == len(prompts):
                yield [self._sendable(group) for group in self._verified(batch, prompt_ids)]
                batch = []

    def round_trip_share(self, rollouts: Sequence[AdmittedRollout]) -> float:
        """Share of own completions whose text gives the same ids again; peers learn from other ids in the others."""
        same = self.retokenizer.round_trips([rollout.completion_ids for rollout in rollouts])
        return sum(same) / len(same) if same else 1.0

    def _verified(
        self, batch: Sequence[tuple[Prompt, list[Completion]]], prompt_ids: Mapping[str, tuple[int, ...]]
    ) -> list[list[AdmittedRollout]]:
        rows = [(prompt, index, completion) for prompt, group in batch for index, completion in enumerate(group)]
        texts = self.retokenizer.decode([completion.token_ids for _, _, completion in rows])
        verdicts = self._verifiers.verify_all([(row[0], text) for row, text in zip(rows, texts, strict=True)])
        means = [completion.mean_logp for _, _, completion in rows]
        logp_sums = [mean * len(completion.token_ids) for mean, (_, _, completion) in zip(means, rows, strict=True)]
        if self._shares:
            sequences = [(prompt_ids[prompt.id], completion.token_ids) for prompt, _, completion in rows]
            logp_sums = self._policy.score(sequences, self._check)
            self.sampler_gaps += [
                abs(mean - logp_sum / len(completion.token_ids))
                for mean, logp_sum, (_, _, completion) in zip(means, logp_sums, rows, strict=True)
            ]
        groups: dict[str, list[AdmittedRollout]] = {prompt.id: [] for prompt, _ in batch}
        unverifiable = ""
        for (prompt, index, completion), text, verdict, logp_sum in zip(rows, texts, verdicts, logp_sums, strict=True):
            if not math.isfinite(logp_sum):
                raise HacrlFedError(NOT_FINITE)
            if verdict.reward is None:
                self.left_out["unverifiable"] += 1
                unverifiable = verdict.reason
                continue
            rollout = Rollout(
                prompt_id=prompt.id,
                sample_index=index,
                text=text,
                finish_reason=completion.finish_reason,
                reward=verdict.reward,
                # Rounding may leave a certain completion a little above 0.
                logp_sum=min(0.0, logp_sum),
                token_count=len(completion.token_ids),
                eos_only=not text and len(completion.token_ids) == 1 and completion.finish_reason is FinishReason.STOP,
                token_ids=completion.token_ids,
            )
            groups[prompt.id].append(AdmittedRollout(self._agent, rollout, completion.token_ids))
        if unverifiable:
            _log.warning("completions of this site that could not be verified are left out: %s", unverifiable)
        return list(groups.values())

    def _sendable(self, group: list[AdmittedRollout]) -> list[AdmittedRollout]:
        """The group without what the run's limits would refuse, so that all learn from the same."""
        limits = self._run.limits
        kept = [admitted for admitted in group if len(admitted.rollout.text.encode()) <= limits.text_bytes]
        while len(convert.rollouts_to_body([admitted.rollout for admitted in kept])) > limits.chunk_bytes:
            kept.pop()
        self.left_out["limits"] += len(group) - len(kept)
        return kept
