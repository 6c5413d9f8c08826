"""Whether TensorBoard and its profiler plugin are installed."""

from __future__ import annotations

from importlib.util import find_spec

from ddpcheck.errors import PackageMissing

INSTALL = "pip install 'ddpcheck[tensorboard]'"


def require_tensorboard() -> None:
    if find_spec("tensorboard") is None:
        raise PackageMissing(f"TensorBoard is not installed: install it with `{INSTALL}`")


def has_profiler_plugin() -> bool:
    return find_spec("torch_tb_profiler") is not None
