"""One policy on several devices, by torch's fully_shard (FSDP2): what each rank holds, and how the work is divided.

Weights are whole on every device while they are used, so that a rank can forward whatever it likes, as often as it likes;
a rank keeps the optimizer's state of its shards alone. Prompts are divided for generation, micro-batches for scoring and
updates. Gradients are summed once a mini-batch.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import transformers
from peft import PeftModel
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from hacrl_fed.config import AlgorithmConfig, SiteConfig
from hacrl_fed.errors import UserError
from hacrl_fed_client.devices.team import Team, led
from hacrl_fed_client.generation.backends import build_generator
from hacrl_fed_client.generation.base import Completion, Generator
from hacrl_fed_client.generation.hf import HfGenerator
from hacrl_fed_client.logps import PromptAndCompletion
from hacrl_fed_client.policy import Policy
from hacrl_fed_client.update import TrainingRollout, Updater

T = TypeVar("T")

# Numbers of a gradient that are summed at once: a quarter of a GiB in float32.
_BUCKET = 1 << 26


@dataclass(frozen=True, slots=True)
class Plan:
    """What every rank makes its part of the training from: the arguments of `Policy.load` and `Updater`."""

    model: str
    config: SiteConfig
    seed: int
    learner: str
    algorithm: AlgorithmConfig

    @property
    def with_reference(self) -> bool:
        """Whether the policy as it was loaded is needed too."""
        return self.algorithm.kl_coef > 0


@dataclass(frozen=True, slots=True)
class Training:
    """What a site generates with and trains."""

    policy: Policy
    generator: Generator
    updater: Updater


@contextmanager
def training_on_devices(plan: Plan, check: Callable[[], None]) -> Iterator[Training]:
    """The training, on all devices that the site's settings name, until the end of the context.

    ``check`` is called between tokens, and while other devices are waited for. Raises UserError as `Policy.load` does, and
    where the devices are not there.
    """
    config = plan.config
    devices = device_names(config)
    if len(devices) > 1:
        with led(devices, functools.partial(_build, plan), check) as training:
            yield training
        return
    policy = Policy.load(plan.model, config, plan.seed, with_reference=plan.with_reference)
    updater = Updater(policy, plan.learner, plan.algorithm, config.optimizer)
    yield Training(policy, build_generator(policy, config, check), updater)


def device_names(config: SiteConfig) -> tuple[str, ...]:
    """The devices to train on, one or several, by torch's names for them. Raises UserError where there are not as many."""
    kind, _, number = config.device.partition(":")
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    there = torch.cuda.device_count() if kind == "cuda" else None
    with_vllm = config.generation_backend == "vllm"
    wanted = config.devices or (1 if number or with_vllm or not there else there)
    if wanted == 1:
        return (config.device,)
    if with_vllm:
        raise UserError("vLLM generates on one device: set devices to 1, or generation_backend to hf")
    if kind == "cuda" and number:
        raise UserError(f"device {config.device} names one GPU, and devices asks for {wanted}: say device cuda")
    if there is not None and wanted > there:
        raise UserError(f"devices asks for {wanted} GPUs, and there are {there} here: lower it")
    if kind not in ("cuda", "cpu"):
        raise UserError(f"several devices of the kind {config.device} cannot be used: leave devices out")
    return tuple(f"cuda:{rank}" if kind == "cuda" else "cpu" for rank in range(wanted))


def _build(plan: Plan, team: Team) -> Training:
    """A rank's part of the training."""
    if team.rank > 0:  # rank 0's caller has its own way of showing things
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
    config = plan.config
    own: dict[str, object] = {"device": str(team.device)}
    if team.device.type == "cpu" and config.threads is None:
        own["threads"] = max(1, torch.get_num_threads() // team.size)
    policy = ShardedPolicy.load(
        plan.model, config.model_copy(update=own), plan.seed, with_reference=plan.with_reference
    )
    policy.shard(team, plan)
    generator = ShardedGenerator(team, policy, config.generation_rows)
    return Training(policy, generator, ShardedUpdater(team, policy, plan))


class ShardedPolicy(Policy):
    """A rank's part of a policy. Once ``shard`` has been called, it is used on rank 0 as any policy is."""

    _team: Team
    _plan: Plan
    _units: list[FSDPModule]
    _shards: dict[str, torch.nn.Parameter]

    def shard(self, team: Team, plan: Plan) -> None:
        """Divides the trained weights over the ranks of ``team``, which it connects. To be called on every rank.

        Raises UserError for quantised weights, and HacrlFedError where another rank has failed.
        """
        if self._quantised:
            raise UserError(f"the model {self.name} is quantised, and trains on one device only: set devices to 1")
        team.connect()
        self._team = team
        self._plan = plan
        model: Any = self._model.get_base_model() if isinstance(self._model, PeftModel) else self._model
        settings: dict[str, Any] = {
            "mesh": init_device_mesh(self.device.type, (team.size,)),
            "reshard_after_forward": False,
            # Frozen weights have no optimizer state to divide, and need not be gathered anew.
            "ignored_params": {parameter for parameter in model.parameters() if not parameter.requires_grad},
        }
        for module in reversed(list(model.modules())):  # parts before wholes
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, **settings)
        fully_shard(model, **settings)
        # Ranks forward different numbers of times, so nothing may be exchanged on the way.
        model.set_requires_gradient_sync(False)
        model.set_reshard_after_backward(False)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._shards = dict(self._trainable())
        self.unshard()
        team.enter("policy", self)

    def unshard(self) -> None:
        """Makes the weights whole, from every rank's shards. To be called on every rank."""
        for unit in self._units:
            unit.unshard()

    def reshard(self) -> None:
        """Frees the whole weights."""
        for unit in self._units:
            unit.reshard()

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's shards (DTensor) of the parameters that are trained."""
        return list(self._shards.values())

    def micro_batches(self, sequences: Sequence[PromptAndCompletion]) -> list[list[int]]:
        """See `Policy.micro_batches`; those that are this rank's. Each sequence is one rank's."""
        size = self._team.size
        # Small enough that there is one for every rank.
        budget = min(self.micro_batch_tokens, max(1, math.ceil(_tokens(sequences) / size)))
        batches = self._cut(sequences, budget)
        weights = [_tokens([sequences[index] for index in batch]) for batch in batches]
        return [batches[place] for place in balanced(weights, size)[self._team.rank]]

    def completion_logps(self, sequences: Sequence[PromptAndCompletion], check: Callable[[], None]) -> list[Tensor]:
        """See `Policy.completion_logps`."""
        parts = self._team.run("policy", "own_logps", sequences, check=check)
        found = {index: logps_T for part in parts for index, logps_T in part.items()}
        return [found[index] for index in range(len(sequences))]

    def own_logps(self, sequences: Sequence[PromptAndCompletion], check: Callable[[], None]) -> dict[int, Tensor]:
        """Log-probs (T_i,) of the completions that are this rank's, by their index."""
        found = super().completion_logps(sequences, check)
        return {index: logps_T for index, logps_T in enumerate(found) if len(logps_T)}

    def finish_gradient(self, found: T) -> list[T]:
        """See `Policy.finish_gradient`."""
        trained = self._trainable()
        names = {name for name, parameter in trained if parameter.grad is not None}
        # Before the exchange of tensors: only here is a rank's failure noticed on every kind of device.
        handed_in = self._team.gather((found, names), "its part of an update", self._team.check)
        # A parameter that no rank used has no gradient, as on one device.
        used = set().union(*(names for _, names in handed_in))
        bucket: list[tuple[str, Tensor]] = []
        for name, parameter in trained:
            if name in used:
                bucket.append((name, torch.zeros_like(parameter) if parameter.grad is None else parameter.grad))
                parameter.grad = None
            if sum(gradient.numel() for _, gradient in bucket) >= _BUCKET or name == trained[-1][0]:
                self._sum(bucket)
                bucket = []
        return [found for found, _ in handed_in]

    def clip_gradient(self, max_norm: float) -> float:
        """See `Policy.clip_gradient`."""
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        return float(cast(DTensor, norm).full_tensor())

    def load_trainable_state(self, state: Mapping[str, Tensor]) -> None:
        """See `Policy.load_trainable_state`."""
        super().load_trainable_state(state)
        self._team.run("policy", "take_over")

    def take_over(self, check: Callable[[], None]) -> None:
        """Takes the weights that are whole on rank 0. To be called on every rank."""
        weights = self.trainable_state()
        self.reshard()
        with torch.no_grad():
            for name, weight in weights.items():
                self._shards[name].copy_(self.scattered(name, weight))
        self.unshard()

    def scattered(self, name: str, whole: Tensor | None) -> DTensor:
        """A tensor like a parameter, divided as it is: rank 0's ``whole``. To be called on every rank."""
        shard = self._shard(name)
        if whole is None:
            whole = torch.empty(shard.shape)
        return distribute_tensor(whole.to(shard.device, shard.dtype), shard.device_mesh, shard.placements)

    def shard_names(self) -> list[str]:
        """Names of ``parameters``."""
        return list(self._shards)

    def save_pretrained(self, folder: Path) -> None:
        """See `Policy.save_pretrained`."""
        plan = self._plan
        config = plan.config.model_copy(update={"device": "cpu"})
        unsharded = Policy.load(plan.model, config, plan.seed, with_reference=False)
        unsharded.load_trainable_state(self.trainable_state())
        unsharded.save_pretrained(folder)

    def _sum(self, gradients: Sequence[tuple[str, Tensor]]) -> None:
        """Gives shards their part of whole gradients, which are summed over the ranks."""
        if not gradients:
            return
        flat = torch.cat([gradient.flatten() for _, gradient in gradients])
        dist.all_reduce(flat)
        parts = torch.split(flat, [gradient.numel() for _, gradient in gradients])
        for (name, gradient), part in zip(gradients, parts, strict=True):
            shard = self._shard(name)
            # Without a source, each rank takes its part of its own tensor, which is every rank's.
            own = distribute_tensor(part.view_as(gradient), shard.device_mesh, shard.placements, src_data_rank=None)
            shard.grad = own.clone()  # else a view, which would keep all of them in memory

    def _shard(self, name: str) -> DTensor:
        return cast(DTensor, self._shards[name])


def balanced(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Indices of ``weights`` in ``parts`` parts of like sums: the heaviest first, each to the part that has least so far."""
    loads = [0] * parts
    chosen: list[list[int]] = [[] for _ in loads]
    for index in sorted(range(len(weights)), key=lambda i: -weights[i]):
        lightest = loads.index(min(loads))
        loads[lightest] += weights[index]
        chosen[lightest].append(index)
    return chosen


def _tokens(sequences: Sequence[PromptAndCompletion]) -> int:
    """Tokens to forward, each distinct prompt once."""
    prompts = {tuple(prompt) for prompt, _ in sequences}
    return sum(map(len, prompts)) + sum(len(completion) for _, completion in sequences)


class ShardedGenerator:
    """Generates on all devices at once, ``rows`` completions on each. See `Generator`."""

    def __init__(self, team: Team, policy: ShardedPolicy, rows: int) -> None:
        self._team = team
        self._rows = rows
        self._own = HfGenerator(policy, rows, team.check)
        team.enter("generator", self)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        *,
        greedy: bool,
        seeds: Sequence[int],
    ) -> Iterator[list[Completion]]:
        """See `HfGenerator.generate`."""
        at_once = self._team.size * max(1, self._rows // samples)
        for start in range(0, len(prompts), at_once):
            chosen = slice(start, start + at_once)
            arguments = (prompts[chosen], samples, max_new_tokens, greedy, seeds[chosen])
            for part in self._team.run("generator", "own_part", *arguments, check=self._team.check):
                yield from part

    def own_part(
        self,
        prompts: Sequence[Sequence[int]],
        samples: int,
        max_new_tokens: int,
        greedy: bool,
        seeds: Sequence[int],
        check: Callable[[], None],
    ) -> list[list[Completion]]:
        """The completions of the prompts that are this rank's: as many as any other's, or one more or less."""
        rank, size = self._team.rank, self._team.size
        mine = slice(len(prompts) * rank // size, len(prompts) * (rank + 1) // size)
        return list(self._own.generate(prompts[mine], samples, max_new_tokens, greedy=greedy, seeds=seeds[mine]))


class ShardedUpdater(Updater):
    """A rank's part of the updates. It is used on rank 0 as any updater is."""

    def __init__(self, team: Team, policy: ShardedPolicy, plan: Plan) -> None:
        config = plan.config
        super().__init__(policy, plan.learner, plan.algorithm, config.optimizer)
        self._team = team
        self._sharded = policy
        self._loaded: dict[int, dict[str, Any]] = {}
        self.optimizer.register_step_pre_hook(lambda *_: policy.reshard())
        self.optimizer.register_step_post_hook(lambda *_: policy.unshard())
        team.enter("updater", self)

    def step(self, rollouts: Sequence[TrainingRollout], check: Callable[[], None]) -> dict[str, float]:
        """See `Updater.step`. What ``check`` raises ends the other ranks, and with them the policy's further use."""
        # From rank 0's random state, which checkpoints hold.
        seed = int(torch.randint(1 << 31, ()))
        metrics: dict[str, float] = self._team.run("updater", "own_step", list(rollouts), seed, check=check)[0]
        return metrics

    def own_step(self, rollouts: Sequence[TrainingRollout], seed: int, check: Callable[[], None]) -> dict[str, float]:
        """This rank's part of a step."""
        if self._team.rank > 0:
            torch.manual_seed(seed + self._team.rank)  # for LoRA's dropout
        return super().step(rollouts, check)

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `Updater.state`; the same on any number of devices."""
        state: tuple[dict[str, Any], dict[str, Any]] = self._team.run("updater", "gathered_state")[0]
        return state

    def gathered_state(self, check: Callable[[], None]) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """The whole state, on rank 0; None on the others. To be called on every rank."""
        optimizer, scheduler = super().state()
        leads = self._team.rank == 0

        def gathered(value: Any) -> Any:
            if not isinstance(value, DTensor):
                return value
            whole = value.full_tensor()
            return whole.cpu() if leads else None

        states = {
            index: {key: gathered(value) for key, value in values.items()}
            for index, values in optimizer["state"].items()
        }
        return (optimizer | {"state": states}, scheduler) if leads else None

    def load_state(self, optimizer: dict[str, Any], scheduler: dict[str, Any]) -> None:
        """See `Updater.load_state`."""
        self._loaded = optimizer["state"]
        # What is as large as a parameter is scattered, and not sent whole to each rank.
        small = {
            index: {key: value if value.ndim == 0 else None for key, value in values.items()}
            for index, values in self._loaded.items()
        }
        self._team.run("updater", "scatter_state", optimizer | {"state": small}, scheduler)
        self._loaded = {}

    def scatter_state(self, optimizer: dict[str, Any], scheduler: dict[str, Any], check: Callable[[], None]) -> None:
        """Takes a state whose large tensors rank 0 has. To be called on every rank."""
        names = self._sharded.shard_names()
        states = {
            index: {
                key: self._sharded.scattered(names[index], self._loaded.get(index, {}).get(key))
                if value is None
                else value
                for key, value in values.items()
            }
            for index, values in optimizer["state"].items()
        }
        super().load_state(optimizer | {"state": states}, scheduler)
