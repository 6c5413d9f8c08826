"""The table of tensors on a device: one row per tensor, one launch per scan, uploads only where something moved."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.probes.probe import BudgetItem
from ddpcheck.probes.scan import device_kernels, device_table, scanner
from ddpcheck.probes.scan.device_kernels import (
    PROGRAM_BYTES,
    KernelChoice,
    KernelTable,
    Kind,
    ResultField,
    RowField,
    kernel_of,
    register,
)
from ddpcheck.probes.scan.device_table import DeviceTable
from ddpcheck.probes.scan.scanner import TensorScanner
from ddpcheck.probes.scan.table import DIGEST
from ddpcheck.records.kinds.digests import DigestRecord, Stage
from ddpcheck.records.kinds.rank import FaultRecord
from ddpcheck.records.reasons import KernelLoss
from tests.helpers.fake_context import FakeContext, Job

CPU = torch.device("cpu")


class RecordingKernel:
    """Keeps the tables it is given. Its results are the addresses: those of a row are known."""

    name = "recording"

    def __init__(self, error: Exception | None = None) -> None:
        self.tables: list[KernelTable] = []
        self.error = error

    def launch(self, table: KernelTable) -> torch.Tensor:
        if self.error is not None:
            raise self.error
        self.tables.append(table)
        results = torch.zeros((table.rows.shape[0], len(ResultField)), dtype=torch.int64)
        results[:, ResultField.LANE_0] = table.addresses
        return results


def scan(table: DeviceTable, tensors: list[Any]) -> list[int]:
    table.update(tensors)
    digests = table.scan(bytes(DIGEST if tensor is not None else 0 for tensor in tensors)).digests()
    return [int.from_bytes(digests[16 * row : 16 * row + 8], "little") for row in range(len(tensors))]


def test_one_launch_and_one_row_per_tensor() -> None:
    kernel = RecordingKernel()
    tensors = [torch.zeros(size) for size in (3, 100_000, 1)] * 500
    assert scan(DeviceTable(CPU, kernel), tensors) == [tensor.data_ptr() for tensor in tensors]
    [table] = kernel.tables
    assert (table.rows.shape, table.addresses.shape) == ((1500, len(RowField)), (1500,))


def test_programs_are_numbered_by_prefix_sums() -> None:
    kernel = RecordingKernel()
    sizes = [1, PROGRAM_BYTES // 4, PROGRAM_BYTES // 4 + 1, 3 * PROGRAM_BYTES // 4]
    scan(DeviceTable(CPU, kernel), [torch.zeros(size) for size in sizes])
    [table] = kernel.tables
    assert table.programs.tolist() == [0, 1, 2, 2, 3, 3, 3]
    assert table.rows[:, RowField.FIRST_PROGRAM].tolist() == [0, 1, 2, 4]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_more_than_two_to_the_31_elements(dtype: torch.dtype) -> None:
    """Memory that is reserved and never touched: only its size and address are read."""
    huge, after = torch.empty(2**31 + 5, dtype=dtype), torch.zeros(7)
    kernel = RecordingKernel()
    scan(DeviceTable(CPU, kernel), [huge, after])
    [table] = kernel.tables
    programs = -(-huge.nbytes // PROGRAM_BYTES)
    assert table.rows[0, RowField.ELEMENTS].item() == 2**31 + 5
    assert table.rows[0, RowField.BYTES].item() == huge.nbytes
    assert table.rows[1, RowField.FIRST_PROGRAM].item() == programs
    assert table.programs.shape[0] == programs + 1


def test_gradients_that_move_upload_only_their_addresses() -> None:
    kernel = RecordingKernel()
    table = DeviceTable(CPU, kernel)
    scan(table, [torch.zeros(40), torch.zeros(50)])
    uploads, revision = table.uploads, table.revision
    moved = [torch.zeros(40), torch.zeros(50)]
    assert scan(table, moved) == [tensor.data_ptr() for tensor in moved]
    assert (table.uploads - uploads, table.revision - revision) == (1, 0)
    # Rows of the first scan are used again.
    assert kernel.tables[1].rows is kernel.tables[0].rows


def test_addresses_that_alternate_are_kept_on_the_device() -> None:
    """The allocator of torch returns the same few blocks, and zero_grad(set_to_none) moves gradients between them."""
    table = DeviceTable(CPU, RecordingKernel())
    sets = [[torch.zeros(40), torch.zeros(50)] for _ in range(device_table._KEPT)]
    for tensors in sets * 2:
        scan(table, tensors)
    uploads = table.uploads
    for tensors in sets * 3:
        assert scan(table, tensors) == [tensor.data_ptr() for tensor in tensors]
    assert table.uploads == uploads
    # The oldest is dropped: what is kept does not grow with the job.
    for _ in range(50):
        scan(table, [torch.zeros(40), torch.zeros(50)])
    assert len(table._columns._kept) == device_table._KEPT


def test_other_sizes_make_the_rows_anew() -> None:
    table = DeviceTable(CPU, RecordingKernel())
    scan(table, [torch.zeros(40)])
    scan(table, [torch.zeros(41)])
    assert table.revision == 2


def test_an_address_that_is_not_aligned_to_elements_is_read_as_bytes() -> None:
    """Views of a byte buffer, as some loaders of checkpoints make them."""
    memory = torch.zeros(64, dtype=torch.uint8)
    aligned = memory[:40].view(torch.float32)
    misaligned = torch.frombuffer(bytearray(64), dtype=torch.float32, count=10, offset=1)
    assert misaligned.data_ptr() % 4
    kernel = RecordingKernel()
    table = DeviceTable(CPU, kernel)
    scan(table, [aligned])
    scan(table, [misaligned])
    kinds = [each.rows[0, RowField.KIND].item() for each in kernel.tables]
    assert kinds == [Kind.FLOAT32, Kind.BYTES]
    assert table.sketchable == b"\0"


@pytest.fixture
def on_a_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[RecordingKernel]:
    """Tensors of the CPU are scanned as those of a device with a kernel."""
    kernel = RecordingKernel()
    monkeypatch.setattr(scanner, "make_table", lambda: None)
    monkeypatch.setitem(device_kernels._choices, CPU, KernelChoice(kernel))
    yield kernel
    device_kernels.lost_while_training.clear()


def test_a_launch_that_fails_while_training_falls_back_to_torch(on_a_device: RecordingKernel) -> None:
    tensors = [torch.arange(5.0), torch.arange(70_000.0)]
    table = DeviceTable(CPU, on_a_device)
    table.update(tensors)
    scans = TensorScanner()
    scans._tables = [table]
    expected = TensorScanner()
    expected._tables = []
    ones = bytes([1, 1])
    wanted = expected.scan(tensors, digest=ones).leaves()
    on_a_device.error = RuntimeError("out of resources: shared memory")
    assert list(scans.scan(tensors, digest=ones).leaves()) == list(wanted)
    choice = kernel_of(CPU)
    assert (choice.kernel, choice.loss) == (None, KernelLoss.LAUNCH)
    assert "out of resources" in choice.detail
    # Not tried again.
    on_a_device.error = None
    scans.scan(tensors, digest=ones).leaves()
    assert on_a_device.tables == []


def test_the_state_of_an_optimizer_is_one_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    scans: list[int] = []
    original = TensorScanner.scan

    def counted(self: TensorScanner, tensors: Any, *masks: Any, **options: Any) -> Any:
        scans.append(len(tensors))
        return original(self, tensors, *masks, **options)

    module = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    context = FakeContext(optimizer_state=True)
    optimizer = torch.optim.AdamW(module.parameters())
    job = Job(module, context).wrapped()
    job.train(optimizer)
    monkeypatch.setattr(TensorScanner, "scan", counted)
    job.train(optimizer)
    # Two moments and a step count of each of 40 parameters.
    assert scans.count(120) == 1
    assert len(context.digests(Stage.STATE)) == 1


def test_a_device_without_a_kernel_is_recorded_and_checked_sparsely(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = KernelChoice(None, KernelLoss.NO_COMPILER, "RuntimeError: Failed to find C compiler")
    monkeypatch.setitem(device_kernels._choices, torch.device("cuda", 0), choice)
    context = FakeContext(budget="2")
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    Job(module, context).wrapped().train(torch.optim.SGD(module.parameters(), lr=0.1), steps=40)
    [fault] = context.of(FaultRecord)
    assert (fault.probe, fault.entry) == ("device_kernel", "no_compiler")
    assert "Failed to find C compiler" in fault.error
    steps = [(record.stage, record.step) for record in context.of(DigestRecord) if record.step >= 0]
    assert steps == [("buffers", 0), ("params", 0)]
    assert not context.budget.runs(BudgetItem.PARAMS, 41)


def test_register_makes_the_choice_again() -> None:
    kernel = RecordingKernel()
    try:
        register("meta", lambda device: kernel)
        assert kernel_of(torch.device("meta")).kernel is None  # its results are wrong
        assert kernel_of(torch.device("meta")).loss is not None
    finally:
        device_kernels._makers.pop("meta", None)
        device_kernels._choices.pop(torch.device("meta"), None)
