"""A site's own rollouts: what is left out, and what they say of the policy that made them."""

from pathlib import Path
from typing import ClassVar

import pytest
import torch

from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import RunConfig, SiteConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed.protocol import convert
from hacrl_fed.records import FinishReason
from hacrl_fed.tasks.base import Prompt
from hacrl_fed.verifiers.base import Verdict
from hacrl_fed.verifiers.pool import VerifierPool
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.rollout import RolloutMaker
from tiny_models import save_tiny

torch.set_num_threads(1)
PROMPTS = [Prompt("the 12", "x"), Prompt("and", "y"), Prompt("him", "z")]


class _Undecided:
    """A verifier that can say nothing of some completions."""

    name = "undecided"
    settings: ClassVar[dict[str, str]] = {}
    isolated = False

    def prepare(self) -> None:
        """Needs nothing."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        if len(completion) % 2:
            return Verdict(None, "odd")
        return Verdict(1.0, "even")


def maker(
    tmp_path: Path, method: str = "hacpo", **limits: int
) -> tuple[RolloutMaker, Policy, dict[str, tuple[int, ...]]]:
    config = SiteConfig(threads=1, generation_rows=8)
    policy = Policy.load(save_tiny(tmp_path), config, 0, with_reference=False)
    run = RunConfig.model_validate({"task": "t", "steps": 1, "group_size": 4, "max_new_tokens": 12, "limits": limits})
    verifiers = VerifierPool(_Undecided(), 1.0, 1)
    made = RolloutMaker(
        "me", run, config, METHODS[method], policy, HfGenerator(policy, 8, lambda: None), verifiers, check=lambda: None
    )
    return made, policy, {prompt.id: tuple(policy.render_prompt(prompt.text)) for prompt in PROMPTS}


def test_rollouts_carry_the_training_pass_s_log_probs_and_what_cannot_be_verified_is_left_out(tmp_path: Path) -> None:
    made, policy, prompt_ids = maker(tmp_path)
    batches = list(made.make(PROMPTS, prompt_ids, seed=1))
    assert [len(batch) for batch in batches] == [2, 1]  # eight rows are two groups of four
    rollouts = [rollout for batch in batches for group in batch for rollout in group]
    assert 0 < made.left_out["unverifiable"] == 12 - len(rollouts)
    assert {rollout.rollout.reward for rollout in rollouts} == {1.0}
    for admitted in rollouts:
        logps, _ = policy.token_logps([(prompt_ids[admitted.rollout.prompt_id], admitted.completion_ids)])
        assert admitted.rollout.logp_sum == pytest.approx(logps.sum().item(), abs=1e-4)
        finished = admitted.completion_ids[-1] in policy.eos_ids
        assert finished == (admitted.rollout.finish_reason is FinishReason.STOP)
        assert admitted.rollout.token_count == len(admitted.completion_ids)


def test_rollouts_that_are_not_shared_are_not_scored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared, *_ = maker(tmp_path)
    alone, _, prompt_ids = maker(tmp_path, "gspo")
    logp_sums, counts = [], []
    for made in (shared, alone):
        if made is alone:
            monkeypatch.delattr(Policy, "score")
        rollouts = [
            each.rollout for batch in made.make(PROMPTS, prompt_ids, seed=1) for group in batch for each in group
        ]
        logp_sums.append([each.logp_sum for each in rollouts])
        counts.append(len(made.sampler_gaps))
    assert logp_sums[1] == pytest.approx(logp_sums[0], abs=1e-4) != [0.0] * len(logp_sums[0])
    assert counts == [12, 0] and max(shared.sampler_gaps) < 1e-5


def test_a_prompt_s_rollouts_do_not_depend_on_the_prompts_beside_it(tmp_path: Path) -> None:
    made, _, prompt_ids = maker(tmp_path)

    def ids(prompts: list[Prompt], seed: int) -> dict[str, list[tuple[int, ...]]]:
        groups = [group for batch in made.make(prompts, prompt_ids, seed) for group in batch]
        return {prompt.id: [r.completion_ids for r in group] for prompt, group in zip(prompts, groups, strict=True)}

    whole = ids(PROMPTS, 1)
    assert ids(PROMPTS[:0:-1], 1) == {prompt.id: whole[prompt.id] for prompt in PROMPTS[1:]}
    assert ids(PROMPTS, 2) != whole


def test_what_the_limits_would_refuse_is_left_out_and_counted(tmp_path: Path) -> None:
    made, _, prompt_ids = maker(tmp_path, chunk_bytes=1024, text_bytes=12)
    groups = [group for batch in made.make(PROMPTS, prompt_ids, seed=1) for group in batch]
    rollouts = [rollout for group in groups for rollout in group]
    assert made.left_out["limits"] > 0
    assert sum(made.left_out.values()) + len(rollouts) == 12
    assert all(len(rollout.rollout.text.encode()) <= 12 for rollout in rollouts)
    assert all(len(convert.rollouts_to_body([r.rollout for r in group])) <= 1024 for group in groups)


def test_weights_that_are_not_numbers_are_an_error_not_a_log_prob(tmp_path: Path) -> None:
    made, policy, prompt_ids = maker(tmp_path)
    with torch.no_grad():
        policy.parameters()[0].fill_(torch.nan)
    with pytest.raises(HacrlFedError, match="not finite"):
        list(made.make(PROMPTS, prompt_ids, seed=1))
