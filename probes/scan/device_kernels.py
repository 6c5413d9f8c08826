"""The kernel that reads a table of tensors on a device: its contract, and which one each device type has.

Triton compiles one for CUDA, ROCm and XPU. `register` adds one for another device type. A kernel is used only if it
gives the same results as the operators of torch on this machine; otherwise the reason is kept, and torch reads the
tensors, which takes much longer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch

from ddpcheck.device_api import TRITON_TYPES
from ddpcheck.records.reasons import KernelLoss

# Bytes that one program of the kernel reads: 32 blocks of the digest.
PROGRAM_BYTES = 1 << 17
MAX_DIMS = 8
# The most bytes of a message of an exception that is recorded.
_MESSAGE = 200


class Kind(IntEnum):
    """How a row is read. Rows of BYTES have digests, but no sketches."""

    BYTES = 0
    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3
    FLOAT64 = 4


KINDS = {
    torch.float32: Kind.FLOAT32,
    torch.bfloat16: Kind.BFLOAT16,
    torch.float16: Kind.FLOAT16,
    torch.float64: Kind.FLOAT64,
}


class RowField(IntEnum):
    """The columns of `KernelTable.rows`."""

    BYTES = 0
    KIND = 1
    # Bits of DIGEST, SKETCH and COUNT (probes/scan/table.py); 0: the row has no program.
    WORK = 2
    # Number of programs of the rows before this one.
    FIRST_PROGRAM = 3
    # Initial values of the two lanes of the digest.
    START_0 = 4
    START_1 = 5
    # Row of `KernelTable.orders`; -1: the memory is in row-major order.
    ORDER = 6
    ELEMENTS = 7


class ResultField(IntEnum):
    """The columns of a kernel's results, which has one row per tensor.

    LANE_0 and LANE_1 are the digest (multilinear-128, with START_0 and START_1 added); VALUE and SQUARES are bits of
    float64: the sum under the signs and weights of `sketch_signs`, and the sum of squares. Columns that were not asked
    for are 0.
    """

    LANE_0 = 0
    LANE_1 = 1
    VALUE = 2
    SQUARES = 3
    NONFINITE = 4


class KernelTable(NamedTuple):
    """What a kernel reads, all of it on the device."""

    # int64, one row per tensor, by RowField.
    rows: torch.Tensor
    # int64, one per tensor; 0 where there is no work.
    addresses: torch.Tensor
    # int64: number of dimensions, MAX_DIMS sizes, MAX_DIMS strides in elements; unused ones have size 1 and stride 0.
    # The first row belongs to no tensor.
    orders: torch.Tensor
    # int32, one per program of PROGRAM_BYTES: its row. The n-th program of a row reads its n-th PROGRAM_BYTES.
    programs: torch.Tensor


class TableKernel(Protocol):
    """Reads all rows of a table, in order on the current stream of the table's device, which is current."""

    @property
    def name(self) -> str: ...

    def launch(self, table: KernelTable) -> torch.Tensor:
        """int64 on the same device, one row per tensor, by ResultField. Does not wait for the device."""


class KernelChoice(NamedTuple):
    """The kernel of a device, or why there is none."""

    kernel: TableKernel | None
    loss: KernelLoss | None = None
    detail: str = ""


MakeKernel = Callable[[torch.device], TableKernel | None]

_makers: dict[str, MakeKernel] = {}
_choices: dict[torch.device, KernelChoice] = {}
# Devices whose kernel failed after the check at wrapping; empty in nearly every job.
lost_while_training: list[torch.device] = []


def register(device_type: str, make: MakeKernel) -> None:
    """Use the kernel that `make` returns for devices of this type; None: it has none."""
    _makers[device_type] = make
    for device in [device for device in _choices if device.type == device_type]:
        del _choices[device]


def kernel_of(device: torch.device) -> KernelChoice:
    """The kernel of `device`. The first call compiles it and waits for the device, so make it before training."""
    choice = _choices.get(device)
    if choice is None:
        choice = _choices[device] = _choose(device)
    return choice


def lose(device: torch.device, error: Exception) -> None:
    """A launch failed although the kernel was right before: from now on torch reads the tensors of the device."""
    _choices[device] = KernelChoice(None, KernelLoss.LAUNCH, f"{type(error).__name__}: {error}"[:_MESSAGE])
    lost_while_training.append(device)


def losses() -> dict[torch.device, KernelChoice]:
    """The devices in use so far that have no kernel."""
    return {device: choice for device, choice in _choices.items() if choice.kernel is None}


def _choose(device: torch.device) -> KernelChoice:
    make = _makers.get(device.type)
    if make is None:
        return KernelChoice(None, KernelLoss.NO_KERNEL, device.type)
    try:
        kernel = make(device)
        if kernel is None:
            return KernelChoice(None, KernelLoss.NO_KERNEL, device.type)
        from ddpcheck.probes.scan.kernel_check import first_difference

        wrong = first_difference(kernel, device)
    except Exception as error:
        # No compiler, an unknown GPU, another Triton: each raises its own types, and all lead to the same fallback.
        return KernelChoice(None, _loss_of(error), f"{type(error).__name__}: {error}"[:_MESSAGE])
    return KernelChoice(None, KernelLoss.WRONG_RESULT, wrong) if wrong else KernelChoice(kernel)


def _loss_of(error: Exception) -> KernelLoss:
    if isinstance(error, ImportError):
        return KernelLoss.NO_TRITON
    if isinstance(error, (PermissionError, OSError)) and getattr(error, "filename", None):
        return KernelLoss.NO_CACHE_FOLDER
    # Triton compiles its launcher with the C compiler of the machine.
    if "compiler" in str(error).lower() or "gcc" in str(error) or "clang" in str(error):
        return KernelLoss.NO_COMPILER
    return KernelLoss.COMPILATION


def _triton(device: torch.device) -> TableKernel:
    kernel: TableKernel = importlib.import_module("ddpcheck.probes.scan.triton_table").TritonKernel(device)
    return kernel


for _type in TRITON_TYPES:
    register(_type, _triton)
