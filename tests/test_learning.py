"""From a step's rollouts to training rollouts, against the pure functions of the algorithm."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from federation import TASK, rollout
from hacrl_fed.algorithms.baselines import naive_advantages, own_advantages, sapo_advantages, sapo_sample
from hacrl_fed.algorithms.hacpo import CapabilityTracker, HacpoConfig, capability_ratio, joint_advantages
from hacrl_fed.config import AlgorithmConfig, SiteConfig
from hacrl_fed_client.admission import AdmittedRollout
from hacrl_fed_client.learning import few_live_share, training_rollouts, without_foreign_sources
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.update import TrainingRollout
from tiny_models import save_tiny

P, Q = TASK.train[:2]
PROMPT_IDS = {P.id: (1, 2), Q.id: (3,)}
REWARDS = [("a", P, 1.0), ("b", P, 0.0), ("a", Q, 0.0), ("a", P, 0.0), ("b", Q, 1.0), ("b", Q, 1.0), ("b", P, 1.0)]


def admitted(rows: Sequence[tuple[str, object, float]] = REWARDS) -> list[AdmittedRollout]:
    return [
        AdmittedRollout(
            source,
            rollout(prompt, index, reward=reward, logp_sum=-float(index + 1), token_count=2),  # type: ignore[arg-type]
            tuple(range(index + 1)),
        )
        for index, (source, prompt, reward) in enumerate(rows)
    ]


def test_hacpo_gives_the_advantages_and_ratios_of_the_pure_functions() -> None:
    tracker, reference = CapabilityTracker(window=5), CapabilityTracker(window=5)
    for history in (tracker, reference):
        history.update({"a": 0.9, "b": 0.3})
    _, trained, metrics = training_rollouts(admitted(), PROMPT_IDS, "a", tracker, AlgorithmConfig(), 0)
    reference.update({"a": 1 / 3, "b": 3 / 4})
    capabilities = reference.capabilities()
    expected, _ = joint_advantages(
        [reward for *_, reward in REWARDS],
        [0, 0, 1, 0, 1, 1, 0],
        [source for source, *_ in REWARDS],
        "a",
        capabilities,
        HacpoConfig(),
    )
    torch.testing.assert_close(torch.tensor([one.advantage for one in trained], dtype=torch.float64), expected)
    ratio = capability_ratio(capabilities["b"], capabilities["a"])
    assert [one.omega for one in trained] == pytest.approx([1.0 if s == "a" else ratio for s, *_ in REWARDS])
    assert tracker.capabilities() == pytest.approx(capabilities)
    assert metrics["capability/b"] == pytest.approx(capabilities["b"])
    assert metrics["capability_ratio/b"] == pytest.approx(ratio)
    assert metrics["capability_ratio/a"] == 1.0


def test_rollouts_keep_their_order_and_content() -> None:
    rows = admitted()
    learned, trained, _ = training_rollouts(rows, PROMPT_IDS, "a", CapabilityTracker(), AlgorithmConfig(), 0)
    assert learned == rows
    for one, row in zip(trained, rows, strict=True):
        assert (one.source, one.prompt_key) == (row.source, row.rollout.prompt_id)
        assert one.prompt_ids == PROMPT_IDS[row.rollout.prompt_id]
        assert one.completion_ids == row.completion_ids
        # In the source's tokens, not in the learner's.
        assert one.source_mean_logp == row.rollout.logp_sum / 2


@pytest.mark.parametrize(("method", "function"), [("naive", naive_advantages), ("gspo", own_advantages)])
def test_each_method_has_its_own_advantages(method: str, function: object) -> None:
    rows = admitted() if method == "naive" else [row for row in admitted() if row.source == "a"]
    algorithm = AlgorithmConfig.model_validate({"method": method})
    _, trained, _ = training_rollouts(rows, PROMPT_IDS, "a", CapabilityTracker(), algorithm, 0)
    expected, _ = function(  # type: ignore[operator]
        [row.rollout.reward for row in rows],
        [0 if row.rollout.prompt_id == P.id else 1 for row in rows],
        [row.source for row in rows],
        "a",
        {"a": 1.0, "b": 1.0},
        HacpoConfig(),
    )
    torch.testing.assert_close(torch.tensor([one.advantage for one in trained], dtype=torch.float64), expected)


def test_an_absent_agent_keeps_its_history_and_is_not_in_the_metrics() -> None:
    tracker = CapabilityTracker()
    training_rollouts(admitted(), PROMPT_IDS, "a", tracker, AlgorithmConfig(), 0)
    before = tracker.capabilities()["b"]
    own = [row for row in admitted() if row.source == "a"]
    _, _, metrics = training_rollouts(own, PROMPT_IDS, "a", tracker, AlgorithmConfig(), 0)
    assert tracker.capabilities()["b"] == before
    assert "capability/b" not in metrics
    assert metrics["cross_rollouts"] == 0


def test_a_learner_without_a_history_counts_as_the_mean_of_the_others() -> None:
    peers = [row for row in admitted() if row.source == "b"]
    tracker = CapabilityTracker()
    _, trained, metrics = training_rollouts(peers, PROMPT_IDS, "a", tracker, AlgorithmConfig(), 0)
    assert {one.omega for one in trained} == {1.0}
    assert (metrics["own_rollouts"], metrics["cross_rollouts"]) == (0, 4)
    assert "reward_mean" not in metrics
    assert "a" not in tracker.capabilities()  # and nothing of it is remembered


def test_metrics_of_rewards_and_groups() -> None:
    _, _, metrics = training_rollouts(admitted(), PROMPT_IDS, "a", CapabilityTracker(), AlgorithmConfig(), 0)
    assert (metrics["own_rollouts"], metrics["cross_rollouts"]) == (3, 4)
    assert metrics["reward_mean"] == pytest.approx(1 / 3)
    assert metrics["reward_std"] == pytest.approx((2 / 9) ** 0.5)
    assert metrics["reward_mean/b"] == 0.75
    assert metrics["completion_tokens_mean"] == pytest.approx((1 + 3 + 4) / 3)
    assert metrics["completion_tokens_max"] == 4
    assert metrics["completion_tokens_mean/b"] == (2 + 5 + 6 + 7) / 4
    assert metrics["retokenised_length_ratio/b"] == (2 + 5 + 6 + 7) / 8  # each has two tokens at its source
    assert metrics["entropy"] == pytest.approx((1 + 3 + 4) / (1 + 3 + 4))
    assert metrics["truncated_share"] == 0.0
    assert metrics["zero_variance_groups/own"] == 0.5  # of P and Q, Q has one own rollout
    assert metrics["zero_variance_groups/joint"] == 0.0


def test_a_source_that_the_learner_would_never_imitate_is_left_out(tmp_path: Path) -> None:
    policy = Policy.load(save_tiny(tmp_path), SiteConfig(), seed=0, with_reference=False)
    rows = [row for row in admitted() if row.completion_ids]
    # Of c, what the learner itself would say of them; of b, e^7 times as likely at the source.
    sums = policy.score([(PROMPT_IDS[row.rollout.prompt_id], row.completion_ids) for row in rows], lambda: None)
    placed = []
    for row, logp_sum in zip(rows, sums, strict=True):
        mean = logp_sum / len(row.completion_ids)
        for source, offset in [("a", 0.0), ("b", 7.0), ("c", 0.0)]:
            told = replace(row.rollout, token_count=1, logp_sum=min(0.0, mean + offset))
            placed.append(replace(row, source=source, rollout=told))
    arguments = PROMPT_IDS, policy, "a"
    kept, medians = without_foreign_sources(placed, *arguments, HacpoConfig(source_floor=0.1), lambda: None)
    assert medians.keys() == {"b", "c"}
    assert medians["b"] < 0.01 and medians["c"] == pytest.approx(1, abs=1e-4)
    assert kept == [row for row in placed if row.source != "b"]
    assert without_foreign_sources(placed, *arguments, HacpoConfig(), lambda: None) == (placed, {})


def test_sapo_learns_from_the_groups_that_it_draws() -> None:
    # Of b, the group of P has an advantage and that of Q has none.
    rows = admitted()
    algorithm = AlgorithmConfig.model_validate({"method": "sapo"})
    learned, trained, metrics = training_rollouts(rows, PROMPT_IDS, "a", CapabilityTracker(), algorithm, 3)
    index = [0 if row.rollout.prompt_id == P.id else 1 for row in rows]
    sources = [row.source for row in rows]
    advantages, _ = sapo_advantages([r.rollout.reward for r in rows], index, sources, "a", {}, HacpoConfig())
    kept = sapo_sample(advantages, index, sources, "a", 3)
    assert kept.tolist() == [True, True, True, True, False, False, True]
    assert learned == [row for row, keep in zip(rows, kept.tolist(), strict=True) if keep]
    assert [one.advantage for one in trained] == advantages[kept].tolist()
    assert metrics["cross_rollouts"] == 4  # that came, whatever is drawn of them


def test_few_live_rollouts_are_worth_a_warning_where_there_are_enough() -> None:
    def trained(positives: int) -> list[TrainingRollout]:
        rows = [("b", 1.0)] * positives + [("b", -1.0)] * 9 + [("a", 1.0)] * 9
        return [TrainingRollout(source, "q", (1,), (2,), -1.0, advantage) for source, advantage in rows]

    assert few_live_share(trained(8), "a", {"cross/live_share_positive": 0.19}) == 0.19
    assert few_live_share(trained(8), "a", {"cross/live_share_positive": 0.2}) is None
    assert few_live_share(trained(7), "a", {"cross/live_share_positive": 0.0}) is None
    assert few_live_share(trained(0), "a", {}) is None
