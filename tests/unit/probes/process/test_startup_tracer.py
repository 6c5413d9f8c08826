"""The watch over a process's start: what it sees of loads, copies and the broadcast, and that it leaves."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck import device_api
from ddpcheck.analysis.startup.collector import is_direct, timeline
from ddpcheck.guard import GUARD
from ddpcheck.injection import CLOCK
from ddpcheck.probes.process import startup_tracer
from ddpcheck.probes.process.os_counters import process_start
from ddpcheck.probes.process.startup_tracer import MOST_RECORDS, StartupTracer
from ddpcheck.records.kinds.startup import StartupRecord, StartupStage

ORIGINALS = {
    "load": (torch, torch.load),
    "to": (nn.Module, nn.Module.to),
    "load_storage": (torch.cuda.gds.GdsFile, torch.cuda.gds.GdsFile.load_storage),
    "load_state_dict": (nn.Module, nn.Module.load_state_dict),
    "_sync_module_states": (
        sys.modules["torch.nn.parallel.distributed"],
        sys.modules["torch.nn.parallel.distributed"]._sync_module_states,  # type: ignore[attr-defined]
    ),
}


@pytest.fixture
def watch() -> Iterator[StartupTracer]:
    faults: list[Any] = []
    GUARD.report_to(lambda *fault: faults.append(fault))
    watch = StartupTracer()
    watch.install()
    yield watch
    watch.end()
    assert faults == []
    for name, (owner, original) in ORIGINALS.items():
        assert getattr(owner, name) is original
    assert "from_file" not in vars(torch.UntypedStorage)


def written(watch: StartupTracer) -> list[StartupRecord]:
    records: list[StartupRecord] = []
    watch.write_to(records.append)
    return [record for record in records if record.via or record.stage == "broadcast"]


def saved(folder: Path) -> Path:
    path = folder / "model.pt"
    torch.save({"weight": torch.ones(1000, 1000)}, path)
    return path


def test_a_load_and_its_file(watch: StartupTracer, tmp_path: Path) -> None:
    path = saved(tmp_path)
    assert torch.load(path)["weight"].sum() == 1_000_000
    (record,) = written(watch)
    assert (record.stage, record.via, record.bytes) == ("load", "torch.load", path.stat().st_size)
    assert record.files == [[str(path), path.stat().st_size, "read"]]
    assert 4_000_000 <= record.read < 4_200_000
    assert 0 < record.seconds < 60
    assert record.host > 4_000_000


def test_a_load_by_mapping(watch: StartupTracer, tmp_path: Path) -> None:
    path = saved(tmp_path)
    torch.load(path, mmap=True)
    (record,) = written(watch)
    assert record.files == [[str(path), path.stat().st_size, "mapped"]]
    assert record.read < 1_000_000


def test_an_open_file_and_one_without_a_name(watch: StartupTracer, tmp_path: Path) -> None:
    import io

    path = saved(tmp_path)
    with open(path, "rb") as file:
        torch.load(file)
    torch.load(io.BytesIO(path.read_bytes()))
    first, second = written(watch)
    assert (first.bytes, [entry[0] for entry in first.files]) == (path.stat().st_size, [str(path)])
    assert (second.bytes, second.files) == (0, [])


def test_what_fails_is_over_all_the_same(watch: StartupTracer, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        torch.load(tmp_path / "nothing.pt")
    torch.load(saved(tmp_path))
    assert [len(record.files) for record in written(watch)] == [1, 1]


def test_mapped_by_another_library(watch: StartupTracer, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "model.safetensors"
    safetensors.save_file({"weight": torch.ones(100, 100)}, path)
    safetensors.load_file(path)
    (record,) = written(watch)
    assert (record.via, record.files) == ("mapped file", [[str(path), path.stat().st_size, "mapped"]])


def test_from_pretrained_of_any_class_holds_the_loads_inside(
    watch: StartupTracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class PreTrainedModel:
        @classmethod
        def from_pretrained(cls, path: Path) -> Any:
            return cls, torch.load(path)

    class Mine(PreTrainedModel):
        pass

    library = type(sys)("transformers.modeling_utils")
    library.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "transformers.modeling_utils", library)
    watch.joining()
    path = saved(tmp_path)
    assert Mine.from_pretrained(path)[0] is Mine
    records = written(watch)
    assert [(record.via, len(record.files)) for record in records] == [("from_pretrained", 1)]
    watch.end()
    assert Mine.from_pretrained(path)[0] is Mine
    assert "from_pretrained" not in vars(Mine)


def test_a_copy_to_a_device(watch: StartupTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    """`meta` stands in for a device: the only other one there is without a GPU."""
    monkeypatch.setattr(device_api, "_HOST_TYPES", {"cpu"})
    model = nn.Linear(10, 10)
    model.to("cpu")
    model.double()
    model.to("meta")
    model.to("meta")
    (record,) = written(watch)
    assert (record.stage, record.via, record.bytes) == ("copy", "Module.to", 110 * 8)


@pytest.mark.parametrize("staged", [False, True])
def test_a_read_by_cufile(
    watch: StartupTracer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, staged: bool
) -> None:
    """The driver is stood in for, and `meta` for a device: it takes the bytes, or reads them by the host first."""
    path = tmp_path / "weights"
    path.write_bytes(bytes(4 << 20))

    def load_storage(handle: int, storage: Any, offset: int) -> None:
        if staged:
            descriptor = os.open(path, os.O_RDONLY)
            os.pread(descriptor, storage.nbytes(), offset)
            os.close(descriptor)

    fakes = {
        "_gds_register_handle": lambda descriptor: 1,
        "_gds_deregister_handle": lambda handle: None,
        "_gds_load_storage": load_storage,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch._C, name, fake, raising=False)
    monkeypatch.setattr(os, "O_DIRECT", 0)  # which not every file system takes
    monkeypatch.setattr(device_api, "_HOST_TYPES", {"cpu"})
    file = torch.cuda.gds.GdsFile(str(path), os.O_RDONLY)
    for offset in (0, 2 << 20):
        file.load_storage(torch.empty(2 << 20, dtype=torch.uint8, device="meta").untyped_storage(), offset)
    nn.Linear(3, 3).to("meta")
    record, copy = written(watch)
    assert (record.stage, record.via, record.bytes, record.moved) == (
        "load",
        "GdsFile.load_storage",
        4 << 20,
        4 << 20,
    )
    assert (record.files, copy.stage) == ([[str(path), 4 << 20, "cufile"]], "copy")
    assert is_direct(record) is not staged
    row = timeline(0, "node0", [record])
    assert (row["direct"], row["loaded_bytes"], row["ways"]) == (
        not staged,
        4 << 20,
        ["GdsFile.load_storage"],
    )
    del file


def test_a_read_by_cufile_into_the_host_is_not_direct(watch: StartupTracer) -> None:
    begun = watch.begin(StartupStage.LOAD, "GdsFile.load_storage")
    assert begun is not None
    storage = torch.empty(2 << 20, dtype=torch.uint8).untyped_storage()
    watch._add_cufile_read(begun, object(), storage)
    (record,) = written(watch)
    assert (record.bytes, record.moved, is_direct(record)) == (2 << 20, 0, False)


def test_the_broadcast(watch: StartupTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.BatchNorm1d(5)
    sizes = [startup_tracer._broadcast_size(model)]
    sizes.append(startup_tracer._broadcast_size(model, broadcast_buffers=False))
    sizes.append(startup_tracer._broadcast_size(model, params_and_buffers_to_ignore=["weight"]))
    assert sizes == [20 * 4 + 8, 10 * 4, 15 * 4 + 8]


def test_marks_before_and_after_there_is_a_rank(watch: StartupTracer, tmp_path: Path) -> None:
    watch.joining()
    watch.joined()
    records: list[StartupRecord] = []
    watch.write_to(records.append)
    assert [record.stage for record in records][-1:] == ["group"]
    torch.load(saved(tmp_path))
    watch.wrapping()
    watch.wrapped()
    assert [record.stage for record in records][-2:] == ["load", "wrap"]
    watch.end()
    torch.load(saved(tmp_path))
    assert len([record for record in records if record.stage == "load"]) == 1


def test_no_end_of_loads(watch: StartupTracer, tmp_path: Path) -> None:
    path = saved(tmp_path)
    for _ in range(MOST_RECORDS + 5):
        watch.finish(watch.begin(StartupStage.LOAD, "torch.load"))
    torch.load(path)
    watch.wrapping()
    watch.wrapped()
    records: list[StartupRecord] = []
    watch.write_to(records.append)
    assert [record.stage for record in records].count("load") == MOST_RECORDS
    assert records[-1].stage == "wrap"


def test_the_birth_of_a_rank(watch: StartupTracer, monkeypatch: pytest.MonkeyPatch) -> None:
    born = process_start()
    for name, at in (("armed", 0.5), ("torch", 0.75), ("torch_imported", 2.0)):
        monkeypatch.setitem(CLOCK, name, born + at)
    records: list[StartupRecord] = []
    watch.write_to(records.append)
    assert [(record.stage, record.seconds) for record in records] == [
        ("interpreter", pytest.approx(0.5, abs=0.05)),
        ("torch", pytest.approx(1.25, abs=0.001)),
    ]


def test_a_forked_rank_took_no_time_to_import(watch: StartupTracer, tmp_path: Path) -> None:
    """Its parent did, before there was a rank; what the parent loaded is not the rank's either."""
    born = process_start()
    CLOCK.update(armed=born - 9, torch=born - 8, torch_imported=born - 7)
    watch._unwritten.append(StartupRecord("load", born - 6, 1.0, via="torch.load"))
    try:
        assert written(watch) == []
    finally:
        CLOCK.clear()


def test_processes_that_are_no_rank_write_nothing(watch: StartupTracer, tmp_path: Path) -> None:
    path = saved(tmp_path)
    before = set(os.listdir(tmp_path))
    torch.load(path)
    assert set(os.listdir(tmp_path)) == before
