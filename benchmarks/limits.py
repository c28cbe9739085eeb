"""How near a site's step comes to what the machine could do, what federation costs, and HACPO beside gspo_x2.

    python benchmarks/limits.py --model 15m --json

CPU time of one thread, and means over the steps after a first one. Floors count needed tokens only (step/floors.py) at the
rate of a product of 2048 x 2048 matrices and of reading a large matrix, measured at the start. The federation is real: two
agents of different tokenizers and a coordinator, in processes of their own, over TLS on 127.0.0.1. Both compute before either
exchanges, so that none waits for a slower peer; exchanging is to sign, publish, store, verify, admit, retokenise, and wait
for the manifest.
"""

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from hacrl_fed.config import MethodName
from step.commands import named, run_app
from step.federated import FederatedStep, federated_steps
from step.floors import Machine, generation_s, update_flop
from step.turns import Side, StepCost
from step.workloads import MODELS, WORKLOADS, ModelSize, Workload

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DEADLINE_S = 1800.0


@app.command(help=__doc__)
def limits(
    model: Annotated[str, typer.Option(help=f"A random Qwen3: one of {', '.join(MODELS)}.")] = "15m",
    workload: Annotated[str, typer.Option(help=f"One of {', '.join(WORKLOADS)}.")] = "long-prompt",
    steps: Annotated[int, typer.Option(min=1, help="Steps that are measured, after a first one.")] = 2,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    result = measure(named(MODELS, model, "model"), named(WORKLOADS, workload, "workload"), steps)
    if as_json:
        print(json.dumps(result))
    else:
        Console().print(_table(f"{workload}, {model}, CPU", result))


def measure(size: ModelSize, workload: Workload, steps: int) -> dict[str, float]:
    """What the command prints. Raises HacrlFedError where a process fails."""
    machine, alone = _alone(size, workload, steps, "gspo")
    _, double = _alone(size, workload, steps, "gspo_x2")
    shared = federated_steps(size, workload, steps)
    generated, rolled_out, learned = (list(costs) for costs in zip(*alone, strict=True))
    prompts = (workload.prompts, workload.prompt_tokens)
    generation_floor = statistics.fmean(generation_s(size, *prompts, cost.lengths, machine) for cost in generated)
    update_floor = statistics.fmean(update_flop(size, *prompts, cost.lengths) for cost in learned) / machine.flops
    generation, roll_out, update = _cpu_s(generated), _cpu_s(rolled_out), _cpu_s(learned)
    x2 = statistics.fmean(rolled.cpu_s + learn.cpu_s for _, rolled, learn in double)
    exchange = _cpu_s([step.exchange for step in shared])
    hacpo = _cpu_s([step.roll_out for step in shared]) + exchange + _cpu_s([step.learn for step in shared])
    return {
        "gemm_gflops": machine.flops / 1e9,
        "read_gb_per_s": machine.bytes_per_s / 1e9,
        "generation_s": generation,
        "generation_floor_share": generation_floor / generation,
        "update_s": update,
        "update_floor_share": update_floor / update,
        "verify_and_score_s": roll_out - generation,
        "hacpo_step_s": hacpo,
        "exchange_s": exchange,
        "federation_share": exchange / hacpo,
        "exchange_wall_s": statistics.fmean(step.exchange.wall_s for step in shared),
        "federation_wall_share": _wall_share(shared),
        "gspo_x2_step_s": x2,
        "hacpo_over_gspo_x2": hacpo / x2,
    }


def _alone(
    size: ModelSize, workload: Workload, steps: int, method: MethodName
) -> tuple[Machine, list[tuple[StepCost, StepCost, StepCost]]]:
    """The machine, and what generating, rolling out and learning cost in steps after a first one."""
    with TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        with Side(
            "making a model", "step.models", size, workload, folder, "cpu", "float32", deadline_s=_DEADLINE_S
        ) as maker:
            maker.answer(bool)
        texts = workload.texts(steps + 1, seed=0)
        arguments = (str(folder), workload, texts, steps + 1, method)
        with Side(f"{method}'s steps", "step.pieces", *arguments, deadline_s=_DEADLINE_S) as site:
            machine = site.answer(Machine)
            costs = [(site.answer(StepCost), site.answer(StepCost), site.answer(StepCost)) for _ in range(steps + 1)]
    return machine, costs[1:]


def _cpu_s(costs: Sequence[StepCost]) -> float:
    return statistics.fmean(cost.cpu_s for cost in costs)


def _wall_share(steps: list[FederatedStep]) -> float:
    exchange = sum(step.exchange.wall_s for step in steps)
    return exchange / (exchange + sum(step.roll_out.wall_s + step.learn.wall_s for step in steps))


_ROWS = {
    "gemm_gflops": ("matrix product, GFLOP/s", "{:.1f}"),
    "read_gb_per_s": ("reading memory, GB/s", "{:.1f}"),
    "generation_s": ("generation, s", "{:.2f}"),
    "generation_floor_share": ("its floor's share", "{:.0%}"),
    "update_s": ("update, s", "{:.2f}"),
    "update_floor_share": ("its floor's share", "{:.0%}"),
    "verify_and_score_s": ("verifying and scoring, s", "{:.2f}"),
    "hacpo_step_s": ("an agent's HACPO step, s", "{:.2f}"),
    "exchange_s": ("exchanging in it, s", "{:.3f}"),
    "federation_share": ("exchanging, share of CPU time", "{:.1%}"),
    "federation_wall_share": ("exchanging, share of the clock's", "{:.1%}"),
    "gspo_x2_step_s": ("a gspo_x2 step, s", "{:.2f}"),
    "hacpo_over_gspo_x2": ("HACPO over gspo_x2", "{:.2f}"),
}


def _table(title: str, result: dict[str, float]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_column("", no_wrap=True)
    table.add_column("", justify="right", no_wrap=True)
    for key, (name, form) in _ROWS.items():
        table.add_row(name, form.format(result[key]))
    return table


def main() -> None:
    """Runs the command."""
    run_app(app)


if __name__ == "__main__":
    main()
