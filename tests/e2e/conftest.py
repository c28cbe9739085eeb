"""Keys, roster, certificates and tiny models that all end-to-end tests share, and the commands that they start."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import Commands, Federation

from tiny_models import ANSWERS, END, Family, teach_digits, tiny_model, tiny_tokenizer


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """Starts commands; none outlives the module's tests."""
    starter = Commands(tmp_path_factory.mktemp("logs"))
    yield starter
    starter.close()


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """What the commands keys, roster and certs made for the agents a and b, and a model for each."""
    folder = tmp_path_factory.mktemp("federation")
    starter = Commands(folder / "logs")
    keys = {name: starter.start("keys", "new", "--out", folder / f"{name}.key") for name in ("coordinator", "a", "b")}
    certs = starter.start("certs", "--host", "127.0.0.1", "--out", folder / "tls")
    lines = {name: command.succeed().stdout.strip() for name, command in keys.items()}
    agents = [argument for name in ("a", "b") for argument in ("--agent", f"{name}={lines[name]}")]
    starter.start(
        *("roster", "new", "--run", "test", "--coordinator", lines["coordinator"], *agents),
        *("--out", folder / "roster.yaml"),
    ).succeed()
    certs.succeed()
    torch.set_num_threads(1)
    models = {"a": folder / "model-a", "b": folder / "model-b"}
    tokenizers = {"a": tiny_tokenizer(), "b": tiny_tokenizer(merges=[("1", "0"), ("o", "n")], chat=False, pad=END)}
    families: dict[str, tuple[Family, int]] = {"a": ("qwen3", 1), "b": ("llama", 2)}
    for name, (family, seed) in families.items():
        model = tiny_model(family, tokenizers[name], seed)
        teach_digits(model, tokenizers[name])
        model.save_pretrained(models[name])
        tokenizers[name].save_pretrained(models[name])
    yield Federation(folder, models)
    starter.close()


@pytest.fixture(scope="session")
def site_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A site.yaml with a task of each kind, and the task file beside it."""
    folder = tmp_path_factory.mktemp("site")
    prompts = [{"question": f"A digit for {number}?", "gold": ANSWERS[number % 2]} for number in range(60)]
    (folder / "digits.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    site = {
        "threads": 1,
        "optimizer": {"lr": 1e-3, "warmup_steps": 1},
        "generation_rows": 8,
        "checkpoint_every": 2,
        "tasks": {
            "digits": {
                "kind": "jsonl",
                "path": "digits.jsonl",
                "prompt_field": "question",
                "answer_field": "gold",
                "verifier": "exact",
                "extract": "last_number",
                "held_out": 0.2,
            },
            "sums": {
                "kind": "reasoning_gym",
                "dataset": "chain_sum",
                "size": 60,
                "extract": "last_number",
                "params": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1},
            },
        },
    }
    path = folder / "site.yaml"
    path.write_text(json.dumps(site))  # JSON is YAML
    return path
