"""Models of other kinds: one with a tokenizer written in Python, and one that no token ends, learn from each other."""

import json
from pathlib import Path

import pytest
import torch
from processes import Commands, read_json, read_lines, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer

from tiny_models import AnyTokenizer, Family, teach_digits, tiny_model, tiny_tokenizer

NEW_TOKENS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Agent "bytes" has the tokenizer written in Python, agent "endless" names no end-of-sequence token."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("models")
    kinds: dict[str, tuple[Family, AnyTokenizer]] = {
        "bytes": ("llama", ByT5Tokenizer()),
        "endless": ("qwen3", tiny_tokenizer(eos=None, pad=None)),
    }
    for seed, (name, (family, tokenizer)) in enumerate(kinds.items()):
        model = tiny_model(family, tokenizer, seed)
        teach_digits(model, tokenizer)
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    return {name: folder / name for name in kinds}


def test_they_train_and_learn_from_each_other(
    commands: Commands, models: dict[str, Path], site_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "digits.jsonl").write_text((site_file.parent / "digits.jsonl").read_text())
    agents = {name: {"model": str(path), "site": read_json(site_file)} for name, path in models.items()}
    config = tmp_path / "simulation.yaml"
    run = read_json(write_run(tmp_path, max_new_tokens=NEW_TOKENS))
    config.write_text(json.dumps({"run": run, "agents": agents}))
    commands.start("simulate", "--config", config, "--run-dir", tmp_path / "run").succeed()

    summary = read_json(tmp_path / "run" / "summary.json")
    for name, other in (("bytes", "endless"), ("endless", "bytes")):
        folder = tmp_path / "run" / "agents" / name
        agent = summary["agents"][name]
        assert agent["own_rollouts"] == 32 and agent["cross_rollouts"] > 0
        log = " ".join((folder / "client.log").read_text().split())
        assert log.count("names no end-of-sequence token") == (name == "endless")
        learned = [row for path in (folder / "rollouts").iterdir() for row in read_lines(path)]
        assert {row["finish_reason"] for row in learned if row["source"] == "endless"} == {"length"}
        assert any(row["advantage"] != 0 for row in learned if row["source"] == other)
        before = AutoModelForCausalLM.from_pretrained(models[name]).state_dict()
        after = AutoModelForCausalLM.from_pretrained(folder / "model").state_dict()
        assert after.keys() == before.keys()
        assert any(not torch.equal(after[key], before[key]) for key in after)
        tokenizer = AutoTokenizer.from_pretrained(folder / "model")
        assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(models[name]).get_vocab()
