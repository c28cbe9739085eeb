"""A site of several devices: real processes on the CPU, against one process that does the same."""

import math
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from hacrl_fed.config import AlgorithmConfig, SiteConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed_client import checkpoint
from hacrl_fed_client.devices.sharded import Plan, Training, balanced, device_names, training_on_devices
from hacrl_fed_client.generation.base import Completion
from hacrl_fed_client.update import TrainingRollout
from tiny_models import Family, save_tiny

torch.set_num_threads(1)
STEPS = 4
SAMPLES = 4
TOKENS = 150  # a micro-batch
EXACT = 1e-5


def nothing() -> None:
    """A check that never interrupts."""


def plan(folder: str, devices: int, lora: dict[str, int] | None = None) -> Plan:
    site = {
        "device": "cpu",
        "devices": devices,
        "threads": 1,
        "lora": lora,
        "optimizer": {"lr": 3e-4, "warmup_steps": 2},
        "generation_rows": 2 * SAMPLES,
        "micro_batch_tokens": TOKENS,
    }
    algorithm = {"kl_coef": 0.5, "prompts_per_mini_batch": 2, "hacpo": {"cross_clip_low": 0.5}}
    return Plan(folder, SiteConfig.model_validate(site), 0, "me", AlgorithmConfig.model_validate(algorithm))


@dataclass
class Done:
    """What steps came to."""

    completions: list[list[list[Completion]]] = field(default_factory=list)
    logps: list[list[float]] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)


def do_steps(training: Training, steps: Sequence[int]) -> Done:
    """Generates, scores and updates: on the own rollouts, on those of a peer, and on another peer's only one."""
    done = Done()
    for step in steps:
        prompts = [[1 + i, 2, 3 + step, *[5] * i] for i in range(5)]
        seeds = [10 * step + i for i in range(len(prompts))]
        groups = list(training.generator.generate(prompts, SAMPLES, 8, greedy=False, seeds=seeds))
        sequences = [(prompt, each.token_ids) for prompt, group in zip(prompts, groups, strict=True) for each in group]
        logps = training.policy.score(sequences, nothing)

        def rollout(source: str, index: int, ratio: float) -> TrainingRollout:
            prompt, ids = sequences[index]  # noqa: B023
            mean = logps[index] / len(ids) - math.log(ratio)  # noqa: B023
            return TrainingRollout(source, f"q{index // SAMPLES}", tuple(prompt), ids, mean, (1.0, -0.7)[index % 2])

        own = [rollout("me", index, 1.0) for index in range(len(sequences))]
        cross = [rollout("peer", index, 0.9) for index in range(len(sequences))]
        metrics = training.updater.step([*own, *cross, rollout("lone", 0, 0.9)], nothing)
        done.completions.append(groups)
        done.logps.append(logps)
        done.metrics.append(metrics)
    return done


def save(training: Training, folder: Path, step: int) -> None:
    """Writes a checkpoint as a site does."""
    optimizer, scheduler = training.updater.state()
    state = training.policy.trainable_state()
    checkpoint.save(folder, checkpoint.Checkpoint(step, state, optimizer, scheduler, {}, {}), keep=1)


def restore(training: Training, folder: Path) -> None:
    """Goes on from a checkpoint as a site does."""
    saved = checkpoint.latest(folder)
    assert saved is not None and saved.step == 2
    training.policy.load_trainable_state(saved.policy)
    training.updater.load_state(saved.optimizer, saved.scheduler)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            found[name], tensor, atol=EXACT, rtol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def saved_weights(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder).named_parameters())


def interrupted_by_the_context(training: Training) -> None:
    """A prompt that the second rank alone finds too long."""
    with pytest.raises(UserError, match="exceed the model's context"):
        list(training.generator.generate([[1], [1] * 300], 1, 8, greedy=True, seeds=[0, 0]))


def interrupted_by_a_kill(training: Training) -> None:
    """The second process is killed in the middle of an update."""
    (worker,) = multiprocessing.active_children()

    def kill() -> None:
        os.kill(worker.pid or 0, signal.SIGKILL)

    rollouts = [TrainingRollout("me", f"q{i // 2}", (1, 2, i // 2), (3, 4), -5.0, (-1.0) ** i) for i in range(8)]
    with pytest.raises(HacrlFedError, match="device 1 was ended by SIGKILL"):
        training.updater.step(rollouts, kill)


@pytest.mark.parametrize(
    ("family", "lora", "interrupted"),
    [("qwen3", None, interrupted_by_the_context), ("llama", {"r": 4}, interrupted_by_a_kill)],
)
def test_two_devices_do_what_one_does(
    tmp_path: Path, family: Family, lora: dict[str, int] | None, interrupted: Callable[[Training], None]
) -> None:
    folder = save_tiny(tmp_path / "start", family)
    with training_on_devices(plan(folder, 1, lora), nothing) as one:
        before = one.policy.trainable_state()
        expected = do_steps(one, range(2))
        save(one, tmp_path / "of-one", 2)
        expected_rest = do_steps(one, range(2, STEPS))
        weights = one.policy.trainable_state()
        optimizer, scheduler = one.updater.state()
        one.policy.save_pretrained(tmp_path / "model-of-one")
    assert max((weights[name] - before[name]).abs().max().item() for name in weights) > 100 * EXACT

    with training_on_devices(plan(folder, 2, lora), nothing) as two:
        found = do_steps(two, range(2))
        save(two, tmp_path / "of-two", 2)
        found_rest = do_steps(two, range(2, STEPS))
        assert found.completions + found_rest.completions == expected.completions + expected_rest.completions
        for logps, others in zip(found.logps + found_rest.logps, expected.logps + expected_rest.logps, strict=True):
            assert logps == pytest.approx(others, abs=1e-4)
        for metrics, others in zip(
            found.metrics + found_rest.metrics, expected.metrics + expected_rest.metrics, strict=True
        ):
            assert metrics == pytest.approx(others, rel=1e-3, abs=1e-5)
        assert_equal(two.policy.trainable_state(), weights)
        found_optimizer, found_scheduler = two.updater.state()
        assert found_scheduler == scheduler and found_optimizer["param_groups"] == optimizer["param_groups"]
        for index, values in optimizer["state"].items():
            assert_equal(found_optimizer["state"][index], values)
        # A finished model, as one device's.
        two.policy.save_pretrained(tmp_path / "model-of-two")
        assert_equal(saved_weights(tmp_path / "model-of-two"), saved_weights(tmp_path / "model-of-one"))
        # On from the checkpoint of one device.
        restore(two, tmp_path / "of-one")
        do_steps(two, range(2, STEPS))
        assert_equal(two.policy.trainable_state(), weights)
        interrupted(two)
        assert not multiprocessing.active_children()

    with training_on_devices(plan(folder, 1, lora), nothing) as one:
        restore(one, tmp_path / "of-two")
        do_steps(one, range(2, STEPS))
        assert_equal(one.policy.trainable_state(), weights)


@settings(deadline=None)
@given(weights=st.lists(st.integers(0, 1000), max_size=30), parts=st.integers(1, 8))
def test_work_is_divided_whole_and_evenly(weights: list[int], parts: int) -> None:
    divided = balanced(weights, parts)
    assert sorted(index for part in divided for index in part) == list(range(len(weights)))
    loads = [sum(weights[index] for index in part) for part in divided]
    assert len(loads) == parts and max(loads) - min(loads) <= max(weights, default=0)


def site(**settings: Any) -> SiteConfig:
    return SiteConfig.model_validate(settings)


def test_devices_are_all_gpus_unless_the_site_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    assert device_names(site()) == device_names(site(device="cuda")) == ("cuda:0", "cuda:1", "cuda:2")
    assert device_names(site(devices=2)) == ("cuda:0", "cuda:1")
    assert device_names(site(devices=1)) == ("auto",)
    assert device_names(site(device="cuda:1")) == ("cuda:1",)
    assert device_names(site(generation_backend="vllm")) == ("auto",)
    assert device_names(site(device="cpu")) == ("cpu",)
    assert device_names(site(device="cpu", devices=2)) == ("cpu", "cpu")
    with pytest.raises(UserError, match="devices asks for 4 GPUs, and there are 3"):
        device_names(site(devices=4))
    with pytest.raises(UserError, match="names one GPU"):
        device_names(site(device="cuda:1", devices=2))
    with pytest.raises(UserError, match="vLLM generates on one device"):
        device_names(site(devices=2, generation_backend="vllm"))
    with pytest.raises(UserError, match="leave devices out"):
        device_names(site(device="mps", devices=2))


def test_without_a_gpu_the_cpu_is_one_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert device_names(site()) == ("auto",)
    assert device_names(site(devices=2)) == ("cpu", "cpu")
    assert device_names(site(device="cuda")) == ("cuda",)  # loading says that there is none
    with pytest.raises(UserError, match="there are 0"):
        device_names(site(device="cuda", devices=2))
