"""How fast sketches are, against reading memory once and torch's own norm; exits 1 if a target is missed."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpcheck.probes.sketches.sketch import sketch

MEGABYTES = 64
ROUNDS = 15
SMALL = 1000

# For the median: the best round of many would say little about a step.
TARGET_GB_PER_S = 3.0
TARGET_MICROSECONDS = 15.0

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def interleaved(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, tuple[float, float]]:
    """Median and least CPU time of each way in nanoseconds; taking turns lets others disturb all alike."""
    taken: dict[str, list[int]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            start = time.thread_time_ns()
            way()
            taken[name].append(time.thread_time_ns() - start)
    return {name: (statistics.median(times), min(times)) for name, times in taken.items()}


def large(dtype: torch.dtype) -> float:
    """Print the throughput on one large tensor; return the median's in GB/s."""
    tensor = torch.randn(MEGABYTES * 1_000_000 // dtype.itemsize).to(dtype)
    ways: dict[str, Callable[[], object]] = {
        "sketch": lambda: sketch(tensor),
        "int64 sum": lambda: tensor.view(torch.int64).sum(),
        "norm": lambda: torch.linalg.vector_norm(tensor),
    }
    sketch(tensor)
    times = interleaved(ways, ROUNDS)
    speed = {name: MEGABYTES * 1e6 / median for name, (median, _) in times.items()}
    best = MEGABYTES * 1e6 / times["sketch"][1]
    print(
        f"{str(dtype).removeprefix('torch.'):9} {speed['sketch']:5.2f} GB/s (at best {best:.2f}), "
        f"{speed['sketch'] / speed['int64 sum']:.2f} of an int64 sum, "
        f"{speed['sketch'] / speed['norm']:.2f} of vector_norm"
    )
    return speed["sketch"]


def small() -> float:
    """Print the time for one small tensor; return the median's in microseconds."""
    tensor = torch.randn(SMALL)
    ways: dict[str, Callable[[], object]] = {
        "sketch": lambda: sketch(tensor),
        "norm": lambda: torch.linalg.vector_norm(tensor).item(),
    }
    interleaved(ways, 100)
    times = interleaved(ways, 3000)
    print(
        f"{SMALL} elements of float32: {times['sketch'][0] / 1000:.1f} microseconds "
        f"(at best {times['sketch'][1] / 1000:.1f}), "
        f"{times['sketch'][0] / times['norm'][0]:.1f} times vector_norm and its item()"
    )
    return times["sketch"][0] / 1000


def main() -> int:
    torch.set_num_threads(1)
    print(f"{MEGABYTES} MB in one tensor, CPU time of one thread, medians of {ROUNDS}:")
    speeds = {dtype: large(dtype) for dtype in DTYPES}
    missed = []
    if speeds[torch.float32] < TARGET_GB_PER_S:
        missed.append(f"float32 at {TARGET_GB_PER_S} GB/s")
    if small() > TARGET_MICROSECONDS:
        missed.append(f"{SMALL} elements in {TARGET_MICROSECONDS} microseconds")
    if missed:
        print("Target missed: " + "; ".join(missed) + ".", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
