"""Seconds and memory of the process that calls, and the machine's own speed."""

import resource
import time
from collections.abc import Callable, Iterable

import psutil
import torch

from step.floors import Machine
from step.turns import Memory, StepCost

_MB = 1e6


class Meter:
    """Measures the steps of this process, on its device: all that was begun is waited for."""

    def __init__(self, device: str) -> None:
        self._on_accelerator = torch.device(device).type == "cuda"
        self._before: float | None = None
        self._started = (0.0, 0.0)

    def start(self) -> None:
        """Begins a step; before the first, notes what is resident already."""
        if self._before is None:
            self._before = psutil.Process().memory_info().rss / _MB
            if self._on_accelerator:
                torch.cuda.reset_peak_memory_stats()
        self._synchronize()
        self._started = time.process_time(), time.perf_counter()

    def stop(self, lengths: Iterable[int]) -> StepCost:
        """Ends a step, whose completions had these lengths."""
        self._synchronize()
        cpu, wall = self._started
        cost = StepCost(time.process_time() - cpu, time.perf_counter() - wall, tuple(lengths))
        if self._on_accelerator:
            torch.cuda.empty_cache()  # the other side shares the card
        return cost

    def memory(self) -> Memory:
        """Of the steps so far."""
        assert self._before is not None, "no step has been measured"
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / _MB  # Linux tells KiB
        return Memory(self._before, peak, torch.cuda.max_memory_allocated() / _MB if self._on_accelerator else None)

    def _synchronize(self) -> None:
        if self._on_accelerator:
            torch.cuda.synchronize()


def measure_machine(device: str, dtype: str) -> Machine:
    """The fastest of a few products of square matrices, and of a few products of a large matrix and a vector."""
    on_accelerator = torch.device(device).type == "cuda"
    side, rows = (8192, 1 << 18) if on_accelerator else (2048, 1 << 13)
    kind: torch.dtype = getattr(torch, dtype)
    square, wide = (
        torch.randn(side, side, device=device, dtype=kind),
        torch.randn(rows, 4096, device=device, dtype=kind),
    )
    vector = torch.randn(4096, device=device, dtype=kind)
    product_s = _fastest_s(lambda: square @ square, on_accelerator)
    read_s = _fastest_s(lambda: wide @ vector, on_accelerator)
    return Machine(2 * side**3 / product_s, wide.numel() * wide.element_size() / read_s)


def _fastest_s(work: Callable[[], object], on_accelerator: bool) -> float:
    seconds = []
    for _ in range(20 if on_accelerator else 3):
        started = time.perf_counter() if on_accelerator else time.process_time()
        work()
        if on_accelerator:
            torch.cuda.synchronize()
        seconds.append((time.perf_counter() if on_accelerator else time.process_time()) - started)
    return min(seconds)
