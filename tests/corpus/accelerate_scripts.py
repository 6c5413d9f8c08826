"""The test scripts in accelerate's package: those that run on CPUs without network, and why others do not."""

from __future__ import annotations

import importlib.util
from pathlib import Path

NEEDS_DATA = "downloads a model and a data set"
NEEDS_DEEPSPEED = "needs DeepSpeed and GPUs"

ENVIRONMENT = {"ACCELERATE_USE_CPU": "true"}

RUN = (
    "test_cli.py",
    "test_ops.py",
    "test_script.py",
    "test_sync.py",
)
# Correct findings about a script, and the reason.
TRUE: dict[str, tuple[tuple[str, ...], str]] = {
    "test_cli.py": (("DDP601",), "prints a line and makes no process group"),
}
NOT_RUN = {
    "test_distributed_data_loop.py": "hangs on CPUs: accelerate joins uneven inputs on GPUs only",
    "test_ddp_comm_hook.py": "passes device ids to DDP, and torch has its bf16 hook with NCCL only",
    "test_merge_weights.py": "shards a model over two accelerators",
    "test_notebook.py": "has a race: at a restart one rank may return while the other waits for it forever",
    "external_deps/test_pippy.py": "does nothing without GPUs",
    "external_deps/test_checkpointing.py": NEEDS_DATA,
    "external_deps/test_metrics.py": NEEDS_DATA,
    "external_deps/test_performance.py": NEEDS_DATA,
    "external_deps/test_peak_memory_usage.py": NEEDS_DATA,
    "external_deps/test_ds_alst_ulysses_sp.py": NEEDS_DEEPSPEED,
    "external_deps/test_ds_multiple_model.py": NEEDS_DEEPSPEED,
    "external_deps/test_zero3_integration.py": NEEDS_DEEPSPEED,
}


def folder() -> Path:
    """Found without importing accelerate, which would import torch."""
    spec = importlib.util.find_spec("accelerate")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("accelerate is not installed: pip install -e '.[dev]'")
    return Path(spec.origin).parent / "test_utils" / "scripts"


def unlisted() -> list[str]:
    """Scripts of the installed accelerate that are in neither list; a new version may add some."""
    here = folder()
    shipped = {path.relative_to(here).as_posix() for path in here.rglob("test_*.py")}
    return sorted(shipped - {*RUN, *NOT_RUN})
