"""The compiled library is used only if it works, and its functions read what they are given."""

from __future__ import annotations

import ctypes
import ctypes.util
import shutil
import subprocess
import sys
import threading
from array import array
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ddpcheck.probes.digest.submit import submit
from ddpcheck.probes.scan import library as library_module
from ddpcheck.probes.scan import scanner as scanner_module
from ddpcheck.probes.scan import table as table_module
from ddpcheck.probes.scan.library import MAX_DIMS, ElementOrder, RowLayout, ScanLibrary, scan_library
from ddpcheck.probes.scan.scanner import TensorScanner
from ddpcheck.probes.sketches.sketch import sketch
from ddpcheck.records.sketch_signs import PIECE

pytestmark = pytest.mark.needs("library")


@pytest.fixture
def library() -> ScanLibrary:
    library = scan_library()
    assert library is not None
    return library


@pytest.fixture
def no_cache() -> Iterator[None]:
    """Whether there is a library is decided once in a process."""
    cached = (library_module._path, library_module._library, library_module.native_kernel, scan_library)
    for function in cached:
        function.cache_clear()
    yield
    for function in cached:
        function.cache_clear()


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def assert_scans_without_library() -> None:
    assert scan_library() is None
    assert table_module.make_table() is None
    scanner, tensor = TensorScanner(), normal(PIECE + 9)
    scanner.update([tensor])
    scan = scanner.scan([tensor], b"\1", b"\1")
    assert list(scan.leaves()) == submit([tensor]).result()
    assert tuple(scan.numbers()) == sketch(tensor)[:3]


@pytest.mark.needs("gcc")
def test_the_library_is_there_where_there_is_a_compiler() -> None:
    assert scan_library() is not None
    assert scan_library() is scan_library()


@pytest.mark.usefixtures("no_cache")
def test_without_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    assert library_module._path() is None
    assert library_module.native_kernel(torch.float32) is None
    assert_scans_without_library()


@pytest.mark.usefixtures("no_cache")
def test_with_a_file_that_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Built for another architecture. A second one that can be loaded is used."""
    own = library_module._path()
    (tmp_path / "_native.cpython-30-other.so").write_bytes(b"\x7fELF of another machine")
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    library_module._path.cache_clear()
    assert library_module._path() is None
    assert_scans_without_library()
    if own is not None:
        for function in (library_module._path, library_module._library, library_module.native_kernel):
            function.cache_clear()
        scan_library.cache_clear()
        shutil.copy(own, tmp_path / "_native.cpython-31.so")
        assert scan_library() is not None


@pytest.mark.usefixtures("no_cache")
@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")
def test_with_a_library_of_another_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It has the kernels, but no function that reads a table."""
    source = Path(library_module.__file__).parent / "kernels.c"
    target = tmp_path / "_native.so"
    subprocess.run(["gcc", "-O1", "-shared", "-fPIC", "-o", target, source, "-lm"], check=True, timeout=300)
    monkeypatch.setattr(library_module, "__file__", str(tmp_path / "library.py"))
    assert library_module.native_kernel(torch.float32) is not None
    assert_scans_without_library()


@pytest.mark.usefixtures("no_cache")
def test_with_a_library_that_sums_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library_module, "_sums_correctly", lambda kernel: False)
    assert_scans_without_library()


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("present", [None, ModuleType("xxhash._xxhash")], ids=["missing", "other functions"])
def test_without_the_functions_of_xxhash(monkeypatch: pytest.MonkeyPatch, present: ModuleType | None) -> None:
    """Another build of the package may not export them."""
    if present is not None:
        present.__file__ = ctypes.util.find_library("c")
    monkeypatch.setitem(sys.modules, "xxhash._xxhash", present)
    assert scan_library() is None
    assert table_module.make_table() is None


def test_rows_have_the_layout_of_scan_c() -> None:
    assert ctypes.sizeof(ElementOrder) == 8 + 2 * 8 * MAX_DIMS
    assert ctypes.sizeof(RowLayout) == 32
    source = (Path(library_module.__file__).parent / "scan.c").read_text()
    assert f"#define MOST_DIMS {MAX_DIMS}\n" in source
    assert f"enum {{ DIGEST = {table_module.DIGEST}, SKETCH = {table_module.SKETCH}, COUNT = 4 }};" in source
    assert table_module.COUNT == 4


def test_large_scans_release_the_gil(library: ScanLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(library, "_scan_holding", lambda *_: calls.append("holding") or 0)
    monkeypatch.setattr(library, "_scan_releasing", lambda *_: calls.append("releasing") or 0)
    for total in (0, library_module._HOLDS_GIL, library_module._HOLDS_GIL + 1):
        library.scan(0, 0, 0, 0, total, 1, 0, 0)
    assert calls == ["holding", "holding", "releasing"]


@pytest.mark.parametrize("limit", [0, 1 << 40])
def test_both_ways_of_calling_give_the_same(
    library: ScanLibrary, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(library_module, "_HOLDS_GIL", limit)
    tensors = [normal(100), normal(3 * PIECE), normal(400, 300).t()]
    scanner = TensorScanner()
    scanner.update(tensors)
    scan = scanner.scan(tensors, b"\1\1\1", b"\1\1\1")
    assert list(scan.leaves()) == submit(tensors).result()
    assert [tuple(scan.numbers()[at : at + 3]) for at in (0, 3, 6)] == [sketch(each)[:3] for each in tensors]


def test_weights_for_the_largest_row(library: ScanLibrary) -> None:
    """More blocks than the table of weights has at first."""
    tensor = torch.ones(66 * 4 * PIECE, dtype=torch.bfloat16)
    scanner = TensorScanner()
    scanner.update([tensor])
    assert tuple(scanner.scan([tensor], sketch=b"\1").numbers()) == sketch(tensor)[:3]


def test_samples_end_where_the_tensor_ends(library: ScanLibrary) -> None:
    data = (ctypes.c_char * 64)(*range(64))
    addresses = array("Q", [ctypes.addressof(data)] * 4 + [0, 400])
    sizes = array("Q", [0, 5, 63, 64, 64, 64])
    starts, middles = (ctypes.c_uint8 * (6 * 33))(), (ctypes.c_uint8 * (6 * 16))()
    length = library.samples(
        addresses.buffer_info()[0],
        sizes.buffer_info()[0],
        6,
        32,
        16,
        ctypes.addressof(starts),
        ctypes.addressof(middles),
    )
    whole = bytes(range(32))
    assert bytes(starts[:length]) == b"\0" + b"\5" + whole[:5] + b"\x20" + whole + b"\x20" + whole + b"\0\0"
    assert bytes(middles) == bytes(48) + bytes(range(32, 48)) + bytes(32)


def test_windows_skip_what_is_small_or_freed(library: ScanLibrary) -> None:
    data = (ctypes.c_char * 64)(*range(64))
    addresses = array("Q", [ctypes.addressof(data), 0, ctypes.addressof(data), 65535])
    sizes = array("Q", [32, 64, 64, 64])
    result = (ctypes.c_uint8 * 8)()
    count = library.windows(
        addresses.buffer_info()[0], sizes.buffer_info()[0], 4, 32, 4, 2, ctypes.addressof(result)
    )
    assert count == 1
    assert bytes(result) == bytes([0, 1, 20, 21, 41, 42, 62, 63])


def test_scanners_made_before_the_library_is_missed_keep_their_table(
    library: ScanLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanner, tensor = TensorScanner(), normal(20)
    monkeypatch.setattr(scanner_module, "make_table", lambda: None)
    other = TensorScanner()
    results = []
    for each in (scanner, other):
        each.update([tensor])
        results.append(each.scan([tensor], b"\1", b"\1"))
    assert results[0].leaves() == results[1].leaves()
    assert results[0].numbers() == results[1].numbers()


def test_a_finalizer_may_scan_while_the_same_thread_does(
    library: ScanLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python may run the finalizer of a wrapper, which reads the last values of the module, in the middle of a scan."""
    tensor, other = normal(PIECE + 9), normal(3 * PIECE)
    inner, outer = TensorScanner(), TensorScanner()
    inner.update([other])
    outer.update([tensor])
    leaves: list[list[bytes]] = []
    address = library_module._weights.address

    def interrupted(blocks: int) -> int:
        found = address(blocks)
        if not leaves:
            leaves.append([])
            leaves[0] = list(inner.scan([other], b"\1", b"\1").leaves())
        return found

    monkeypatch.setattr(library_module._weights, "address", interrupted)
    threads = []

    def scan() -> None:
        threads.append(list(outer.scan([tensor], b"\1", b"\1").leaves()))

    training = threading.Thread(target=scan, daemon=True)
    training.start()
    training.join(60)
    assert not training.is_alive()
    assert leaves == [submit([other]).result()]
    assert threads == [submit([tensor]).result()]
