"""Our step beside TRL's GRPOTrainer: same prompts, generations, law of lengths and update (GSPO), in one call.

    python benchmarks/step_vs_trl.py --workload long-prompt --model 1m --json
    benchmarks/gpu_check.sh

Each side runs in a process of its own on one thread; their steps alternate. Seconds are of CPU time a step on a CPU and of
the clock on an accelerator, the mean over the steps after a first one. Memory is the whole process's peak (what it has
imported included); the *_step_mb are what of it lies above what was resident before the first step. The loss
difference is that of both sides' loss on one and the same batch.
"""

import json
import statistics
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from step.commands import named, run_app
from step.floors import Machine, generation_flop, update_flop
from step.turns import LossBatch, Memory, Side, StepCost
from step.workloads import MODELS, SAMPLES, WORKLOADS, ModelSize, Workload

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DTYPES = {"cpu": "float32", "cuda": "bfloat16"}
_DEADLINE_S = 1800.0  # for a step, or for what comes before and after: those of a large model on a CPU take minutes


@app.command(help=__doc__)
def step_vs_trl(
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")],
    model: Annotated[str, typer.Option(help=f"A random Qwen3: one of {', '.join(MODELS)}.")],
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured, after a first one.")] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    result = compare(named(MODELS, model, "model"), named(WORKLOADS, workload, "workload"), device=device, steps=steps)
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(_table(f"{workload}, {model}, {device}", result))


def compare(size: ModelSize, workload: Workload, *, device: str, steps: int) -> dict[str, float]:
    """Runs both sides and returns what the command prints. Raises HacrlFedError where a side fails."""
    dtype = named(_DTYPES, device, "device")
    texts = workload.texts(steps + 1, seed=0)
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with Side(
            "making the model", "step.models", size, workload, folder, device, dtype, deadline_s=_DEADLINE_S
        ) as maker:
            maker.answer(bool)
        arguments = (str(folder), workload, texts, steps + 1, device, dtype)
        with (
            Side("our side", "step.ours", *arguments, deadline_s=_DEADLINE_S) as ours,
            Side("TRL's side", "step.theirs", *arguments, deadline_s=_DEADLINE_S) as theirs,
        ):
            costs: dict[str, list[StepCost]] = {"ours": [], "trl": []}
            sides = [("ours", ours), ("trl", theirs)]
            for step in range(steps + 1):
                # Each is first every other time, so that a machine that speeds up or slows down favours none.
                for name, side in sides if step % 2 else sides[::-1]:
                    side.tell("your turn")
                    costs[name].append(side.answer(StepCost))
            memory = {"ours": ours.answer(Memory), "trl": theirs.answer(Memory)}
            machine = ours.answer(Machine)
            batch = ours.answer(LossBatch)
            theirs.tell(batch)
            difference = abs(ours.answer(float) - theirs.answer(float))
    result: dict[str, float] = {}
    for name in costs:
        measured = costs[name][1:]
        seconds = statistics.fmean(cost.cpu_s if device == "cpu" else cost.wall_s for cost in measured)
        result |= {
            f"{name}_{key}": value for key, value in _of_side(size, workload, measured, seconds, machine).items()
        }
        result |= {f"{name}_{key}": value for key, value in _of_memory(memory[name]).items()}
    for ratio, key, over in (("ratio", "trl_s", "ours_s"), ("rss_ratio", "ours_rss_mb", "trl_rss_mb")):
        result[ratio] = result[key] / result[over]
    return result | {"loss_difference": difference}


def _of_side(
    size: ModelSize, workload: Workload, costs: list[StepCost], seconds: float, machine: Machine
) -> dict[str, float]:
    tokens = statistics.fmean(sum(cost.lengths) for cost in costs)
    flop = statistics.fmean(
        needed(size, workload.prompts, workload.prompt_tokens, cost.lengths)
        for cost in costs
        for needed in (generation_flop, update_flop)
    )
    return {
        "s": seconds,
        "wall_s": statistics.fmean(cost.wall_s for cost in costs),
        "mean_new_tokens": tokens / (workload.prompts * SAMPLES),
        "tokens_per_s": tokens / seconds,
        # Of the arithmetic that is needed: what a side computes beside it does not count.
        "mfu": 2 * flop / seconds / machine.flops,
    }


def _of_memory(memory: Memory) -> dict[str, float]:
    found = {"rss_mb": memory.peak, "step_mb": memory.peak - memory.before}
    return found if memory.device_peak is None else found | {"device_mb": memory.device_peak}


_ROWS = {
    "s": ("s a step", "{:.2f}"),
    "mean_new_tokens": ("mean new tokens", "{:.1f}"),
    "tokens_per_s": ("new tokens a s", "{:,.0f}"),
    "mfu": ("share of the matrix product's FLOP/s", "{:.1%}"),
    "rss_mb": ("peak of the process, MB", "{:,.0f}"),
    "step_mb": ("of it above the first step's start, MB", "{:,.0f}"),
    "device_mb": ("peak on the device, MB", "{:,.0f}"),
}


def _table(title: str, result: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in ("ours", "TRL", "TRL / ours"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, (name, form) in _ROWS.items():
        if f"ours_{key}" in result:
            ours, theirs = result[f"ours_{key}"], result[f"trl_{key}"]
            table.add_row(name, form.format(ours), form.format(theirs), f"{theirs / ours:.2f}")
    table.add_row("difference of losses, same batch", "", "", f"{result['loss_difference']:.1e}")
    return table


def main() -> None:
    """Runs the command; an error of ours is one sentence and its exit code."""
    run_app(app)


if __name__ == "__main__":
    main()
