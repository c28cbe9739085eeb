"""What HACPO's theorems (arXiv 2603.02604, first version) promise holds of the implementation, by small simulations."""

import functools
import json
import math
from dataclasses import asdict

import pytest
import torch

import theory
import theory_gradients
from theory_baseline import (
    AS_IN_THE_THEOREM,
    Estimate,
    draw_rollouts,
    equal_prompts,
    estimated_ratio,
    floor_cost,
    library_baseline,
    proportional_prompts,
    rule_costs,
    specialised_prompts,
    theorem_baseline,
    true_ratio,
)
from theory_gradients import TOKENS, AlignmentRow, Pair, TinyPolicy, alignments

torch.set_num_threads(1)


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def is_zero(estimate: Estimate, standard_errors: float = 4) -> bool:
    return abs(estimate.mean) <= standard_errors * estimate.se


# --- Theorem 4.1 ---


@pytest.mark.parametrize(("learner", "source"), [(0.6, 0.2), (0.2, 0.6)])
def test_with_the_true_ratio_the_baseline_is_unbiased_and_the_pooled_mean_is_not(learner, source, generator):
    row = true_ratio("", equal_prompts(learner, source, 1000), generator, repeats=16)
    assert is_zero(row.theorem)
    assert is_zero(row.library)
    assert not is_zero(row.naive)
    assert row.naive.mean == pytest.approx((source - learner) / 2, abs=0.01)


def test_the_baseline_is_unbiased_prompt_by_prompt_only_where_the_ratio_is_the_same_for_all(generator):
    proportional = true_ratio("", proportional_prompts(0.45, 0.15, 500, generator), generator, repeats=32)
    specialised = true_ratio("", specialised_prompts(0.45, 0.15, 500, generator), generator, repeats=32)
    for row in (proportional, specialised):
        assert is_zero(row.theorem)
        assert not is_zero(row.naive)
    assert proportional.theorem_by_prompt < 0.03
    # Half of p_j(q) / w - p_k(q), two independent uniform draws over [0, .9].
    assert specialised.theorem_by_prompt == pytest.approx(0.9 * math.sqrt(2 / 12) / 2, rel=0.1)


def test_the_librarys_baseline_is_the_theorems_but_for_groups_of_equal_rewards(generator):
    prompts = equal_prompts(0.9, 0.8, 500)
    drawn = draw_rollouts(prompts, generator)
    found = library_baseline(drawn, prompts.capabilities, AS_IN_THE_THEOREM)
    wanted = theorem_baseline(drawn, 0.8 / 0.9)
    equal = drawn.rewards.amin(1) == drawn.rewards.amax(1)
    assert equal.any()
    torch.testing.assert_close(found[~equal], wanted[~equal])
    assert (found[equal] == drawn.rewards[equal, 0]).all()


def test_the_error_with_the_estimated_ratio_falls_as_window_and_step_grow(generator):
    windows = (1, 5, 20)
    errors = {rollouts: estimated_ratio(0.6, 0.3, windows, rollouts, 150, generator) for rollouts in (16, 64, 256)}
    for rows in errors.values():
        assert [row.rmse for row in rows] == sorted((row.rmse for row in rows), reverse=True)
        assert [row.ratio_rmse for row in rows] == sorted((row.ratio_rmse for row in rows), reverse=True)
        assert all(is_zero(row.bias) for row in rows)
    for few, more in ((16, 64), (64, 256)):
        for before, after in zip(errors[few], errors[more], strict=True):
            # Four times the rollouts halve the error.
            assert 0.3 < after.rmse / before.rmse < 0.75


def test_a_window_lags_behind_a_learner_that_improves(generator):
    short, long = estimated_ratio(0.6, 0.3, (1, 10), 256, 150, generator, drift=0.02)
    assert is_zero(short.bias)
    # The learner's capability counts as that of 4.5 steps ago; half of the baseline rests on it.
    assert long.bias.mean == pytest.approx(-0.02 * 4.5 / 2, abs=4 * long.bias.se)


def test_what_the_rules_cost(generator):
    stronger = rule_costs(0.9, 0.3, 4000, generator)
    assert is_zero(stronger.bounds)
    assert stronger.guard.mean < -4 * stronger.guard.se
    assert stronger.naive.mean < stronger.all_rules.mean < 0
    # No baseline of a weaker learner is above 1, and a ratio of 30 counts as 10.
    weaker = rule_costs(0.03, 0.9, 4000, generator)
    assert weaker.guard == Estimate(0.0, 0.0)
    assert weaker.bounds.mean == pytest.approx((0.9 / 10 - 0.03) / 2, abs=4 * weaker.bounds.se)


def test_the_floor_takes_the_sources_part_out_of_the_baseline_and_the_bounds_keep_a_tenth(generator):
    row = floor_cost(0.1, 0.9, 1, 16, 100, generator)
    assert row.floored == pytest.approx(0.9**16)
    assert row.floor.mean == pytest.approx(-0.1 / 2, abs=4 * row.floor.se + 1e-6)
    assert row.floor_and_bounds.mean == pytest.approx(0.9 / 10 / 2 - 0.1 / 2, abs=4 * row.floor_and_bounds.se)


# --- Theorem 4.3 ---

WHOLE_TEXT = Pair(1.0, 0.4, 0.4, verified=TOKENS)
DIFFERENT_GIFTS = Pair(1.0, 0.4, 0.4, verified=TOKENS, halves=True)


@functools.cache
def by_band(pair: Pair) -> dict[str, AlignmentRow]:
    return {row.band: row for row in alignments(pair, seeds=3, seed=0, groups=16)}


@pytest.mark.parametrize("pair", [Pair(0.1, 0.4, 0.8), Pair(0.1, 0.4, 0.1), WHOLE_TEXT], ids=str)
def test_self_and_cross_gradient_have_a_positive_inner_product_with_the_papers_band(pair):
    for band in ("paper .8", "paper .5"):
        row = by_band(pair)[band]
        assert row.positive == 1
        assert row.inner.mean > 2 * row.inner.se
        assert 0 < row.live_positive < 1


def test_where_the_whole_text_is_verified_the_signed_band_aligns_best_and_is_live_for_every_positive():
    rows = by_band(WHOLE_TEXT)
    assert rows["signed"].live_positive > 0.99
    assert rows["signed"].cosine.mean > rows["paper .8"].cosine.mean + 0.1


def test_agents_with_different_gifts_teach_each_other_in_the_signed_band_only():
    rows = by_band(DIFFERENT_GIFTS)
    for band in ("paper .8", "paper .5"):
        assert rows[band].live_positive < 0.02
        assert rows[band].log_ascent.mean < rows["signed"].log_ascent.mean - 0.3
    assert rows["signed"].live_positive > 0.2
    assert rows["signed"].log_ascent.mean > 0.3


@pytest.mark.parametrize("verified", [1, TOKENS])
def test_the_tiny_policys_success_is_that_of_its_samples(verified, generator):
    policy = theory_gradients.warm_started(TinyPolicy(generator, verified), 0.4, slice(None))
    prompts = torch.arange(theory_gradients.PROMPTS).repeat(4000)
    rewards = policy.rewards(prompts, policy.sample(prompts, generator))
    assert policy.success().mean().item() == pytest.approx(0.4, abs=0.05)
    torch.testing.assert_close(rewards.view(4000, -1).mean(0), policy.success().detach(), rtol=0, atol=0.04)


# --- The command ---


def test_a_report_is_plain_data_and_every_table_has_rows(generator):
    row = true_ratio("equal", equal_prompts(0.6, 0.2, 10), generator, repeats=2)
    report = theory.Report(
        0,
        [row],
        estimated_ratio(0.6, 0.3, (1,), 16, 2, generator),
        [rule_costs(0.6, 0.2, 10, generator)],
        [floor_cost(0.1, 0.9, 1, 16, 2, generator)],
        alignments(Pair(0.1, 0.4, 0.4), seeds=2, seed=0, groups=2),
    )
    assert json.loads(json.dumps(asdict(report)))["true_ratio"][0]["prompts"] == "equal"
    assert [table.row_count for table in theory.tables(report)] == [1, 1, 1, 1, 3]
