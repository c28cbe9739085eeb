import random
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacrl_fed.config import RunConfig, SimulationConfig, SiteConfig, load, parse
from hacrl_fed.tasks import digit_maps
from hacrl_fed_client import demo_models
from hacrl_fed_client.demo_models import make_demo_model

CONFIGS = Path(__file__).parents[1] / "configs"
TASK = digit_maps.load()


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_models, "_STEPS", 3)


def sampled_accuracy(folder: Path, maps: str, count: int) -> float:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompts = [prompt for prompt in TASK.held_out if prompt.text[0] in maps and len(prompt.text) == 7][:count]
    inputs = tokenizer([prompt.text for prompt in prompts], return_tensors="pt")
    torch.manual_seed(0)
    ids = model.generate(**inputs, do_sample=True, top_k=0, max_new_tokens=36)
    texts = tokenizer.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    rewards = [TASK.verifier.verify(prompt, text).reward for prompt, text in zip(prompts, texts, strict=True)]
    return sum(reward for reward in rewards if reward is not None) / len(rewards)


def test_agent_b_knows_its_maps_and_hardly_the_others(tmp_path: Path) -> None:
    make_demo_model("b", seed=0, out=tmp_path)
    assert 0.1 < sampled_accuracy(tmp_path, "def", 150) < 0.5
    assert sampled_accuracy(tmp_path, "abc", 150) < 0.1


@pytest.mark.parametrize("name, kind", [("a", "Qwen3ForCausalLM"), ("b", "LlamaForCausalLM")])
@pytest.mark.usefixtures("few_steps")
def test_a_demo_model_is_made_by_its_seed_and_loads(name: Any, kind: str, tmp_path: Path) -> None:
    weights = []
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        make_demo_model(name, seed, tmp_path / folder)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder)
        weights.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    assert torch.rand(()) == expected, "the caller's random state must stay"
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    assert type(model).__name__ == kind
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "one")
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id != tokenizer.pad_token_id
    assert tokenizer.chat_template is None


def test_tokenizers_differ_and_keep_the_text() -> None:
    ours, theirs = (demo_models._tokenizer(name) for name in ("a", "b"))
    longest = {ours: 0, theirs: 0}
    for prompt in TASK.train:
        for tokenizer in longest:
            ids = tokenizer(prompt.text + prompt.answer)["input_ids"]
            assert tokenizer.decode(ids) == prompt.text + prompt.answer
            assert tokenizer.unk_token_id not in ids
            longest[tokenizer] = max(longest[tokenizer], len(tokenizer(prompt.answer)["input_ids"]))
    assert longest[ours] == 33
    assert longest[theirs] < 24


@given(st.text("0123456789 abcdefxyz:>#", max_size=60), st.sampled_from(["a", "b"]))
def test_tokenizers_keep_any_text_of_their_characters(text: str, name: Any) -> None:
    tokenizer = demo_models._tokenizer(name)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_demonstrations_are_of_the_stated_kinds_and_never_of_held_out_prompts() -> None:
    tokenizer = demo_models._tokenizer("a")
    batches = demo_models._batches(tokenizer, "abc", random.Random(0))
    answers = {prompt.text: prompt.answer for prompt in TASK.train}
    known, unfamiliar = [], []
    for _ in range(120):
        ids, labels = next(batches)
        for row, targets in zip(ids, labels, strict=True):
            question = tokenizer.decode(row[: (targets != -100).nonzero()[0]])
            completion = tokenizer.decode(targets[targets != -100])
            assert completion.endswith("<eos>")
            assert question in answers, "not a training prompt"
            right = completion.removesuffix("<eos>") == answers[question]
            (known if question[0] in "abc" else unfamiliar).append(right)
    assert 0.3 < sum(known) / len(known) < 0.4
    assert 0 < sum(unfamiliar) / len(unfamiliar) < 0.02


def test_configurations_load() -> None:
    demo = load(SimulationConfig, CONFIGS / "demo.yaml")
    run = load(RunConfig, CONFIGS / "two-sites.yaml")
    site = load(SiteConfig, CONFIGS / "site-demo.yaml")
    assert [agent.demo_model for agent in demo.agents.values()] == ["a", "b"]
    assert demo.compare == ("gspo_x2",)
    assert all(agent.site.optimizer == site.optimizer for agent in demo.agents.values())
    assert run.algorithm == demo.run.algorithm
    assert run.task.id == demo.run.task.id == TASK.id
    assert run.algorithm.hacpo.cross_band == "signed"


def test_commented_out_settings_of_the_site_configuration_are_valid() -> None:
    lines = (CONFIGS / "site-demo.yaml").read_text(encoding="utf-8").splitlines()
    settings = [line.removeprefix("# ") for line in lines[1:]]
    site = parse(SiteConfig, yaml.safe_load("\n".join(settings)), source="site-demo.yaml")
    assert set(site.tasks) == {"gsm8k", "sums"}
    assert site.lora is not None
