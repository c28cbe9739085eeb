"""TRL's side: GRPOTrainer as its users call it, with the loss of GSPO and the settings that make it fastest here.

Nothing of it is replaced: a callback of Trainer's waits for the turn before a step and measures it up to its end. Settings
beside those of the method:
- generations and gradient accumulation cover the same rows, so that no old log-probs have to be computed;
- no gradient checkpointing (TRL's default), which computes every forward pass twice;
- on a CPU all rows in one forward and backward pass, on an accelerator `_ROWS` of them, which cards of 40 GB hold;
- no reference model, no dropout, no logging, no progress bar, no checkpoints.
"""

from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from hacrl_fed.algorithms.config import HacpoConfig
from hacrl_fed.config import Optimizer
from step.measuring import Meter
from step.ours import LEARNING_RATE, reward_of
from step.turns import LossBatch
from step.workloads import SAMPLES, Workload

_ROWS = {"cpu": 64, "cuda": 16}


class _Turns(TrainerCallback):
    """Waits for the turn before each optimizer step, generation included, and tells what it cost."""

    def __init__(self, connection: Connection, meter: Meter) -> None:
        self._connection = connection
        self._meter = meter
        self._lengths: list[int] = []

    def reward(self, completions: list[str], completion_ids: list[list[int]], **_: object) -> list[float | None]:
        """A reward function of TRL's."""
        self._lengths = [len(ids) for ids in completion_ids]
        return [reward_of(completion) for completion in completions]

    def on_step_begin(self, *_: object, **__: object) -> None:
        self._connection.recv()
        self._meter.start()

    def on_step_end(self, *_: object, **__: object) -> None:
        self._connection.send(self._meter.stop(self._lengths))


def serve(
    connection: Connection, folder: str, workload: Workload, texts: list[str], steps: int, device: str, dtype: str
) -> None:
    """As ``step.ours.serve``; the loss is that of the batch that it is given."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    meter = Meter(device)
    turns = _Turns(connection, meter)
    trainer = _trainer(turns, folder, workload, texts, steps, device, dtype)
    trainer.train()
    connection.send(meter.memory())
    batch: LossBatch = connection.recv()
    trainer.model.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    connection.send(_loss(trainer, batch))


def _trainer(
    turns: _Turns,
    folder: str,
    workload: Workload,
    texts: list[str],
    steps: int,
    device: str,
    dtype: str,
) -> Any:
    method, optimizer = HacpoConfig(), Optimizer()
    rows = workload.prompts * SAMPLES
    passes = max(1, rows // _ROWS[device])
    config = GRPOConfig(
        output_dir=f"{folder}-trl",
        seed=0,
        # The work.
        max_steps=steps,
        per_device_train_batch_size=rows // passes,
        gradient_accumulation_steps=passes,
        num_generations=SAMPLES,
        max_completion_length=workload.max_new_tokens,
        shuffle_dataset=False,
        # The method.
        importance_sampling_level="sequence",
        loss_type="grpo",
        epsilon=method.eps_low,
        epsilon_high=method.eps_high,
        beta=0.0,
        num_iterations=1,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        adam_beta1=optimizer.betas[0],
        adam_beta2=optimizer.betas[1],
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        # The machine.
        use_cpu=device == "cpu",
        bf16=dtype == "bfloat16",
        gradient_checkpointing=False,
        disable_dropout=True,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
        reward_funcs=turns.reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": texts}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        callbacks=[turns],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def _loss(trainer: Any, batch: LossBatch) -> float:
    trainer.model.eval()
    device = trainer.accelerator.device
    prompt_ids, prompt_mask = _padded(batch.prompts, left=True)
    completion_ids, completion_mask = _padded(batch.completions, left=False)
    old_logps = torch.zeros(completion_mask.shape)
    old_logps[completion_mask.bool()] = torch.tensor([logp for old in batch.old_logps for logp in old])
    inputs = {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(batch.advantages),
        "old_per_token_logps": old_logps,
    }
    with torch.no_grad():
        return float(trainer._compute_loss(trainer.model, {name: each.to(device) for name, each in inputs.items()}))


def _padded(rows: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    side = "left" if left else "right"
    pad = torch.nn.utils.rnn.pad_sequence
    ids = pad([torch.tensor(row) for row in rows], batch_first=True, padding_side=side)
    return ids, pad([torch.ones(len(row), dtype=torch.long) for row in rows], batch_first=True, padding_side=side)
