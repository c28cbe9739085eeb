"""The benchmarks of a step: what they print, and the floors by hand-worked numbers."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from step.floors import Machine, generation_flop, generation_s, update_flop
from step.workloads import WORKLOADS, ModelSize, Workload

ROOT = Path(__file__).parent.parent

SIZE = ModelSize(hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, feed_forward=3, vocabulary=10)
BODY = 2 * (4 * 4 + 2 * 4 * 2 + 4 * 4 + 3 * 4 * 3)  # q, k and v, o; gate, up and down
HEAD = 40


def test_parameters_are_those_of_the_projections() -> None:
    assert (SIZE.body_parameters, SIZE.head_parameters) == (BODY, HEAD)


def test_the_updates_arithmetic_is_six_a_parameter_and_needed_token_and_attention() -> None:
    # One prompt of 3 tokens; completions of 1 and 3, of which 0 and 2 are inputs.
    inputs, predicted = 3 + 0 + 2, 1 + 3
    pairs = (1 + 2 + 3) + (4 + 5)
    forward = 2 * BODY * inputs + 2 * HEAD * predicted + 4 * 2 * (2 * 2) * pairs
    assert generation_flop(SIZE, 1, 3, [1, 3]) == forward
    assert update_flop(SIZE, 1, 3, [1, 3]) == 3 * forward


@pytest.mark.parametrize("bound", ["arithmetic", "memory"])
def test_decoding_takes_the_longer_of_arithmetic_and_reading(bound: str) -> None:
    machine = Machine(1e3, 1e30) if bound == "arithmetic" else Machine(1e30, 1e3)
    prefill = (2 * BODY * 3 + 2 * HEAD + 4 * 2 * 4 * 6) / machine.flops
    parameters = BODY + HEAD
    if bound == "arithmetic":
        steps = 2 * parameters * (2 + 1) / 1e3  # two rows at the second position, one at the third
    else:
        # Keys and values of 2 layers, 1 head of 2: 8 a token; the prompt's 3 once, and 2 x 1 and 1 x 2 tokens of the rows.
        steps = 4 * ((parameters + 8 * (3 + 2)) + (parameters + 8 * (3 + 2))) / 1e3
    assert generation_s(SIZE, 1, 3, [1, 2, 3], machine) == pytest.approx(prefill + steps)


@pytest.mark.parametrize("name", ["long-prompt", "long-tail"])
def test_lengths_have_the_workloads_mean(name: str) -> None:
    workload = WORKLOADS[name]
    lengths = workload.lengths(20_000, seed=1)
    assert sum(lengths) / len(lengths) == pytest.approx(workload.mean_new_tokens, rel=0.03)
    assert min(lengths) == 1 and max(lengths) == workload.max_new_tokens


def test_a_workload_without_a_mean_ends_nothing_early() -> None:
    assert WORKLOADS["short"].end_probability == 0
    assert set(WORKLOADS["short"].lengths(10, seed=0)) == {32}


def test_prompts_are_distinct() -> None:
    texts = Workload(prompt_tokens=2, mean_new_tokens=4, max_new_tokens=8).texts(5, seed=0)
    assert len(set(texts)) == len(texts) == 40
    assert all(left != right for left, right in pairwise(texts))


def test_both_sides_do_the_same_work_and_agree_on_the_loss() -> None:
    command = ["benchmarks/step_vs_trl.py", "--workload", "short", "--model", "tiny", "--steps", "1", "--json"]
    ended = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert {"ours_s", "trl_s", "ratio", "ours_rss_mb", "trl_rss_mb", "rss_ratio", "loss_difference"} <= result.keys()
    assert 0 <= result["loss_difference"] <= 1e-6
    assert result["ours_mean_new_tokens"] == result["trl_mean_new_tokens"] == 32
    assert result["ratio"] == pytest.approx(result["trl_s"] / result["ours_s"])
    assert 0 < result["ours_step_mb"] < result["ours_rss_mb"]


def test_an_unknown_workload_is_one_sentence() -> None:
    command = ["benchmarks/step_vs_trl.py", "--workload", "long", "--model", "tiny"]
    ended = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.strip() == "there is no workload 'long': take of long-prompt, long-tail, short"
