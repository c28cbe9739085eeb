"""The study's units of work: what each is, where its result lies, and what a regime's runs consist of.

A sharing run trains all agents of a regime. A lone run trains one agent, which depends on no peer, so that all regimes
in which the agent stands with the same settings share it. A warm start makes an agent's model folder.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from hacrl_fed.config import AlgorithmConfig, Optimizer
from study.regimes import AgentSpec, Regime, Seat, TaskName
from study.variants import Variant

ALONE = "alone"  # the seat of a lone run


@dataclass(frozen=True, slots=True)
class Plan:
    """How long runs are, and how they are measured.

    Attributes:
        evaluate_every: steps between the points of a curve.
        curve_prompts: held-out prompts of a point.
        final_prompts: held-out prompts of the last evaluation, the curve's first among them.
        first_prompt: of the held-out ones, so that rates are tuned on others than the study's.
    """

    steps: int = 20
    evaluate_every: int = 5
    curve_prompts: int = 120
    final_prompts: int = 300
    first_prompt: int = 0
    prompts_per_step: int = 16
    group_size: int = 8


@dataclass(frozen=True, slots=True)
class WarmStart:
    """An agent's model, made from a seed."""

    spec: AgentSpec
    seed: int

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def title(self) -> str:
        return f"warm-start-{self.spec.label}-s{self.seed}"


@dataclass(frozen=True, slots=True)
class Training:
    """A training run of some agents; ``reported`` names the seats that are measured."""

    seats: tuple[Seat, ...]
    reported: tuple[str, ...]
    task: TaskName
    variant: Variant
    lr: float
    mini_batches: int
    seed: int
    plan: Plan

    @property
    def settings(self) -> dict[str, Any]:
        """All that the result depends on, as plain JSON; names for people are left out."""
        settings = asdict(self)
        del settings["variant"]
        return settings | {
            "algorithm": self.algorithm().model_dump(mode="json"),
            "optimizer": self.optimizer.model_dump(mode="json"),
        }

    @property
    def optimizer(self) -> Optimizer:
        return Optimizer(lr=self.lr, betas=(0.9, 0.99), warmup_steps=10, max_grad_norm=1.0)

    @property
    def title(self) -> str:
        return f"{self.variant.name}-{'+'.join(seat.spec.label for seat in self.seats)}-s{self.seed}"

    @property
    def rollouts_factor(self) -> int:
        """Own rollouts of a prompt, as a multiple of ``plan.group_size``. (The table of methods would import torch.)"""
        return 2 if self.variant.method == "gspo_x2" else 1

    @property
    def warm_starts(self) -> dict[str, WarmStart]:
        """Of each seat, by its name."""
        return {seat.name: WarmStart(seat.spec, self.seed) for seat in self.seats}

    def algorithm(self) -> AlgorithmConfig:
        """Raises UserError where this version knows no such method or setting."""
        return self.variant.algorithm(self.plan.prompts_per_step // self.mini_batches)


def trainings(regime: Regime, variant: Variant, lr: float, seed: int, plan: Plan) -> dict[str, Training]:
    """What has to be trained for a variant in a regime with a seed: for each reported seat, the run it is reported from.

    ``lr`` is the variant's tuned learning rate.
    """
    common = (regime.task, variant, lr * regime.lr_factor, regime.mini_batches, seed, plan)
    if variant.shares:
        together = Training(regime.seats, regime.reported, *common)
        return dict.fromkeys(regime.reported, together)
    lone = {
        seat.name: Seat(ALONE, seat.spec, joins_at=seat.joins_at)
        for seat in regime.seats
        if seat.name in regime.reported
    }
    return {name: Training((seat,), (ALONE,), *common) for name, seat in lone.items()}


def digest(unit: WarmStart | Training) -> str:
    """SHA-256 of the unit's settings in canonical JSON."""
    return sha256(json.dumps(unit.settings, sort_keys=True, separators=(",", ":")).encode("ascii")).hexdigest()


def model_folder(out: Path, unit: WarmStart) -> Path:
    """A folder that is there is whole: it was renamed into its place."""
    return out / "models" / f"{unit.title}-{digest(unit)[:12]}"


def result_file(out: Path, unit: Training) -> Path:
    return out / "units" / f"{unit.title}-{digest(unit)[:12]}.json"


def load_result(out: Path, unit: Training) -> dict[str, Any] | None:
    """The result of a unit that was run with the same settings, else None."""
    try:
        stored = json.loads(result_file(out, unit).read_text(encoding="utf-8"))
    except (FileNotFoundError, json.JSONDecodeError):  # not run, or cut off as the machine went down: run it again
        return None
    return dict(stored["result"]) if stored["settings"] == json.loads(json.dumps(unit.settings)) else None


def store_result(out: Path, unit: Training, result: dict[str, Any]) -> None:
    """Written beside and renamed."""
    write_json(result_file(out, unit), {"settings": unit.settings, "result": result})


def write_json(path: Path, data: object) -> None:
    """Writes beside and renames, so that a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(path.name + ".new")
    beside.write_text(json.dumps(data, indent=1), encoding="utf-8")
    os.replace(beside, path)


def is_done(out: Path, unit: WarmStart | Training) -> bool:
    if isinstance(unit, WarmStart):
        return model_folder(out, unit).is_dir()
    return load_result(out, unit) is not None


def cost(unit: WarmStart | Training) -> float:
    """About how many CPU seconds a unit takes, to order units and to estimate what is left."""
    if isinstance(unit, WarmStart):
        return 0.016 * unit.spec.warm_start_steps
    plan, doubled = unit.plan, unit.rollouts_factor == 2
    sources = 2 if doubled else len(unit.seats)
    steps_s = sum(
        plan.steps * (1 - seat.joins_at) * ((0.25 if doubled else 0.15) + seat.learns * 0.085 * sources)
        for seat in unit.seats
    )
    return steps_s + len(unit.reported) * (1 + 0.35 * plan.steps / plan.evaluate_every)


def by_cost(units: Sequence[WarmStart | Training]) -> list[WarmStart | Training]:
    """Dearest first, so that no long unit is left for the end."""
    return sorted(units, key=cost, reverse=True)
