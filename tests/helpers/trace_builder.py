"""Small traces for tests, written the way profilers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

Event = dict[str, Any]

MAIN_THREAD, BACKWARD_THREAD = 1, 2
PROCESS = 700


def span(category: str, name: str, start: float, end: float, tid: int = MAIN_THREAD, **args: Any) -> Event:
    """An event in microseconds."""
    pid = 0 if category in ("kernel", "gpu_memcpy", "gpu_memset") else PROCESS
    event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    return {**event, "ts": start, "dur": round(end - start, 3), "args": args}


def kernel(name: str, start: float, end: float, launched: float | None = None, **args: Any) -> list[Event]:
    """A kernel on the GPU and, if given, the call that launched it."""
    stream = 20 if name.startswith("nccl") else 7
    correlation = round(start * 1000)
    on_gpu = span("kernel", name, start, end, tid=stream, stream=stream, correlation=correlation, **args)
    if launched is None:
        return [on_gpu]
    call = span("cuda_runtime", "cudaLaunchKernel", launched, launched + 1, correlation=correlation)
    return [on_gpu, call]


def all_reduce(start: float, end: float, launched: float | None = None, **args: Any) -> list[Event]:
    return kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", start, end, launched, **args)


def described(elements: int, group: str = "0", size: int = 2, **more: Any) -> dict[str, Any]:
    """The arguments that newer versions of torch put on a kernel."""
    return {
        "Collective name": "allreduce",
        "In msg nelems": elements,
        "Out msg nelems": elements,
        "dtype": "Float",
        "Group size": size,
        "Process Group Name": group,
        **more,
    }


def step(number: int, start: float, end: float) -> Event:
    return span("user_annotation", f"ProfilerStep#{number}", start, end)


def write(
    path: Path, events: list[Event], rank: int | None = None, world_size: int = 2, **around: Any
) -> Path:
    """A complete trace; `around` holds keys next to the events."""
    document: dict[str, Any] = {"schemaVersion": 1, "traceEvents": events, **around}
    if rank is not None:
        document["distributedInfo"] = {"backend": "nccl", "rank": rank, "world_size": world_size}
    path.write_text(json.dumps(document))
    return path
