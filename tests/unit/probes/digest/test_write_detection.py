"""Late-write detection: samples of parameters and gradients show writes, and locate them in the step."""

from __future__ import annotations

import base64
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddpcheck.analysis.evidence import value
from ddpcheck.probes.digest.write_detection import FIRST, MIDDLE, TensorSamples, WriteDetector, take_samples
from ddpcheck.probes.scan import scanner as scanner_module
from ddpcheck.probes.scan import table as table_module
from ddpcheck.probes.scan.scanner import WINDOW, WINDOWS, TensorScanner
from ddpcheck.probes.scan.table import LARGE
from ddpcheck.records.codecs import unpack_samples
from ddpcheck.records.kinds.digests import Stage
from tests.helpers.fake_context import FakeContext, Job, watch
from tests.helpers.unreadable_tensors import UNREADABLE, wrapper

COUNT = LARGE // 4 + 100


@pytest.fixture(params=["compiled", "python"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the compiled library and without it."""
    way: str = request.param
    if way == "python":
        monkeypatch.setattr(scanner_module, "make_table", lambda: None)
    elif table_module.make_table() is None:
        pytest.skip("the library was not built")
    return way


def sample(scanner: TensorScanner, *tensors: torch.Tensor) -> TensorSamples:
    scanner.update(tensors)
    return take_samples(scanner, tensors)


def take(*tensors: torch.Tensor) -> TensorSamples:
    return sample(TensorScanner(), *tensors)


def unpacked(samples: TensorSamples) -> list[bytes]:
    return unpack_samples(base64.b64encode(samples.first).decode())


def first(tensor: torch.Tensor) -> bytes:
    (values,) = unpacked(take(tensor))
    return values


def windows(gradient: torch.Tensor | None) -> bytes:
    scanner = TensorScanner()
    scanner.update([gradient])
    return scanner.windows([gradient])


def test_samples_begin_with_the_first_values() -> None:
    assert first(torch.arange(20.0)) == struct.pack("<8f", *range(8))
    assert first(torch.arange(6.0).view(2, 3)) == struct.pack("<6f", *range(6))
    assert first(nn.Parameter(torch.tensor([1.5, 2.5]))) == struct.pack("<2f", 1.5, 2.5)


def test_samples_of_scalars_and_empty_tensors() -> None:
    assert first(torch.tensor(3.0)) == struct.pack("<f", 3.0)
    assert first(torch.tensor(7)) == struct.pack("<q", 7)
    assert first(torch.zeros(0)) == b""
    assert first(torch.zeros(3, 0)) == b""


def test_samples_of_bfloat16_can_be_decoded() -> None:
    data = first(torch.tensor([1.0, -2.0, 0.5], dtype=torch.bfloat16))
    assert [value(data[at : at + 2], "bfloat16") for at in (0, 2, 4)] == [1.0, -2.0, 0.5]


def test_tensors_in_another_memory_order_have_no_samples() -> None:
    assert first(torch.arange(6.0).view(2, 3).t()) == b""
    assert first(torch.arange(20.0)[::2]) == b""
    assert first(torch.arange(20.0)[4:]) == struct.pack("<8f", *range(4, 12))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(2, 2, device="meta"),
        torch.eye(3).to_sparse(),
        torch.zeros(4).as_subclass(type("Theirs", (torch.Tensor,), {})),
    ],
    ids=["meta", "sparse", "subclass"],
)
def test_tensors_without_plain_memory_have_no_samples(tensor: torch.Tensor) -> None:
    assert first(tensor) == b""


@pytest.mark.parametrize("make", [*UNREADABLE, wrapper])
def test_unreadable_tensors_are_not_read(make: Callable[[], torch.Tensor]) -> None:
    assert first(make()) == b""


def test_memory_that_is_freed_between_two_samples() -> None:
    """As with offloading: the view keeps its address, but the memory is freed."""
    full = torch.ones(100)
    view, scanner = full[50:], TensorScanner()
    assert unpacked(sample(scanner, view)) == [struct.pack("<8f", *[1.0] * 8)]
    full.untyped_storage().resize_(0)
    assert unpacked(sample(scanner, view)) == [b""]
    assert sample(scanner, view).middle == bytes(MIDDLE)


def test_samples_have_the_format_of_records() -> None:
    samples = take(torch.arange(20.0), torch.zeros(0), torch.tensor(True))
    assert unpacked(samples) == [struct.pack("<8f", *range(8)), b"", b"\x01"]


def test_the_middle_is_sampled_where_the_beginning_does_not_reach_it() -> None:
    samples = take(torch.arange(20.0), torch.arange(16.0), torch.arange(15.0), torch.zeros(0))
    assert samples.middle == struct.pack("<8f", *range(10, 14), *range(8, 12)) + bytes(2 * MIDDLE)


def test_samples_without_a_write_are_equal() -> None:
    tensors = [torch.randn(50), torch.randn(3, 4).t(), torch.tensor(1.0)]
    scanner = TensorScanner()
    assert sample(scanner, *tensors) == sample(scanner, *tensors)


@pytest.mark.parametrize("shape", [(1000,), (3,), ()])
def test_every_write_that_autograd_sees_is_detected(shape: tuple[int, ...]) -> None:
    parameter = nn.Parameter(torch.zeros(shape))
    scanner = TensorScanner()
    before = sample(scanner, parameter)
    with torch.no_grad():
        parameter.view(-1)[-1].fill_(1.0)
    assert sample(scanner, parameter) != before


@pytest.mark.parametrize("size", [1, 8, 15, 16, 1000])
@pytest.mark.parametrize("write", ["in place", "replaced"])
def test_writes_through_data_are_detected(size: int, write: str) -> None:
    parameter = nn.Parameter(torch.ones(size))
    scanner = TensorScanner()
    before = sample(scanner, parameter)
    if write == "in place":
        parameter.data.mul_(0.5)
    else:
        parameter.data = torch.zeros(size)
    assert sample(scanner, parameter) != before


def test_a_list_that_grew_has_other_samples() -> None:
    scanner = TensorScanner()
    one, two = torch.ones(4), torch.ones(4)
    assert sample(scanner, one) != sample(scanner, one, two)


def test_tensors_made_in_inference_mode_have_no_versions() -> None:
    with torch.inference_mode():
        tensor = torch.ones(4)
    assert take(tensor).versions == [0]


def test_samples_are_small() -> None:
    samples = take(torch.zeros(1 << 20))
    assert len(samples.first) == 1 + FIRST
    assert len(samples.middle) == MIDDLE


def test_a_smaller_tensor_at_the_same_address_is_not_read_past_its_end(way: str) -> None:
    """The memory of the larger tensor may have been unmapped."""
    program = """
import ctypes, mmap, sys, torch
from ddpcheck.probes.scan import scanner as scanner_module
from ddpcheck.probes.scan.scanner import TensorScanner
from ddpcheck.probes.digest.write_detection import take_samples

if sys.argv[1] == "python":
    scanner_module.make_table = lambda: None

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
page = mmap.PAGESIZE
flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
at = libc.mmap(None, 16 * page, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)

def tensor(size):
    return torch.frombuffer((ctypes.c_char * size).from_address(at), dtype=torch.float32)

parameter = torch.nn.Parameter(tensor(16 * page))
scanner = TensorScanner()

def read():
    scanner.update([parameter])
    return take_samples(scanner, [parameter]), scanner.scan([parameter], b"\\1", b"\\1").leaves()

read()
parameter.data = tensor(page)
libc.munmap(at + page, 15 * page)
read()
"""
    done = subprocess.run([sys.executable, "-c", program, way], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "write",
    [
        lambda g: g.mul_(2),
        lambda g: g.clamp_(-0.5, 0.5),
        lambda g: g[0].zero_(),
        lambda g: g[-1].zero_(),
        lambda g: g[: COUNT // 10].zero_(),
        lambda g: g[COUNT // 2 - COUNT // 20 : COUNT // 2 + COUNT // 20].neg_(),
    ],
    ids=["scaled", "clamped", "first", "last", "a tenth at the beginning", "a tenth in the middle"],
)
def test_a_write_to_a_large_gradient_through_data_is_detected(
    write: Callable[[torch.Tensor], object],
) -> None:
    gradient = torch.randn(COUNT, generator=torch.Generator().manual_seed(1))
    before, version = windows(gradient), gradient._version
    assert len(before) == WINDOWS * WINDOW
    assert windows(gradient) == before
    write(gradient.data)
    assert gradient._version == version
    assert windows(gradient) != before


@pytest.mark.parametrize(
    "view", [lambda g: g.view(2, -1).t(), lambda g: g[10:]], ids=["transposed", "offset"]
)
def test_any_gradient_in_one_span_is_sampled(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    gradient = view(torch.randn(2 * COUNT))
    before = windows(gradient)
    gradient.data.mul_(2)
    assert before
    assert windows(gradient) != before


@pytest.mark.parametrize(
    "gradient",
    [None, torch.randn(LARGE // 4), torch.randn(2 * COUNT)[::2], torch.empty(COUNT, device="meta")],
    ids=["none", "small", "strided", "meta"],
)
def test_other_gradients_are_not_sampled(gradient: torch.Tensor | None) -> None:
    assert windows(gradient) == b""


@pytest.mark.parametrize("make", UNREADABLE)
def test_unreadable_gradients_are_not_sampled(
    monkeypatch: pytest.MonkeyPatch, make: Callable[[], torch.Tensor]
) -> None:
    for module in (scanner_module, table_module):
        monkeypatch.setattr(module, "LARGE", -1)  # they are small
    assert windows(make()) == b""


def write_windows(write: Callable[[str, nn.Module], None], forwards: int = 1) -> list[str]:
    """The recorded windows of three steps in which `write` is called at each part."""
    torch.manual_seed(0)
    module, context = nn.Linear(3, 2), FakeContext()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    job = Job(module, context).wrapped()
    for _ in range(3):
        write("before", module)
        for _ in range(forwards):
            output = job.forward(torch.ones(1, 3))
            write("forward", module)
            output.sum().backward()
            write("after", module)
        job.step(optimizer)
    return [record.how for record in context.digests(Stage.REWRITTEN) if record.optimizer is not None]


@pytest.mark.parametrize(
    ("part", "how"),
    [
        ("before", "before_forward"),
        ("forward", "in_forward"),
        ("after", "after_backward"),
    ],
)
def test_the_second_write_is_located(part: str, how: str) -> None:
    def write(now: str, module: Any) -> None:
        if now == part:
            module.weight.data += 1

    assert write_windows(write) == ["", how, how]


def test_with_several_forwards_the_window_is_unknown() -> None:
    def write(now: str, module: Any) -> None:
        if now == "forward":
            module.weight.data += 1

    assert write_windows(write, forwards=2) == ["", "", ""]


def test_a_write_without_samples_before_it_is_not_located() -> None:
    tracked, detector = watch(nn.Linear(3, 2)), WriteDetector()
    assert not detector.is_tracking(tracked)
    now = take(torch.ones(3))
    detector.forward(tracked, now)
    assert detector.window(tracked, None) == ""
    assert detector.is_tracking(tracked)
    # Samples of an earlier step are not used again.
    assert detector.window(tracked, now) == ""


def test_without_a_write_there_is_no_record() -> None:
    assert write_windows(lambda now, module: None) == []
