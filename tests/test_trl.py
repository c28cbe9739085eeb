"""The losses of GSPO and GRPO against those of TRL's own trainer: same model, same batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

from hacrl_fed.algorithms.config import HacpoConfig
from hacrl_fed.algorithms.methods import METHODS
from hacrl_fed.config import SiteConfig
from hacrl_fed_client.policy import Policy
from tiny_models import save_tiny

torch.set_num_threads(1)

CONFIG = HacpoConfig(eps_low=0.03, eps_high=0.04)
LEVELS = {"gspo": ("sequence", 0.03, 0.04), "grpo": ("token", 0.2, 0.28)}


def trl_trainer(folder: str, scratch: Path, level: str, low: float, high: float) -> GRPOTrainer:
    def reward(completions: list[str], **_: object) -> list[float]:
        return [0.0] * len(completions)

    arguments = GRPOConfig(
        output_dir=str(scratch),
        importance_sampling_level=level,
        loss_type="grpo",
        epsilon=low,
        epsilon_high=high,
        beta=0.0,
        num_generations=2,
        per_device_train_batch_size=2,
        max_completion_length=8,
        use_cpu=True,
        bf16=False,
        report_to=[],
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "x"}] * 2),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
    )
    trainer.model.eval()
    return trainer


def padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        place = slice(width - len(row), width) if left else slice(0, len(row))
        ids[index, place], mask[index, place] = torch.tensor(row), 1
    return ids, mask


def gradients(model: torch.nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    value = loss()
    value.backward()
    return value.item(), {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}


# Rotary positions only: TRL pads prompts on the left without position ids, which shifts absolute ones.
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("method", ["gspo", "grpo"])
def test_loss_and_gradients_agree_with_trl(tmp_path: Path, method: str, family: str) -> None:
    folder = save_tiny(tmp_path / "model", family)  # type: ignore[arg-type]
    policy = Policy.load(folder, SiteConfig(), seed=0, with_reference=False)
    generator = torch.Generator().manual_seed(3)
    lengths = [(3, 5), (1, 1), (7, 8), (3, 2), (4, 8), (2, 6)]
    draw = [torch.randint(3, 200, (sum(pair),), generator=generator).tolist() for pair in lengths]
    prompts = [ids[:length] for ids, (length, _) in zip(draw, lengths, strict=True)]
    completions = [ids[length:] for ids, (length, _) in zip(draw, lengths, strict=True)]
    advantages = torch.tensor([1.3, -0.7, 0.4, 0.0, -1.1, 0.8])
    sequences = list(zip(prompts, completions, strict=True))
    now, mask = policy.token_logps(sequences)
    # Ratios on both sides of every bound, for a sequence as for a token.
    spread = 0.03 if method == "gspo" else 0.4
    offsets = torch.linspace(-2, 2, 6)[:, None] * (spread if method == "gspo" else 0.1)
    noise = torch.randn(now.shape, generator=generator) * (0.0 if method == "gspo" else spread)
    old = now - offsets - noise

    arguments = {
        "advantages": advantages,
        "is_self": torch.ones(6),
        "omega": torch.ones(6),
        "update_index": 0,
        "config": CONFIG,
    }
    anchor = torch.where(mask, old, 0).sum(-1) / mask.sum(-1) if method == "gspo" else old
    with policy.forward_context(training=True) as model:
        ours, our_gradients = gradients(
            model,
            lambda: METHODS[method].loss(*policy.token_logps(sequences, gradient=True), anchor, **arguments)[0],
        )

    trainer = trl_trainer(folder, tmp_path / "trl", *LEVELS[method])
    prompt_ids, prompt_mask = padded(prompts, left=True)
    completion_ids, completion_mask = padded(completions, left=False)
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": advantages,
        "old_per_token_logps": old,
    }
    theirs, their_gradients = gradients(trainer.model, lambda: trainer._compute_loss(trainer.model, inputs))
    clipped = trainer._metrics["eval"]["clip_ratio/region_mean"]
    assert 0 < clipped[0] < 1  # both branches of the clip are in the batch
    assert ours == pytest.approx(theirs, abs=1e-6)
    assert our_gradients.keys() == their_gradients.keys()
    for name, gradient in their_gradients.items():
        torch.testing.assert_close(our_gradients[name], gradient, atol=1e-5, rtol=0)
    assert max(gradient.abs().max().item() for gradient in their_gradients.values()) > 1e-3
