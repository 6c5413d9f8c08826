"""Healthy DDP training loops, one small function each: ddpcheck must change no bit and raise nothing.

Each function runs inside a rank whose process group is made, and returns what is to be hashed: modules,
optimizers, tensors, plain values. SyncBatchNorm is not among them: torch refuses it on CPU.

One family a file. A new function goes into its family, and its name into `order.py`.
"""

from __future__ import annotations

# The families are imported for what they register.
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
    parameters,
    precision,
    reduction,
    several_models,
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
