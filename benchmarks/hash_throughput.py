"""How fast digests are, against reading the memory once and SHA-1 of a copy; exits 1 if a target is missed."""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpcheck.probes.digest import make_digester
from ddpcheck.probes.digest.multilinear import MultilinearDigester

MEGABYTES = 256
TENSORS = 200
ROUNDS = 15
# SHA-1 and the fallback take a second a round or so; their medians settle sooner.
SLOW_ROUNDS = 3
SUM_TARGET = 0.85
SHA1_TARGET = 15.0


def one_tensor() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(MEGABYTES * 2**20 // 4, generator=generator)]


def many_tensors(whole: torch.Tensor) -> list[torch.Tensor]:
    """The same amount in tensors of their own, even in size as int64."""
    size = whole.numel() // TENSORS // 2 * 2
    return [part.clone() for part in whole[: size * TENSORS].split(size)]


def read_once(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.int64).sum()


def sha1_of_copies(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        hashlib.sha1(tensor.clone().numpy()).digest()


def measure(tensors: list[torch.Tensor]) -> dict[str, float]:
    """GB/s by name: medians over rounds in which the contestants take turns, since the machine is shared."""
    digester, fallback = make_digester("cpu"), MultilinearDigester()
    contestants: dict[str, tuple[Callable[[], object], int]] = {
        "digest": (lambda: digester.submit(tensors).result(), ROUNDS),
        "sum": (lambda: read_once(tensors), ROUNDS),
        "fallback": (lambda: fallback.submit(tensors).result(), SLOW_ROUNDS),
        "sha1": (lambda: sha1_of_copies(tensors), SLOW_ROUNDS),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(ROUNDS):
        for name, (run, rounds) in contestants.items():
            if turn < rounds:
                start = time.perf_counter()
                run()
                seconds[name].append(time.perf_counter() - start)
    volume = sum(tensor.nbytes for tensor in tensors) / 1e9
    return {name: volume / statistics.median(times) for name, times in seconds.items()}


def microseconds_per_small_tensor() -> float:
    digester = make_digester("cpu")
    parameters = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(TENSORS)]
    times = []
    for _ in range(200):
        start = time.perf_counter()
        digester.submit(parameters).result()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / TENSORS * 1e6


def row(name: str, speed: float) -> str:
    return f"  {name:<26}{speed:8.2f} GB/s"


def report(title: str, speed: dict[str, float], algorithm: str) -> list[str]:
    """Print one table; return what was missed."""
    to_sum, to_sha1 = speed["digest"] / speed["sum"], speed["digest"] / speed["sha1"]
    print(f"{title}, one thread")
    print(row(algorithm, speed["digest"]))
    print(row("int64 sum", speed["sum"]), f"  digest/sum   {to_sum:6.2f}  target >= {SUM_TARGET}")
    print(row("SHA-1 of a copy", speed["sha1"]), f"  digest/SHA-1 {to_sha1:6.1f}  target >= {SHA1_TARGET:g}")
    share = speed["fallback"] / speed["sum"]
    print(row("multilinear-128 in torch", speed["fallback"]), f"  fallback/sum {share:6.2f}")
    missed = []
    if to_sum < SUM_TARGET:
        missed.append(f"{title}: the digest runs at {to_sum:.2f} of an int64 sum, below {SUM_TARGET}")
    if to_sha1 < SHA1_TARGET:
        missed.append(
            f"{title}: the digest is {to_sha1:.1f} times as fast as SHA-1 of a copy, below {SHA1_TARGET:g}"
        )
    return missed


def main() -> int:
    torch.set_num_threads(1)
    algorithm = make_digester("cpu").algorithm
    whole = one_tensor()
    missed = report(f"{MEGABYTES} MB of float32 in 1 tensor", measure(whole), algorithm)
    parts = many_tensors(whole[0])
    missed += report(f"{MEGABYTES} MB of float32 in {TENSORS} tensors", measure(parts), algorithm)
    print(f"{TENSORS} parameters of 256 bytes: {microseconds_per_small_tensor():.2f} microseconds each")
    if missed:
        print("Target missed: " + "; ".join(missed) + ".", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
