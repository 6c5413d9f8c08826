"""A stored run of two ranks with traces of one complete and one truncated step."""

from __future__ import annotations

from pathlib import Path

from ddpcheck.records.kinds.timing import TraceRecord
from tests.helpers.run_builder import RunBuilder
from tests.helpers.trace_builder import all_reduce, described, kernel, step, write


def profiled_run(folder: Path) -> Path:
    """Create the run in `folder`, and return it."""
    (folder / "traces").mkdir(parents=True)
    build = RunBuilder(folder, 2).wrap().train(6)
    for rank in (0, 1):
        events = [step(5, 0, 100), *kernel("gemm", 10, 50, launched=5)]
        events += all_reduce(20 + 10 * rank, 80, launched=8, **described(1000))
        events += [step(6, 100, 110), *kernel("gemm", 101, 109, launched=100)]
        name = f"traces/node0_10{rank}_rank{rank}.1.pt.trace.json"
        write(folder / name, events, rank=rank)
        build.add(rank, TraceRecord(file=name, first=5, end=6))
    build.end().save()
    return folder
