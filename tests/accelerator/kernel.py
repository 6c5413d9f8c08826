"""The table kernel of the simulated accelerator, by the contract of `probes/scan/device_kernels.py`."""

from __future__ import annotations

import functools

import torch

from ddpcheck.probes.scan import device_kernels
from ddpcheck.probes.scan.device_kernels import KernelTable
from ddpcheck.records.sketch_signs import (
    BLOCK_SEEDS,
    BLOCK_WORDS,
    LANES,
    WEIGHT_SEED,
    sign_bits,
    word_key,
)
from tests.accelerator.device import TYPE, native


class SimKernel:
    """One launch on the current stream. Reads addresses when it runs, not when it is launched."""

    name = "sim"

    def __init__(self, device: torch.device) -> None:
        _set_constants()

    def launch(self, table: KernelTable) -> torch.Tensor:
        if native.current_device() != table.rows.device.index:
            # Triton launches on the current device, whatever the memory.
            raise RuntimeError("the table's device is not current")
        results: torch.Tensor = native.scan_table(table.rows, table.addresses, table.orders, table.programs)
        return results


@functools.cache
def _set_constants() -> None:
    keys = [word_key(lane, index) for lane in range(LANES) for index in range(BLOCK_WORDS)]
    native.set_scan_constants(keys, list(BLOCK_SEEDS), sign_bits(), WEIGHT_SEED)


def register() -> None:
    device_kernels.register(TYPE, SimKernel)
