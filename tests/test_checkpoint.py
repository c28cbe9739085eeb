"""Checkpoints: there is always a whole one, whatever interrupts the writing."""

import logging
import os
import random
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hacrl_fed.config import AlgorithmConfig, Lora, Optimizer, SiteConfig
from hacrl_fed.errors import HacrlFedError
from hacrl_fed_client.checkpoint import Checkpoint, capture_random_state, latest, restore_random_state, save
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.update import TrainingRollout, Updater
from tiny_models import save_tiny

torch.set_num_threads(1)
EMPTY = Checkpoint(step=0, policy={}, optimizer={}, scheduler={}, random_state={}, extra={})


def checkpoint(step: int, size: int = 1000) -> Checkpoint:
    return replace(EMPTY, step=step, policy={"w": torch.full((size,), float(step))}, extra={"chain": f"head {step}"})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_without_checkpoints_has_no_latest(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "missing") is None


def test_the_newest_is_loaded_and_the_last_n_are_kept(tmp_path: Path) -> None:
    for step in (1, 9, 10, 100):
        path = save(tmp_path, checkpoint(step), keep=2)
        assert path.exists()
    assert names(tmp_path) == ["step-00000010.pt", "step-00000100.pt"]
    found = latest(tmp_path)
    assert found is not None and found.step == 100
    assert torch.equal(found.policy["w"], torch.full((1000,), 100.0))
    assert found.extra == {"chain": "head 100"}
    # The same step again replaces it.
    save(tmp_path, replace(checkpoint(100), extra={"again": True}), keep=2)
    found = latest(tmp_path)
    assert found is not None and found.extra == {"again": True}


@pytest.mark.parametrize("lora", [None, Lora(r=4, dropout=0.3)])
def test_a_resumed_run_goes_on_as_if_never_stopped(tmp_path: Path, lora: Lora | None) -> None:
    folder = save_tiny(tmp_path / "model")
    site = SiteConfig(lora=lora, optimizer=Optimizer(lr=1e-2, warmup_steps=3))
    rollouts = [TrainingRollout("me", "q", (1, 2, 3), (4, 5 + i), -5.0, 1.0 - 2 * i) for i in range(2)]

    def start() -> tuple[Policy, Updater]:
        policy = Policy.load(folder, site, seed=0, with_reference=False)
        return policy, Updater(policy, "me", AlgorithmConfig(kl_coef=0), site.optimizer)

    policy, updater = start()
    torch.manual_seed(5)
    updater.step(rollouts, lambda: None)
    state = Checkpoint(
        step=1,
        policy=policy.trainable_state(),
        optimizer=updater.optimizer.state_dict(),
        scheduler=updater.scheduler.state_dict(),
        random_state=capture_random_state(),
        extra={"capabilities": {"me": [0.5]}},
    )
    save(tmp_path / "checkpoints", state, keep=1)
    updater.step(rollouts, lambda: None)
    expected, drawn = policy.trainable_state(), (random.random(), torch.rand(1).item())

    torch.manual_seed(6)
    random.seed(6)
    found = latest(tmp_path / "checkpoints")
    assert found is not None and found.extra == state.extra
    resumed, resumed_updater = start()
    resumed.load_trainable_state(found.policy)
    resumed_updater.optimizer.load_state_dict(found.optimizer)
    resumed_updater.scheduler.load_state_dict(found.scheduler)
    restore_random_state(found.random_state)
    assert resumed_updater.updates_made == 1
    resumed_updater.step(rollouts, lambda: None)
    assert all(torch.equal(value, expected[name]) for name, value in resumed.trainable_state().items())
    assert (random.random(), torch.rand(1).item()) == drawn


def test_a_damaged_newest_falls_back_to_the_one_before(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(tmp_path, checkpoint(1), keep=2)
    path = save(tmp_path, checkpoint(2), keep=2)
    whole = path.read_bytes()
    generator = random.Random(0)
    flips = [bytearray(whole) for _ in range(60)]
    for damaged in flips:
        damaged[generator.randrange(len(whole))] ^= 1 << generator.randrange(8)
    passed_over = 0
    for damaged in [b"", whole[: len(whole) // 2], whole[:-1], b"not a checkpoint", *map(bytes, flips)]:
        path.write_bytes(damaged)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            found = latest(tmp_path)
        assert found is not None
        # Never a wrong weight: either the damage is in bytes that do not count, or the one before is taken.
        assert torch.equal(found.policy["w"], torch.full((1000,), float(found.step)))
        assert found.extra == {"chain": f"head {found.step}"}
        passed_over += found.step == 1
        assert (found.step == 1) == ("is damaged and passed over" in caplog.text)
    assert passed_over > 40
    path.unlink()
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    assert latest(tmp_path) is None


def test_a_checkpoint_runs_no_code(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Payload:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "owned"),)

    torch.save({"step": 1, "payload": Payload()}, tmp_path / "step-00000001.pt")
    assert latest(tmp_path) is None
    assert "passed over" in caplog.text
    assert not (tmp_path / "owned").exists()


def test_an_unwritable_folder_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HacrlFedError, match=r"checkpoint of step 3 cannot be written to .*file \(.+\); the one before"):
        save(tmp_path / "file", checkpoint(3), keep=1)


def run_child(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    program = f"""
import os, resource, signal, sys
from pathlib import Path
import torch
from hacrl_fed_client.checkpoint import Checkpoint, save
two = Checkpoint(2, {{"w": torch.full((200_000,), 2.0)}}, {{}}, {{}}, {{}}, {{}})
die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
{code}
save(Path({str(folder)!r}), two, keep=1)
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env=environment, check=False
    )


LIMIT = f"resource.setrlimit({resource.RLIMIT_FSIZE}, (100_000, 100_000))"


@pytest.mark.parametrize(
    "code",
    ["os.fsync = die", "Path.replace = die", f"{LIMIT}; signal.signal(signal.SIGXFSZ, signal.SIG_DFL)"],
    ids=["before fsync", "before the rename", "in the middle of the data"],
)
def test_a_process_killed_while_writing_leaves_the_last_whole_one(tmp_path: Path, code: str) -> None:
    save(tmp_path, checkpoint(1), keep=1)
    child = run_child(tmp_path, code)
    assert child.returncode in (-signal.SIGKILL, -signal.SIGXFSZ), child.stderr
    assert names(tmp_path) == ["step-00000001.pt", "step-00000002.partial"]
    found = latest(tmp_path)
    assert found is not None and found.step == 1
    # The next save clears what was left behind.
    save(tmp_path, checkpoint(3), keep=1)
    assert names(tmp_path) == ["step-00000003.pt"]


def test_a_full_disk_is_one_clear_error_and_the_last_whole_one_stays(tmp_path: Path) -> None:
    save(tmp_path, checkpoint(1), keep=1)
    child = run_child(tmp_path, LIMIT)
    assert child.returncode == 1
    assert "HacrlFedError: the checkpoint of step 2 cannot be written to" in child.stderr
    assert "make room" in child.stderr
    assert names(tmp_path) == ["step-00000001.pt"]
