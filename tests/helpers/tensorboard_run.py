"""A synthetic run with every kind of data that TensorBoard shows."""

from __future__ import annotations

from pathlib import Path

import numpy
import torch

from ddpcheck.links.model import BETWEEN, LinksReport, MeasuredLink, Node
from ddpcheck.probes.live_compare.tensor_dump import tensor_bytes, write_safetensors
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.modules import LossRecord
from ddpcheck.records.kinds.timing import ClockRecord
from tests.helpers.run_builder import RunBuilder

RANKS = 3
STEPS = 6
DIVERGENCE_STEP = 4
# Local gradients of each rank at every step, one number for each parameter.
LOCAL = {0: [1.0, 0.0, 0.0], 1: [2.0, 0.0, 0.0], 2: [3.0, 0.0, 0.0]}
LOSSES = {
    0: [0.5, 0.25, "nan", 1.0, 2.0, 3.0],
    1: [1.5, 0.75, 1.0, 1.0, 4.0, 3.0],
    2: [1.0, 0.5, 1.0, 1.0, 0.0, 3.0],
}
WAITS = {0: [10, 20, 30, 40, 50], 1: [15, 25, 5, 45, 55], 2: [30, 10, 35, 65, 5]}


def build(folder: Path) -> Path:
    """Three ranks; two parameters of rank 2 diverge at step 4."""
    builder = RunBuilder(folder, RANKS).wrap().optimizer()
    for step in range(STEPS):
        builder.backward(step + 1, LOCAL, [2.0, 0.0, 0.0])
        outliers = {2: ("body.weight", "head.weight")} if step >= DIVERGENCE_STEP else None
        builder.step(step, outliers)
    for rank in builder.ranks:
        builder.add(rank, LossRecord(0, 0, LOSSES[rank]))
        builder.add(rank, clocks(WAITS[rank]))
        # Nothing changes after the first steps.
        for step in range(3):
            builder.add(rank, MemoryRecord(step, (rank + 1) << 20, 10 << 20))
    builder.end()
    save_gradients(folder)
    (folder / "links.json").write_text(links().to_json())
    return builder.save()


def clocks(waits: list[int]) -> ClockRecord:
    """The beginning of the first step was not recorded."""
    count = len(waits)
    return ClockRecord(
        step=1,
        total=[10_000] * count,
        data=[1000] * count,
        forward=[2000] * count,
        backward=[3000] * count,
        wait=waits,
        optimizer=[500] * count,
        watching=[100] * count,
        queued=[0] * count,
    )


def save_gradients(folder: Path) -> None:
    """At steps 0 and 4; reduced gradients are equal on all ranks at step 0 only."""
    (folder / "gradients").mkdir(parents=True)
    for rank in range(RANKS):
        for step in (0, 4):
            local = torch.arange(60, dtype=torch.float32) + rank
            reduced = torch.full((4,), 2.0 + (rank if step else 0), dtype=torch.bfloat16)
            rows = {
                f"{part}/body.weight": (tensor.dtype, list(tensor.shape), tensor_bytes(tensor))
                for part, tensor in (("local", local), ("reduced", reduced))
            }
            name = f"step-{step:08d}-module-0-rank-{rank:05d}.safetensors"
            write_safetensors(folder / "gradients" / name, rows, {"group": "0,1,2"})


def links() -> LinksReport:
    """Four nodes; node2 is slow."""
    nodes = tuple(Node(f"node{number}", (number,)) for number in range(4))
    rates = numpy.full((4, 4), 1e8)
    rates[2, :] = rates[:, 2] = 2e7
    return LinksReport(
        backend="gloo",
        nodes=nodes,
        links=tuple(
            MeasuredLink(a, b, BETWEEN, 1e-4, float(rates[a, b]), 0.01, 1 << 20, 9)
            for a in range(4)
            for b in range(4)
            if a != b
        ),
        allreduce=(),
        explanations=(),
        tolerance=1.5,
        seconds=1.0,
    )
