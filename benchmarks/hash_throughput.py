"""How fast digests are, against reading memory once and SHA-1 of a copy; exits 1 if a target is missed."""

from __future__ import annotations

import hashlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddpcheck.probes.digest import make_digester
from ddpcheck.probes.digest.multilinear import MultilinearDigester

MEGABYTES = 256
TENSORS = 200
ROUNDS = 31
# SHA-1 and the fallback take half a second each, so they sit out most rounds.
SLOW_EVERY = 4
SUM_TARGET = 0.85
SHA1_TARGET = 15.0


def one_tensor() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(MEGABYTES * 2**20 // 4, generator=generator)]


def many_tensors(whole: torch.Tensor) -> list[torch.Tensor]:
    """The same amount in tensors of their own, even in size as int64."""
    size = whole.numel() // TENSORS // 2 * 2
    return [part.clone() for part in torch.split(whole[: size * TENSORS], size)]


def read_once(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.view(torch.int64).sum()


def sha1_of_copies(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        # No tobytes(): it would copy a second time and flatter the digest. Megatron-LM copies once, too.
        hashlib.sha1(tensor.clone().numpy().data).digest()


@dataclass(frozen=True)
class Times:
    """CPU seconds by contestant and round, for so many gigabytes each."""

    gigabytes: float
    seconds: dict[str, dict[int, float]]

    def speed(self, name: str) -> float:
        return self.gigabytes / statistics.median(self.seconds[name].values())

    def advantage(self, name: str, over: str) -> float:
        """How many times faster `name` was, round by round: load comes and goes, and hits both alike."""
        mine, theirs = self.seconds[name], self.seconds[over]
        return statistics.median(theirs[turn] / mine[turn] for turn in mine.keys() & theirs.keys())


def measure(tensors: list[torch.Tensor]) -> Times:
    """Rounds in which the contestants take turns. A clock on the wall would count other people's work."""
    digester, fallback = make_digester("cpu"), MultilinearDigester()
    contestants: dict[str, tuple[Callable[[], object], int]] = {
        "digest": (lambda: digester.submit(tensors).result(), 1),
        "sum": (lambda: read_once(tensors), 1),
        "fallback": (lambda: fallback.submit(tensors).result(), SLOW_EVERY),
        "sha1": (lambda: sha1_of_copies(tensors), SLOW_EVERY),
    }
    seconds: dict[str, dict[int, float]] = {name: {} for name in contestants}
    for turn in range(ROUNDS):
        for name, (run, every) in contestants.items():
            if turn % every == 0:
                start = time.thread_time()
                run()
                seconds[name][turn] = time.thread_time() - start
    return Times(sum(tensor.nbytes for tensor in tensors) / 1e9, seconds)


def microseconds_per_small_tensor() -> float:
    digester = make_digester("cpu")
    parameters = [torch.nn.Parameter(torch.ones(8, 8)) for _ in range(TENSORS)]
    times = []
    for _ in range(200):
        start = time.thread_time()
        digester.submit(parameters).result()
        times.append(time.thread_time() - start)
    return statistics.median(times) / TENSORS * 1e6


def row(name: str, speed: float) -> str:
    return f"  {name:<26}{speed:8.2f} GB/s"


def report(title: str, times: Times, algorithm: str, sha1_target: float | None) -> list[str]:
    """Print one table; return what was missed."""
    to_sum, to_sha1 = times.advantage("digest", "sum"), times.advantage("digest", "sha1")
    # No digest can be faster than memory is read.
    most = times.advantage("sum", "sha1")
    bar = f"target >= {sha1_target:g}" if sha1_target else f"a sum alone is {most:.1f} times as fast"
    print(f"{title}, one thread")
    print(row(algorithm, times.speed("digest")))
    print(row("int64 sum", times.speed("sum")), f"  digest/sum   {to_sum:6.2f}  target >= {SUM_TARGET}")
    print(
        row("SHA-1 of a copy", times.speed("sha1")),
        f"  digest/SHA-1 {to_sha1:6.1f}  {bar}",
    )
    share = times.advantage("fallback", "sum")
    print(row("multilinear-128 in torch", times.speed("fallback")), f"  fallback/sum {share:6.2f}")
    missed = []
    if to_sum < SUM_TARGET:
        missed.append(f"{title}: the digest runs at {to_sum:.2f} of an int64 sum, below {SUM_TARGET}")
    if sha1_target and to_sha1 < sha1_target:
        missed.append(
            f"{title}: the digest is {to_sha1:.1f} times as fast as SHA-1 of a copy, below {sha1_target:g}"
        )
    return missed


def main() -> int:
    torch.set_num_threads(1)
    algorithm = make_digester("cpu").algorithm
    whole = one_tensor()
    missed = report(f"{MEGABYTES} MB of float32 in 1 tensor", measure(whole), algorithm, SHA1_TARGET)
    parts = many_tensors(whole[0])
    # Copies of these stay in the cache. Where a processor has instructions for SHA-1, reading the memory once is then
    # about 15 times as fast: what can be asked for is the speed of memory.
    missed += report(f"{MEGABYTES} MB of float32 in {TENSORS} tensors", measure(parts), algorithm, None)
    print(f"{TENSORS} parameters of 256 bytes: {microseconds_per_small_tensor():.2f} microseconds each")
    if missed:
        print("Target missed: " + "; ".join(missed) + ".", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
