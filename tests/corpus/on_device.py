"""The corpus on the simulated accelerator: what scripts need there, what is reported otherwise, and why.

A script that is in none of these tables runs as it is, and the findings must be those of its header.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from tests.corpus.header import Header

# Ranks of a mesh take the device of their local rank.
DEVICES = 4

_LISTS = (
    "on accelerators torch's optimizers work on lists of tensors and refuse shards and other tensors in one list, so "
    "the job would fail in torch"
)
# Scripts whose optimizers work on one tensor after the other, as they do on a CPU.
SINGLE_TENSOR = {
    "ignored_by_fully_shard": _LISTS,
    "root_not_sharded": _LISTS,
    "root_not_sharded_hybrid": _LISTS,
}
# Scripts that ask for deterministic kernels.
DETERMINISTIC = {
    "device_computes_wrongly": "the audit finds flips of low bits on an accelerator only among deterministic kernels",
}
# Scripts that move a module between devices when an optimizer holds its parameters. Between a CPU and a GPU they keep
# their identity.
MOVED = {
    "clip_on_the_main_process": "accelerate moves the module to the CPU",
}


@dataclass(frozen=True)
class Difference:
    """Fields of the header that are others on a device."""

    reason: str
    fields: Mapping[str, str]


DIFFERENT = {
    "weights_written_in_forward": Difference(
        "writes through `.data` are not sampled on a device, so the difference is found after the next step",
        {"stage": "params", "cause": "no optimizer steps these parameters"},
    ),
    "layer_silenced_on_one_rank": Difference(
        "the first values of tensors are not sampled on a device: in a job of five steps, one rank may have none",
        {"cause": "on rank 1"},
    ),
}


def expected(headers: Iterable[Header]) -> list[Header]:
    """The headers with what is expected on a device."""
    return [
        replace(header, **DIFFERENT[header.name].fields) if header.name in DIFFERENT else header
        for header in headers
    ]
