"""The table kernel in Triton's interpreter: the bits of the reference for every kind of row; its accuracy."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("triton")

PRELUDE = """
import math
from fractions import Fraction
import numpy
import torch
from ddpcheck.probes.scan import device_kernels, triton_table
from ddpcheck.probes.scan.device_kernels import Kind, kernel_of, register
from ddpcheck.probes.scan.device_table import DeviceTable
from ddpcheck.probes.digest.multilinear_torch import lane_sums
from ddpcheck.probes.digest.protocol import finish_leaf
from ddpcheck.probes.digest.tensor_bytes import layout_of
from ddpcheck.probes.scan import kernel_check
from ddpcheck.probes.scan.kernel_check import first_difference
from ddpcheck.records.sketch_signs import BLOCK, signs, weight
from tests.helpers.table_reference import digest_of, sketch_of

numpy.seterr(all="ignore")  # the interpreter's own arithmetic
cpu = torch.device("cpu")
kernel = triton_table.TritonKernel(cpu)
torch.manual_seed(3)

def read(tensors, work=None):
    table = DeviceTable(cpu, kernel)
    table.update(tensors)
    results = table.scan(work or bytes(1 | 2 * each for each in table.sketchable))
    numbers = torch.frombuffer(bytearray(results.numbers()), dtype=torch.float64).view(-1, 3).tolist()
    digests = results.digests()
    return table, [digests[16 * row : 16 * row + 16] for row in range(len(tensors))], numbers

def same(one, other):
    return one == other or (math.isnan(one) and math.isnan(other))

def check(tensors):
    table, digests, numbers = read(tensors)
    for tensor, digest, found, sketchable in zip(tensors, digests, numbers, table.sketchable):
        name = (tensor.dtype, tuple(tensor.shape), tensor.stride())
        assert digest == digest_of(tensor), name
        if sketchable:
            value, norm, nonfinite = sketch_of(tensor)
            assert same(found[0], value) and same(found[1], norm) and found[2] == nonfinite, (name, found)
    return numbers
"""


# Runs each script that it is given in a fork, so that torch and Triton are imported once.
SERVER = """
import json, os, sys, tempfile, traceback
for line in sys.stdin:
    with tempfile.TemporaryFile() as log:
        child = os.fork()
        if child == 0:
            os.dup2(log.fileno(), 2)
            try:
                exec(json.loads(line))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os._exit(1)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        log.seek(0)
        print(json.dumps([status, log.read().decode()]), flush=True)
"""
Run = Callable[[str], None]


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    """Runs a script in an interpreter of Triton kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", PRELUDE + SERVER],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process, process.stdin, process.stdout:

        def run(script: str) -> None:
            process.stdin.write(json.dumps(script) + "\n")
            process.stdin.flush()
            status, errors = json.loads(process.stdout.readline())
            assert status == 0, errors

        yield run


def test_every_dtype_size_and_alignment_has_the_bits_of_the_reference(run: Run) -> None:
    run("""
tensors = []
# All pairs of a size and an alignment, in at least one dtype.
for number, dtype in enumerate((torch.float32, torch.bfloat16, torch.float16, torch.float64)):
    for place, size in enumerate((0, 1, 2, 3, 255, 1024, 1025, 2049, 33_000)):
        skipped = (0, 1, 3)[(number + place) % 3]
        tensors.append(torch.randn(size + skipped).to(dtype)[skipped:])
    tensors.append(torch.randn(BLOCK + 40_000).to(dtype))
for dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float8_e4m3fn):
    for size in (1, 5, 4097, 140_001):
        tensors.append(torch.randint(0, 2, (size + 3,)).to(dtype)[3:])
check(tensors)
# May be lazily conjugated, so operators of torch read them.
for dtype in (torch.complex64, torch.complex128):
    number = torch.randn(1025, dtype=dtype)
    assert read([number])[0].digestible == bytes(1)
    lanes = lane_sums([number], cpu).tolist()[0]
    assert finish_leaf(layout_of(number).header, lanes) == digest_of(number)
""")


def test_other_orders_of_memory_are_sketched_in_row_major_order(run: Run) -> None:
    run("""
tensors = []
for dtype in (torch.float32, torch.bfloat16, torch.float64):
    tensors.append(torch.randn(300, 470).to(dtype).t())
    tensors.append(torch.randn(5, 7, 3, 3).to(dtype).contiguous(memory_format=torch.channels_last))
    tensors.append(torch.randn(2, 3, 2, 3, 2, 3, 2, 3).to(dtype).permute(7, 6, 5, 4, 3, 2, 1, 0))
numbers = check(tensors)
rows = check([tensor.contiguous() for tensor in tensors])
assert numbers == rows
deep = torch.randn(*[2] * 9).permute(8, 7, 6, 5, 4, 3, 2, 1, 0)
table, digests, _ = read([deep])
assert not table.sketchable[0] and digests == [digest_of(deep)]
""")


def test_values_that_are_not_finite_huge_or_tiny(run: Run) -> None:
    run("""
def wrong(size):
    values = torch.ones(size)
    values[[3, size // 3, size - 1]] = torch.tensor([math.nan, math.inf, -math.inf])
    return values
# The first one has two blocks of the sketch.
small = wrong(6_000)
tensors = [wrong(70_000), small.to(torch.bfloat16), small.to(torch.float16), small.double(), small.view(60, 100).t()]
assert [row[2] for row in check(tensors)] == [3] * 5
base = torch.randn(4_000)
scaled = [base * factor for factor in (1e30, 1e-30, 1e38, 1e-40)] + [base * 0, torch.tensor([1e-45])]
scaled += [base.double() * factor for factor in (1e300, 1e-300)] + [(base * 1e30).view(40, 100).t()]
mixed = base.clone()
mixed[7] = 3e38
check([*scaled, mixed])
""")


def test_work_is_asked_for_row_by_row_and_other_rows_are_zero(run: Run) -> None:
    run("""
tensors = [torch.randn(50), None, torch.randn(60), torch.randn(70)]
_, digests, numbers = read(tensors, bytes((1, 0, 2, 0)))
assert digests == [digest_of(tensors[0]), bytes(16), bytes(16), bytes(16)]
assert [bool(row[1]) for row in numbers] == [False, False, True, False]
""")


def test_the_error_against_exact_sums_is_far_below_the_rounding_of_a_gradient(run: Run) -> None:
    run("""
table = signs()
def exact(tensor):
    values = tensor.double().reshape(-1).tolist()
    parts = (values[start : start + BLOCK] for start in range(0, len(values), BLOCK))
    return sum(Fraction(weight(block)) * Fraction(math.fsum(map(float.__mul__, part, table)))
        for block, part in enumerate(parts))
short, size = 9_000, BLOCK + 9_000
normal = torch.randn(size)
hard = normal * torch.exp(4 * torch.randn(size))
cancelling = torch.tensor(table[:short])
cases = {
    torch.float32: [normal, hard, torch.rand(short), cancelling * 1e4 + torch.randn(short)],
    torch.bfloat16: [normal[:short], hard[:short]], torch.float16: [normal[:short]],
    torch.float64: [normal[:short].double() / 3, hard.double() / 3],
}
limits = {torch.float32: 2**-30, torch.bfloat16: 2**-20, torch.float16: 2**-20, torch.float64: 2**-46}
for dtype, tensors in cases.items():
    tensors = [tensor.to(dtype) for tensor in tensors]
    for tensor, row in zip(tensors, read(tensors)[2]):
        norm = math.sqrt(math.fsum(value * value for value in tensor.double().tolist()))
        error = abs(Fraction(row[0]) - exact(tensor)) / Fraction(norm)
        assert error < limits[dtype], (dtype, float(error), math.log2(error))
        assert abs(row[1] / norm - 1) < 1e-5, (dtype, row[1], norm)
""")


def test_the_last_program_of_more_than_two_to_the_31_elements_reads_the_right_place(run: Run) -> None:
    """The address is moved back by what the earlier programs read, so that only the last one has memory."""
    run("""
from ddpcheck.probes.scan.device_kernels import KernelTable, RowField, PROGRAM_BYTES
elements = 2**31 + 5
for dtype, kind in ((torch.float32, Kind.FLOAT32), (torch.bfloat16, Kind.BFLOAT16)):
    nbytes = elements * dtype.itemsize
    last = nbytes // PROGRAM_BYTES
    tail = torch.randn((nbytes - last * PROGRAM_BYTES) // dtype.itemsize).to(dtype)
    row = [0] * len(RowField)
    row[RowField.BYTES], row[RowField.KIND], row[RowField.WORK] = nbytes, kind, 3
    row[RowField.FIRST_PROGRAM], row[RowField.ORDER], row[RowField.ELEMENTS] = -last, -1, elements
    parts = torch.zeros((1, 5), dtype=torch.int64)
    triton_table.scan_programs[(1,)](
        torch.tensor([row]), torch.tensor([tail.data_ptr() - last * PROGRAM_BYTES]),
        torch.zeros((1, 17), dtype=torch.int64), torch.zeros(1, dtype=torch.int32),
        triton_table.word_keys(cpu), triton_table.sign_words(cpu), parts,
        KINDS=triton_table.ALL_KINDS, ORDERS=False, num_warps=8, enable_fp_fusion=False)
    first = last * PROGRAM_BYTES // dtype.itemsize
    table = signs()
    terms = [value * table[(first + index) % BLOCK] * weight((first + index) // BLOCK)
             for index, value in enumerate(tail.double().tolist())]
    assert math.isclose(parts[0, 2:3].view(torch.float64).item(), math.fsum(terms), rel_tol=1e-6)
    from ddpcheck.records.sketch_signs import BLOCK_WORDS, block_key, word_key
    words = bytes(tail.view(torch.uint8).tolist()) + bytes(-tail.nbytes % 4)
    words = [int.from_bytes(words[place : place + 4], "little") for place in range(0, len(words), 4)]
    for lane in range(2):
        total = sum(word * word_key(lane, index) for index, word in enumerate(words)) % 2**64
        block = last * PROGRAM_BYTES // 4 // BLOCK_WORDS
        expected = total % 2**32 * block_key(lane, 2 * block) + (total >> 32) * block_key(lane, 2 * block + 1)
        assert parts[0, lane].item() % 2**64 == expected % 2**64
""")


def test_everything_is_compiled_at_the_wrapping(run: Run) -> None:
    """Triton compiles anew for another dtype or alignment of an argument, another option, and integers of 1 or 16."""
    run("""
class Recorder:
    def __init__(self, kernel, runs):
        self.kernel, self.runs, self.variants = kernel, runs, set()
    def __getitem__(self, grid):
        def launch(*arguments, **options):
            kinds = tuple((type(each), each.dtype, each.data_ptr() % 16) for each in arguments)
            self.variants.add((kinds, tuple(sorted(options.items()))))
            if self.runs:
                self.kernel[grid](*arguments, **options)
        return launch
names = ("scan_programs", "add_programs")
def record(runs):
    for name in names:
        before = getattr(triton_table, name)
        setattr(triton_table, name, Recorder(getattr(before, "kernel", before), runs))
few = kernel_check.samples(cpu)[1:4]
kernel_check.samples = lambda device: few
record(runs=True)
assert first_difference(kernel, cpu) == ""
compiled = {name: getattr(triton_table, name).variants for name in names}
assert [len(compiled[name]) for name in names] == [2, 1]
record(runs=False)
def launch(*tensors, work=None):
    table = DeviceTable(cpu, kernel)
    table.update(tensors)
    table.scan(work or bytes(1 | 2 * each for each in table.sketchable))
every = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool]
for count in (1, 2, 15, 16, 17, 64):
    for size in (1, 16, 1000, 70_000):
        for skipped in (0, 1, 3):
            launch(*(torch.zeros(size + skipped, dtype=every[n % len(every)])[skipped:] for n in range(count)))
launch(torch.zeros(6, 5).t(), torch.zeros(3), torch.zeros(4, 2, 5).transpose(0, 2))
launch(torch.zeros(BLOCK + 9), torch.zeros(0), work=bytes((2, 1)))
for name in names:
    launched = getattr(triton_table, name).variants
    assert launched and launched <= compiled[name], launched - compiled[name]
""")


def test_a_kernel_is_used_only_if_it_is_right_and_the_reason_is_kept(run: Run) -> None:
    run("""
from ddpcheck.records.reasons import KernelLoss
assert first_difference(kernel, cpu) == ""
# What follows needs no tensors of every kind, which take long here.
few = kernel_check.samples(cpu)[1:4]
kernel_check.samples = lambda device: few
register("cpu", lambda device: triton_table.TritonKernel(device))
assert kernel_of(cpu).kernel is not None
class Wrong(triton_table.TritonKernel):
    def launch(self, table):
        results = super().launch(table)
        results[-1, 0] += 1
        return results
register("cpu", Wrong)
assert kernel_of(cpu).loss is KernelLoss.WRONG_RESULT
def broken(device):
    raise RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")
register("cpu", broken)
assert kernel_of(cpu).loss is KernelLoss.NO_COMPILER
def missing(device):
    raise ImportError("No module named triton")
register("cpu", missing)
assert (kernel_of(cpu).kernel, kernel_of(cpu).loss) == (None, KernelLoss.NO_TRITON)
""")
