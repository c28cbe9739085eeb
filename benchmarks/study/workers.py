"""Runs the units that are missing in worker processes, and shows how far they are."""

import concurrent.futures
import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import pebble
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from hacrl_fed.errors import HacrlFedError
from study.units import Training, WarmStart, by_cost, cost, digest, is_done, model_folder, store_result

_UNIT_S = 3600.0  # a unit takes minutes, on a busy machine too
# One thread of arithmetic a process: models of this size gain nothing from more, and spinning threads slow others down.
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


def run_missing(units: Iterable[Training], out: Path, workers: int, console: Console) -> int:
    """Runs the units that have no result yet, after the warm starts that they need. Returns how many units were run.

    Raises HacrlFedError for a unit that fails; results that are there are kept, in this case and when it is interrupted.
    """
    missing = list({digest(unit): unit for unit in units if not is_done(out, unit)}.values())
    needed = {digest(start): start for unit in missing for start in unit.warm_starts.values()}
    warm_starts = [start for start in needed.values() if not is_done(out, start)]
    if not missing:
        return 0
    os.environ.update(_ENVIRONMENT)
    stages: list[Sequence[WarmStart | Training]] = [by_cost(warm_starts), by_cost(missing)]
    pool = pebble.ProcessPool(max_workers=workers, initializer=_prepare, context=multiprocessing.get_context("spawn"))
    total = len(warm_starts) + len(missing)
    try:
        with _Display(console, total, sum(cost(unit) for stage in stages for unit in stage)) as display:
            for stage in stages:
                _run_stage(pool, stage, out, display)
        pool.close()  # type: ignore[no-untyped-call]
    finally:
        pool.stop()  # type: ignore[no-untyped-call]
        pool.join()
    return total


def _run_stage(
    pool: "pebble.ProcessPool", units: Sequence[WarmStart | Training], out: Path, display: "_Display"
) -> None:
    futures: dict[concurrent.futures.Future[None], WarmStart | Training] = {
        pool.schedule(run_unit, args=(unit, out), timeout=_UNIT_S): unit for unit in units
    }
    for future in concurrent.futures.as_completed(futures):
        unit = futures[future]
        error = future.exception()
        if error is not None:
            raise HacrlFedError(f"unit {unit.title} failed: {type(error).__name__}: {error}") from error
        display.done(unit)


def run_unit(unit: WarmStart | Training, out: Path) -> None:
    """Runs one unit and stores what it gives. The model folders of a training must be there."""
    # Imported here: the process that only distributes the work needs no torch.
    if isinstance(unit, WarmStart):
        from study.agents import make_agent

        folder = model_folder(out, unit)
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_agent(unit.spec, unit.seed, folder)
    else:
        from study.federation import train

        models = {name: model_folder(out, start) for name, start in unit.warm_starts.items()}
        store_result(out, unit, train(unit, models))


def _prepare() -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()


class _Display:
    """A bar on a terminal; elsewhere a line for each unit."""

    def __init__(self, console: Console, total: int, cost_total: float) -> None:
        self._console = console
        self._total = total
        self._count = 0
        self._cost_total = cost_total
        self._cost_done = 0.0
        self._started = time.monotonic()
        columns = (BarColumn(), TextColumn("{task.description}"))
        self._progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
        self._bar = self._progress.add_task(f"0 of {total} units done", total=cost_total)

    def __enter__(self) -> "_Display":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def done(self, unit: WarmStart | Training) -> None:
        self._count += 1
        self._cost_done += cost(unit)
        elapsed_s = time.monotonic() - self._started
        left_s = elapsed_s * (self._cost_total / self._cost_done - 1)
        text = f"{self._count} of {self._total} units done, about {left_s / 60:.0f} min left"
        self._progress.update(self._bar, completed=self._cost_done, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{text} ({unit.title})", soft_wrap=True)
