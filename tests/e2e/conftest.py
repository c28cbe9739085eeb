"""Keys, roster, certificates and tiny models that all end-to-end tests share, and the commands that they start."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from processes import Commands, Federation
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from tiny_models import END, Family, tiny_model, tiny_tokenizer

ANSWERS = ("3", "4", "5", "6", "7", "8")


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
        _teach_digits(model, tokenizers[name])
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


def _teach_digits(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """A second of supervised training to answer each prompt with some digit, so that some rewards are 1 and some 0."""
    prompts = [f"A digit for {number}?" for number in range(12)]
    prompts += [f"State the final answer to the following arithmetic problem: {n} + {12 - n} =" for n in range(12)]
    rows = []
    for index, prompt in enumerate(prompts):
        chat = [{"role": "user", "content": prompt}]
        ids = (
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            if tokenizer.chat_template
            else tokenizer.encode(prompt)
        )
        rows.append((list(ids), [*tokenizer.encode(ANSWERS[index % len(ANSWERS)]), tokenizer.eos_token_id]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    input_ids = torch.tensor([p + a + [0] * (width - len(p) - len(a)) for p, a in rows])
    labels = torch.tensor([[-100] * len(p) + a + [-100] * (width - len(p) - len(a)) for p, a in rows])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(25):
        model(input_ids=input_ids, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
