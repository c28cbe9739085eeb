"""The policy: loading, prompts, log-probs, reference, saving."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    ByT5Tokenizer,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    LlamaForCausalLM,
    TorchAoConfig,
)

from hacrl_fed.config import Lora, SiteConfig
from hacrl_fed.errors import HacrlFedError, UserError
from hacrl_fed_client import recompute
from hacrl_fed_client.policy import Policy
from limited import files_of_at_most
from tiny_models import CHAT_TEMPLATE, END, Family, full_logps, perturb, save_tiny, tiny_model, tiny_tokenizer

torch.set_num_threads(1)
FAMILIES: list[Family] = ["qwen3", "llama", "mistral", "gemma", "gpt2"]
SEQUENCES = [([5, 6, 7], [8, 9]), ([1], [2]), ([3, 4, 5, 6, 7, 8], [9, 10, 11, 12]), ([2, 2], [2, 2, 2])]


def load(folder: str, *, with_reference: bool = False, **settings: object) -> Policy:
    return Policy.load(folder, SiteConfig.model_validate(settings), seed=0, with_reference=with_reference)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_one_sequence_at_a_time(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path, family)
    policy = load(folder)
    logps, mask = policy.token_logps(SEQUENCES)
    assert logps.dtype == torch.float32 and not logps.requires_grad
    assert mask.sum(-1).tolist() == [2, 1, 4, 3]
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for row, keep, (prompt, completion) in zip(logps, mask, SEQUENCES, strict=True):
            torch.testing.assert_close(row[keep].double(), full_logps(model, prompt, completion), atol=1e-5, rtol=0)


def test_the_token_id_under_the_padding_does_not_matter(tmp_path: Path) -> None:
    # Id 0 pads; here it is a token of both prompt and completion as well.
    policy = load(save_tiny(tmp_path))
    sequences = [([0, 5], [0, 0]), ([1, 2, 3, 4], [0, 6, 0, 0, 0])]
    together, mask = policy.token_logps(sequences)
    assert mask.sum(-1).tolist() == [2, 5]
    for row, (prompt, completion) in zip(together, sequences, strict=True):
        alone, _ = policy.token_logps([(prompt, completion)])
        torch.testing.assert_close(row[: len(completion)], alone[0], atol=1e-6, rtol=0)


def test_score_sums_log_probs_whatever_the_micro_batches(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path))
    calls: list[None] = []
    policy.micro_batch_tokens = 10_000
    whole = policy.score(SEQUENCES, lambda: calls.append(None))
    assert len(calls) == 1
    policy.micro_batch_tokens = 1
    cut = policy.score(SEQUENCES, lambda: calls.append(None))
    assert len(calls) == 1 + len(SEQUENCES)
    assert cut == pytest.approx(whole, abs=1e-5)
    logps, _ = policy.token_logps(SEQUENCES)
    assert whole == pytest.approx(logps.sum(-1).tolist(), abs=1e-5)


def test_a_prompt_is_rendered_by_the_chat_template(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path / "chat"))
    rendered = policy.tokenizer.decode(policy.render_prompt("add 1 and 2"))
    assert rendered == f"<|im_start|>user\nadd 1 and 2{END}\n<|im_start|>assistant\n"
    plain = load(save_tiny(tmp_path / "plain", tokenizer=tiny_tokenizer(chat=False)))
    assert plain.tokenizer.decode(plain.render_prompt("add 1 and 2")) == "add 1 and 2"
    with pytest.raises(UserError, match="has no token"):
        plain.render_prompt("")


@pytest.mark.parametrize("pad", [END, None])
def test_pad_may_equal_eos_or_be_missing(tmp_path: Path, pad: str | None) -> None:
    policy = load(save_tiny(tmp_path, tokenizer=tiny_tokenizer(pad=pad)))
    eos = policy.eos_ids[0]
    logps, mask = policy.token_logps([([5, eos, 6], [7, eos]), ([5], [eos])])
    assert mask.tolist() == [[True, True], [True, False]]
    assert (logps[mask] < 0).all()


def test_ending_ids_are_the_union_of_all_three_sources(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"eos_token_id": 7}))
    GenerationConfig(eos_token_id=[11, 7]).save_pretrained(tmp_path)
    policy = load(folder)
    assert policy.eos_ids == (policy.tokenizer.eos_token_id, 7, 11)
    assert policy.eos_ids[0] == policy.tokenizer.convert_tokens_to_ids(END)


@pytest.mark.parametrize("chat", [True, False])
def test_a_model_without_any_ending_id_trains_and_says_so_once(
    tmp_path: Path, chat: bool, caplog: pytest.LogCaptureFixture
) -> None:
    policy = load(save_tiny(tmp_path / "first", tokenizer=tiny_tokenizer(eos=None, chat=chat)))
    assert policy.eos_ids == ()
    [warning] = caplog.messages
    assert "can only end at max_new_tokens" in warning and "eos_token" in warning
    assert policy.render_prompt("the 12")
    policy.save_pretrained(tmp_path / "saved")
    assert GenerationConfig.from_pretrained(tmp_path / "saved").eos_token_id is None
    again = load(str(tmp_path / "saved"))
    assert again.eos_ids == () and again.tokenizer_digest == policy.tokenizer_digest


def test_a_tokenizer_written_in_python_trains(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path / "first", "llama", tokenizer=ByT5Tokenizer()))
    assert policy.eos_ids == (1,)
    # Its encode() ends every text, which a prompt must not.
    assert policy.render_prompt("ab") == [100, 101]
    policy.save_pretrained(tmp_path / "saved")
    again = load(str(tmp_path / "saved"))
    assert again.tokenizer_digest == policy.tokenizer_digest and again.eos_ids == policy.eos_ids
    assert isinstance(AutoTokenizer.from_pretrained(tmp_path / "saved"), ByT5Tokenizer)
    policy.tokenizer.chat_template = CHAT_TEMPLATE
    assert policy.tokenizer.decode(policy.render_prompt("ab")).startswith("<|im_start|>user\nab")


@pytest.fixture(params=["torchao", "bitsandbytes_8bit", "bitsandbytes_4bit"])
def quantised(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder with a quantised tiny model, by a library that runs on CPUs, where it is installed."""
    pytest.importorskip(request.param.partition("_")[0])
    if request.param == "torchao":
        from torchao.quantization import Int8WeightOnlyConfig

        how: TorchAoConfig | BitsAndBytesConfig = TorchAoConfig(Int8WeightOnlyConfig())
    else:
        bits = request.param.partition("_")[2]
        how = BitsAndBytesConfig(**{f"load_in_{bits}": True}, bnb_4bit_compute_dtype=torch.float32)
    tokenizer = tiny_tokenizer()
    # Four bits are packed in blocks of 64 weights.
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    original = tmp_path / "original"
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, initializer_range=0.1, **shape)
    LlamaForCausalLM(config).save_pretrained(original)
    model = AutoModelForCausalLM.from_pretrained(original, quantization_config=how, device_map="cpu")
    model.save_pretrained(tmp_path / "quantised")
    tokenizer.save_pretrained(tmp_path / "quantised")
    return str(tmp_path / "quantised")


def gradients(policy: Policy) -> list[torch.Tensor]:
    for parameter in policy.parameters():
        parameter.grad = None
    logps, mask = policy.token_logps(SEQUENCES, gradient=True)
    (-logps[mask].mean()).backward()
    return [parameter.grad.clone() for parameter in policy.parameters() if parameter.grad is not None]


def test_generation_and_scoring_leave_the_gradient_of_quantised_weights_as_it_was(quantised: str) -> None:
    policy = load(quantised, lora=Lora(r=4))
    perturb(policy)
    before = gradients(policy)
    policy.token_logps(SEQUENCES)
    torch.testing.assert_close(gradients(policy), before)
    with torch.no_grad(), policy.forward_context(training=False) as model:
        model.generate(torch.tensor([[5, 6]]), max_new_tokens=2)
    torch.testing.assert_close(gradients(policy), before)


def test_quantised_weights_train_by_an_adapter_which_is_what_is_saved(quantised: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is quantised, .*: set lora"):
        load(quantised)
    policy = load(quantised, lora=Lora(r=4))
    before, mask = policy.token_logps(SEQUENCES)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)
    for _ in range(3):
        gradients(policy)
        optimizer.step()
    after, _ = policy.token_logps(SEQUENCES)
    assert after[mask].mean() > before[mask].mean() + 0.1
    torch.testing.assert_close(policy.token_logps(SEQUENCES, reference=True)[0], before)
    policy.save_pretrained(tmp_path / "saved")
    assert "adapter" in (tmp_path / "saved" / "README.md").read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    AutoTokenizer.from_pretrained(tmp_path / "saved")
    with torch.no_grad():  # there by kernels that round otherwise
        torch.testing.assert_close(full_logps(model, *SEQUENCES[0]), after[0][mask[0]].double(), atol=0.02, rtol=0)


def test_quantised_weights_that_this_machine_cannot_load_are_told_in_one_sentence(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    quantisation = {"quant_method": "aqlm", "in_group_size": 8}  # its library needs a GPU
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantisation}))
    with pytest.raises(UserError, match=r"does not load: .*it is quantised: mend that, or name the original") as caught:
        load(folder, lora=Lora(r=4))
    assert "\n" not in str(caught.value)


def test_what_does_not_load_is_told_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no model folder"):
        load(str(tmp_path / "missing"))
    with pytest.raises(UserError, match="holds no config"):
        load(str(tmp_path))
    folder = save_tiny(tmp_path / "cut")
    weights = tmp_path / "cut" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match="does not load") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="device 'abacus' cannot be used"):
        load(save_tiny(tmp_path / "whole"), device="abacus")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path, family: Family) -> None:
    folder = save_tiny(tmp_path, family)
    for file in tmp_path.glob("*token*"):
        file.unlink()
    with pytest.raises(UserError, match="tokenizer"):
        load(folder)


def test_a_model_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks 1 weights, model\.layers\.1\.mlp\.up_proj"):
        load(folder)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_the_reference_stays_as_loaded(tmp_path: Path, family: Family, lora: Lora | None) -> None:
    policy = load(save_tiny(tmp_path, family), with_reference=True, lora=lora)
    before, _ = policy.token_logps(SEQUENCES)
    perturb(policy)
    after, _ = policy.token_logps(SEQUENCES, gradient=True)
    reference, _ = policy.token_logps(SEQUENCES, reference=True)
    assert (after - before).abs().max() > 1e-2
    torch.testing.assert_close(reference, before)
    assert after.requires_grad and not reference.requires_grad


def test_lora_trains_its_adapter_only_and_its_seed_counts(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    policy = load(folder, lora=Lora(r=4))
    assert all("lora_" in name for name in policy.trainable_state())
    whole = load(folder)
    assert whole.weight_bytes == sum(4 * tensor.numel() for tensor in whole.trainable_state().values())
    assert policy.weight_bytes == whole.weight_bytes + sum(4 * t.numel() for t in policy.trainable_state().values())
    site = SiteConfig(lora=Lora(r=4))
    state = torch.get_rng_state()
    again = Policy.load(folder, site, seed=0, with_reference=False).trainable_state()
    other = Policy.load(folder, site, seed=1, with_reference=False).trainable_state()
    assert torch.equal(torch.get_rng_state(), state)
    first = policy.trainable_state()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    with pytest.raises(UserError, match="target_modules do not fit"):
        load(folder, lora=Lora(target_modules=("no_such_layer",)))


def test_only_lora_has_dropout_and_only_where_a_gradient_is_taken(tmp_path: Path) -> None:
    model = tiny_model("gpt2", tiny_tokenizer())
    assert isinstance(model.config, GPT2Config) and model.config.attn_pdrop > 0
    folder = save_tiny(tmp_path, "gpt2")

    def differs(policy: Policy, *, gradient: bool) -> bool:
        first, _ = policy.token_logps(SEQUENCES, gradient=gradient)
        return not torch.equal(first, policy.token_logps(SEQUENCES, gradient=gradient)[0])

    assert not differs(load(folder), gradient=True)
    policy = load(folder, lora=Lora(r=4, dropout=0.5))
    perturb(policy)
    assert differs(policy, gradient=True)
    assert not differs(policy, gradient=False)


@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_bfloat16_computes_in_bfloat16_and_trains_in_float32(tmp_path: Path, lora: Lora | None) -> None:
    folder = save_tiny(tmp_path)
    exact, _ = load(folder).token_logps(SEQUENCES)
    policy = load(folder, dtype="bfloat16", lora=lora)
    logps, _ = policy.token_logps(SEQUENCES, gradient=True)
    assert logps.dtype == torch.float32 and not torch.equal(logps, exact)
    torch.testing.assert_close(logps, exact, atol=0.1, rtol=0)
    assert all(parameter.dtype == torch.float32 for parameter in policy.parameters())
    logps.sum().backward()
    assert any(parameter.grad is not None and parameter.grad.abs().max() > 0 for parameter in policy.parameters())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_the_saved_folder_loads_and_scores_alike(tmp_path: Path, family: Family, lora: Lora | None) -> None:
    policy = load(save_tiny(tmp_path / "first", family), lora=lora)
    perturb(policy)
    policy.save_pretrained(tmp_path / "model")
    expected, mask = policy.token_logps(SEQUENCES)
    again = load(str(tmp_path / "model"))
    torch.testing.assert_close(again.token_logps(SEQUENCES)[0], expected, atol=1e-5, rtol=0)
    assert again.tokenizer_digest == policy.tokenizer_digest
    assert again.eos_ids == policy.eos_ids
    assert "hacrl-fed" in (tmp_path / "model" / "README.md").read_text()
    # And without our loader: what a user of the folder does.
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.eos_token == END
    with torch.no_grad():
        torch.testing.assert_close(full_logps(model, *SEQUENCES[0]), expected[0][mask[0]].double(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("lora", [None, Lora(r=4)])
def test_trainable_state_restores_the_policy(tmp_path: Path, lora: Lora | None) -> None:
    folder = save_tiny(tmp_path)
    policy = load(folder, lora=lora)
    perturb(policy)
    other = load(folder, lora=lora)
    other.load_trainable_state(policy.trainable_state())
    torch.testing.assert_close(other.token_logps(SEQUENCES), policy.token_logps(SEQUENCES), rtol=0, atol=0)
    with pytest.raises(UserError, match=re.escape("another model or LoRA setting")):
        load(folder, lora=Lora(r=2)).load_trainable_state(policy.trainable_state())


def test_the_end_of_turn_is_what_the_chat_template_ends_an_answer_with(tmp_path: Path) -> None:
    # As of chat models whose tokenizer's own end-of-sequence token ends documents, not turns.
    folder = save_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    tokenizer.save_pretrained(folder)
    end_of_turn = tokenizer.convert_tokens_to_ids(END)
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    model.generation_config = GenerationConfig(eos_token_id=[end_of_turn, tokenizer.eos_token_id])
    model.save_pretrained(folder)
    policy = load(folder)
    assert policy.eos_ids[0] == end_of_turn
    assert set(policy.eos_ids) == {end_of_turn, tokenizer.eos_token_id}


def test_a_prompt_does_not_end_in_the_token_that_ends_completions(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path, tokenizer=tiny_tokenizer(chat=False))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = tokenizer.encode("the 12")
    end = (END, tokenizer.eos_token_id)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"$A {END}", special_tokens=[end])
    tokenizer.save_pretrained(folder)
    assert AutoTokenizer.from_pretrained(folder).encode("the 12") == [*plain, tokenizer.eos_token_id]
    assert load(folder).render_prompt("the 12") == plain


def test_a_chat_template_that_fails_is_one_sentence(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('no users here') }}"
    folder = save_tiny(tmp_path, tokenizer=tokenizer)
    with pytest.raises(UserError, match=r"chat template of .* fails: no users here"):
        load(folder)


@pytest.mark.parametrize("template", ["{{ messages + 1 }}", "{{ 1 / 0 }}", "{{ messages[7]['content'] }}", "{% if %}"])
def test_a_chat_template_that_is_wrong_in_itself_is_one_sentence(tmp_path: Path, template: str) -> None:
    (tmp_path / "chat.jinja").write_text(template)
    folder = save_tiny(tmp_path / "model", tokenizer=tiny_tokenizer(chat=False))
    with pytest.raises(UserError, match=r"chat template of .* fails: ") as caught:
        load(folder, chat_template=tmp_path / "chat.jinja")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("chat", [True, False])
def test_a_chat_template_can_be_given(tmp_path: Path, chat: bool) -> None:
    folder = save_tiny(tmp_path / "model", tokenizer=tiny_tokenizer(chat=chat))
    template = "{% for m in messages %}{{ m['content'] }} and <|im_end|>{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    policy = load(folder, chat_template=tmp_path / "chat.jinja")
    assert policy.tokenizer.decode(policy.render_prompt("the 12")) == f"the 12 and {END}"
    # The final model's users prompt it in the same way.
    policy.save_pretrained(tmp_path / "saved")
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").chat_template == template
    with pytest.raises(UserError, match=r"chat template .*none\.jinja cannot be read: .*No such file"):
        load(folder, chat_template=tmp_path / "none.jinja")


def test_without_room_the_model_is_told_not_to_be_written(tmp_path: Path) -> None:
    policy = load(save_tiny(tmp_path / "first"))
    with (
        files_of_at_most(50_000),
        pytest.raises(HacrlFedError, match=r"saved \(.*File too large.*\): make room") as caught,
    ):
        policy.save_pretrained(tmp_path / "saved")
    assert "\n" not in str(caught.value)
    policy.save_pretrained(tmp_path / "saved")
    AutoModelForCausalLM.from_pretrained(tmp_path / "saved")


def test_a_model_without_layers_that_could_be_checkpointed_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    folder = save_tiny(tmp_path)
    monkeypatch.setattr(recompute, "GradientCheckpointingLayer", Policy)
    with pytest.raises(UserError, match="has no layers to checkpoint: set gradient_checkpointing to false"):
        load(folder, gradient_checkpointing=True)


def test_an_adapter_alone_is_refused(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    (Path(folder) / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="holds an adapter only: merge it"):
        load(folder)


def test_a_missing_folder_below_one_that_is_there_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="there is no model folder models/a"):
        load("models/a")


def test_end_tokens_beyond_the_vocabulary_are_dropped(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    end = AutoTokenizer.from_pretrained(folder).eos_token_id
    model.generation_config = GenerationConfig(
        eos_token_id=[2, 50256]
    )  # the latter is the default of a GPT-2 configuration
    model.save_pretrained(folder)
    assert load(folder).eos_ids == (end, 2)


def test_a_chat_template_for_questions_only_will_do(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message['role'] != 'user' %}{{ raise_exception('users only') }}{% endif %}"
        "{{ message['content'] }}{% endfor %}"
    )
    policy = load(save_tiny(tmp_path, tokenizer=tokenizer))
    assert policy.eos_ids[0] == tokenizer.eos_token_id
    assert policy.render_prompt("the 12") == tokenizer.encode("the 12")
