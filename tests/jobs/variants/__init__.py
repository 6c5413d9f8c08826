"""Healthy DDP training loops, one small function each: ddpcheck must change no bit and raise nothing.

Each function runs in a rank that has a process group, and returns what is hashed: modules, optimizers, tensors, plain
values. SyncBatchNorm is missing: torch does not support it on CPU.

One file per family. Add a new function to its family, and its name to `order.py`.
"""

from __future__ import annotations

# Importing a family registers its functions.
from . import (  # noqa: F401
    autograd,
    buffers,
    compiled,
    data,
    evaluation,
    frozen,
    groups,
    hooks,
    optimizers,
    outside,
    parameters,
    precision,
    reduction,
    replays,
    several_models,
    sharded,
    transparency,
    weights,
)
from .order import ORDER
from .registry import LEAST_RANKS, VARIANTS, variant
from .small_jobs import WIDTH, batches, make_group, net, normed, sgd

__all__ = [
    "LEAST_RANKS",
    "VARIANTS",
    "WIDTH",
    "batches",
    "make_group",
    "net",
    "normed",
    "sgd",
    "variant",
]

if set(ORDER) != set(VARIANTS):
    raise ImportError(f"in a family or in order.py, but not in both: {sorted(set(ORDER) ^ set(VARIANTS))}")
for _name in ORDER:
    VARIANTS[_name], LEAST_RANKS[_name] = VARIANTS.pop(_name), LEAST_RANKS.pop(_name)
