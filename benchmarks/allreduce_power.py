"""How often one rank that is missing from an AllReduce is found, and how often a correct one is accused.

    python benchmarks/allreduce_power.py
    python benchmarks/allreduce_power.py --sound 10000 --trials 100 --ranks 64 --dtype bfloat16

Gradients are added in the dtype, in the orders of real backends: one rank after the other, as a tree, and in a ring in
which each chunk begins at another rank. Sketches are packed as in records. Exits 1 after a false alarm, or if fewer
than 99 % of the missing ranks are found within 20 steps.
"""

from __future__ import annotations

import argparse
import base64
import math
import sys
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch

from ddpcheck.analysis.allreduce.contributions import Contribution, ContributionCheck
from ddpcheck.analysis.allreduce.mean_check import Compared, SketchTable, check_parts, roundoff
from ddpcheck.probes.sketches.sketch import sign_table, sketch
from ddpcheck.records.codecs import NORM_SLACK, SCALES, STEPS, pack, unpack

MOST_STEPS = 20
ORDERS = ("sequential", "tree", "ring")
# How the gradients of ranks and steps are related: independent; a common part as large as the own one; nearly all
# common; with scales that differ by rank and parameter; the same batch at every step with a small learning rate.
KINDS = ("noise", "mixed", "common", "uneven", "persistent")
# Steps that repeat each other are no new evidence. This kind is shown, but does not count for the exit status.
NOT_REQUIRED = "persistent"


@dataclass(frozen=True)
class Case:
    """One kind of job."""

    ranks: int
    dtype: str
    sizes: tuple[int, ...]
    order: str
    kind: str
    # Divide each gradient before it is added, as DDP does, or the sum.
    divide_first: bool = True

    def __str__(self) -> str:
        return f"{self.ranks} ranks {self.dtype} {len(self.sizes)} parameters {self.order} {self.kind}"


def add_up(parts: torch.Tensor, order: str) -> torch.Tensor:
    """The sum of the rows of `parts`, rounded to its dtype after each addition."""
    if order == "tree":
        while len(parts) > 1:
            rest = parts[len(parts) // 2 * 2 :]
            parts = torch.cat([parts[0 : len(parts) // 2 * 2 : 2] + parts[1::2][: len(parts) // 2], rest])
        return parts[0]
    if order == "ring":
        # Chunk c begins at rank c: rotated by columns, the rows are added in turn.
        ranks, size = parts.shape
        chunk = torch.arange(size) * ranks // max(size, 1)
        rows = (torch.arange(ranks)[:, None] + chunk[None, :]) % ranks
        parts = torch.gather(parts, 0, rows)
    total = parts[0].clone()
    for row in parts[1:]:
        total += row
    return total


class Job:
    """Draws the gradients of a job, step by step, and reduces them."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        self._draw = torch.Generator().manual_seed(seed)
        self.size = sum(case.sizes)
        self._common = self._normal(1)
        self._own = self._normal(case.ranks)
        factors = torch.rand(case.ranks, len(case.sizes), generator=self._draw) * 4 - 2
        self._factors = torch.repeat_interleave(10.0**factors, torch.tensor(case.sizes), dim=1)
        self.dtype = getattr(torch, case.dtype)

    def _normal(self, rows: int) -> torch.Tensor:
        return torch.randn(rows, self.size, generator=self._draw)

    def gradients(self) -> torch.Tensor:
        kind, ranks = self.case.kind, self.case.ranks
        if kind == "persistent":
            self._own += 1e-3 * self._normal(ranks)
            return (self._own + self._common).to(self.dtype)
        own = self._normal(ranks)
        self._common = self._common + 0.1 * self._normal(1)
        if kind == "mixed":
            own += self._common
        elif kind == "common":
            own = 0.1 * own + self._common
        elif kind == "uneven":
            own *= self._factors
        return own.to(self.dtype)

    def reduced(self, local: torch.Tensor, missing: int | None) -> torch.Tensor:
        ranks = self.case.ranks
        parts = local / ranks if self.case.divide_first else local.clone()
        if missing is not None:
            parts[missing] = 0
        total = add_up(parts, self.case.order)
        return total if self.case.divide_first else total / ranks


def texts(case: Case, local: torch.Tensor) -> dict[int, str]:
    """The sketches of all ranks, packed as in records."""
    values, norms = [], []
    signs = sign_table(torch.float64, torch.device("cpu"))
    for part in torch.split(local.double(), list(case.sizes), dim=1):
        values.append(part @ signs[: part.shape[1]])
        norms.append(torch.linalg.vector_norm(part, dim=1))
    value, norm = torch.stack(values, 1).numpy(), torch.stack(norms, 1).numpy()
    scales = np.array(SCALES)
    codes = np.searchsorted(scales, norm * NORM_SLACK)
    items = np.zeros(codes.shape, dtype=np.dtype([("code", "u1"), ("steps", "<i4")]))
    items["code"] = codes
    items["steps"] = np.rint(
        np.divide(value, scales[codes], where=codes > 0, out=np.zeros_like(value)) * STEPS
    )
    return {rank: base64.b85encode(items[rank].tobytes()).decode() for rank in range(case.ranks)}


class Watcher:
    """Does what the analysis does with the records of each step."""

    def __init__(self, case: Case) -> None:
        self.case, self.check, self.step = case, ContributionCheck(), 0
        # Whether the rounding bound of a single step is exceeded.
        self.bound_exceeded = False

    def add(self, local: torch.Tensor, reduced: torch.Tensor) -> Contribution | None:
        table = SketchTable(texts(self.case, local))
        results = unpack(
            pack(sketch(part.contiguous()) for part in torch.split(reduced, list(self.case.sizes)))
        )
        compared = [
            Compared(table.parts(index), result, self.case.dtype, size, index)
            for index, (result, size) in enumerate(zip(results, self.case.sizes, strict=True))
        ]
        for each in compared:
            outcome = check_parts(each.parts, each.result, each.dtype, each.numel, self.case.ranks)
            self.bound_exceeded = self.bound_exceeded or not outcome.ok
        self.step += 1
        units = [roundoff(self.case.dtype)] * len(compared)
        return self.check.add(self.step, self.case.ranks, table, compared, units)


def detection(case: Case, trials: int, seed: int) -> tuple[list[int], int, int, int]:
    """Of each trial, the steps until it was found that a rank is missing (0: never). Then the numbers of trials without
    a name, with a wrong one, and of those in which a single step exceeded the rounding bound.
    """
    steps, unnamed, wrong, single = [], 0, 0, 0
    for trial in range(trials):
        job, watcher = Job(case, seed + trial), Watcher(case)
        missing = (seed + 7919 * trial) % case.ranks
        found = 0
        for step in range(1, MOST_STEPS + 1):
            local = job.gradients()
            named = watcher.add(local, job.reduced(local, missing))
            if named is not None:
                unnamed += not named.ranks
                wrong += named.ranks not in ((missing,), ()) or not named.missing
                found = step
                break
        steps.append(found)
        single += watcher.bound_exceeded
    return steps, unnamed, wrong, single


def false_alarms(case: Case, count: int, seed: int) -> int:
    """In `count` steps of sound jobs, each of them 200 steps long."""
    alarms = 0
    for begin in range(0, count, 200):
        job, watcher = Job(case, seed + begin), Watcher(case)
        for _ in range(min(200, count - begin)):
            local = job.gradients()
            alarms += watcher.add(local, job.reduced(local, None)) is not None
    return alarms


def cases(ranks: int, dtype: str, sizes: tuple[int, ...]) -> list[Case]:
    return [Case(ranks, dtype, sizes, order, kind) for order in ORDERS for kind in KINDS]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument(
        "--sizes", default=",".join(["64", "4", "96", "8"] * 8), help="elements of each parameter"
    )
    parser.add_argument("--trials", type=int, default=10, help="jobs with a missing rank, of each kind")
    parser.add_argument("--sound", type=int, default=200, help="steps of sound jobs, of all kinds together")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = tuple(map(int, options.sizes.split(",")))
    jobs = [(options.ranks, options.dtype)] if options.ranks else [(4096, "float32"), (64, "bfloat16")]
    sound = True
    print(f"seed {options.seed}, parameters of {options.sizes} elements")
    print(
        f"{'':52} {'found':>9} {'median':>6} {'most':>5} {'unnamed':>7} {'wrong':>5} {'single step':>11} "
        f"{'false alarms':>14}"
    )
    for ranks, dtype in jobs:
        totals: Counter[str] = Counter()
        every = cases(ranks, dtype, sizes)
        steps_each = math.ceil(options.sound / len(every))
        for case in every:
            began = time.monotonic()
            steps, unnamed, wrong, single = detection(case, options.trials, options.seed)
            alarms = false_alarms(case, steps_each, options.seed + 1_000_000)
            hits = sorted(filter(None, steps))
            middle, most = (hits[len(hits) // 2], hits[-1]) if hits else (0, 0)
            if case.kind != NOT_REQUIRED:
                totals.update(trials=len(steps), found=len(hits), unnamed=unnamed)
            totals.update(wrong=wrong)
            totals.update(alarms=alarms, sound=steps_each)
            print(
                f"{case!s:52} {len(hits):4} / {len(steps):<3} {middle:5} {most:6} {unnamed:7} {wrong:5} {single:11} "
                f"{alarms:4} in {steps_each:6}  {time.monotonic() - began:5.0f} s",
                flush=True,
            )
        print(
            f"{ranks} ranks {dtype}: {totals['found']} of {totals['trials']} missing ranks found within {MOST_STEPS} "
            f"steps ({NOT_REQUIRED} not counted), {totals['unnamed']} without a name, "
            f"{totals['wrong']} with a wrong one; {totals['alarms']} false alarms in {totals['sound']} sound steps",
            flush=True,
        )
        sound = sound and not totals["alarms"] and not totals["wrong"]
        sound = sound and totals["found"] >= 0.99 * totals["trials"]
    return 0 if sound else 1


if __name__ == "__main__":
    sys.exit(main())
