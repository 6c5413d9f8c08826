"""The table kernel compiled for real GPUs without one: loads, registers, spills and instructions per element."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ddpcheck.probes.scan.device_kernels import Kind
from ddpcheck.records.sketch_signs import BLOCK_WORDS

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from ddpcheck.probes.scan import triton_table as kernels  # noqa: E402

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
NVIDIA = [80, 90, 100]
GFX942 = GPUTarget("hip", "gfx942", 64)
WORDS_PER_THREAD = BLOCK_WORDS // kernels.THREADS
# Instructions of the loop per word of four bytes, in the generated code: with the branch for misaligned tiles and that
# for a tile in two blocks of the sketch, which most tiles do not take.
LIMITS = {Kind.FLOAT32: 68, Kind.BFLOAT16: 80, Kind.FLOAT16: 80}
AMD_LIMITS = {Kind.FLOAT32: 66, Kind.BFLOAT16: 84, Kind.FLOAT16: 84}

SIGNATURE = {
    "rows": "*i64", "addresses": "*i64", "orders": "*i64", "programs": "*i32", "keys": "*i64", "signs": "*i32",
    "parts": "*i64", "KINDS": "constexpr", "ORDERS": "constexpr",
}  # fmt: skip


class Loop(NamedTuple):
    """A loop of the generated code, by its instructions."""

    body: list[str]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.body)


def compiled(target: Any, kinds: int, orders: bool, **options: int) -> Any:
    aligned = {(index,): [["tt.divisibility", 16]] for index in range(7)}
    source = ASTSource(kernels.scan_programs, SIGNATURE, {"KINDS": kinds, "ORDERS": orders}, aligned)
    warps = kernels.THREADS // target.warp_size
    everything = {"num_warps": warps, "enable_fp_fusion": False, **options}
    return triton.compile(source, target=target, options=everything)


def for_nvidia(capability: int, kinds: int, orders: bool = False) -> Any:
    return compiled(GPUTarget("cuda", capability, 32), kinds, orders, maxnreg=kernels.MOST_REGISTERS)


def tool(name: str, *arguments: str) -> str:
    path = TOOLS / name
    if not path.exists():
        pytest.skip(f"this Triton has no {name}")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True, timeout=300)
    return done.stdout


def loops(disassembly: str) -> list[Loop]:
    """From the target of each backward branch to the branch."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    found = []
    for line in disassembly.splitlines():
        if label := re.match(r"\s*(\.L_\S+):", line):
            labels[label[1]] = len(lines)
        if instruction := re.match(r"\s*/\*[0-9a-f]+\*/\s+(.*?);", line):
            lines.append(instruction[1])
            branch = re.search(r"BRA.*?`\((\.L_\S+)\)", instruction[1])
            if branch and branch[1] in labels:
                found.append(Loop(lines[labels[branch[1]] :]))
    return found


def resources(tmp_path: Path, cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of the stack, to which registers are spilled."""
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    usage = tool("cuobjdump", "-res-usage", str(path))
    match = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert match is not None, usage
    return int(match[1]), int(match[2])


@pytest.mark.parametrize("capability", NVIDIA)
def test_the_whole_kernel_fits_into_its_registers(capability: int, tmp_path: Path) -> None:
    registers, stack = resources(tmp_path, for_nvidia(capability, kernels.ALL_KINDS).asm["cubin"])
    assert registers <= kernels.MOST_REGISTERS
    assert stack == 0


@pytest.mark.parametrize("capability", NVIDIA)
@pytest.mark.parametrize("kind", list(LIMITS), ids=lambda kind: kind.name)
def test_the_loop_reads_with_wide_loads_and_no_double_precision(
    capability: int, kind: Kind, tmp_path: Path
) -> None:
    cubin = for_nvidia(capability, 1 << kind).asm["cubin"]
    path = tmp_path / "kernel.cubin"
    path.write_bytes(cubin)
    # The loop that computes digest and sketch is the only one that adds up across threads.
    main = [loop for loop in loops(tool("nvdisasm", "-c", str(path))) if loop.count("SHFL|REDUX")]
    assert len(main) == 1
    loop = main[0]
    assert loop.count(r"LDG\S*\.128") == WORDS_PER_THREAD // 4
    assert loop.count(r"\b(DADD|DMUL|DFMA)\b") == 0
    assert loop.count(r"\b(LDL|STL)") == 0
    assert len(loop.body) / WORDS_PER_THREAD <= LIMITS[kind], len(loop.body) / WORDS_PER_THREAD


def test_other_orders_of_memory_fit_into_the_registers(tmp_path: Path) -> None:
    """One kind of element: the part that finds the position of an element is the same for all kinds."""
    registers, _ = resources(tmp_path, for_nvidia(90, 1 << Kind.FLOAT32, orders=True).asm["cubin"])
    assert registers <= kernels.MOST_REGISTERS


def test_it_compiles_for_amd_without_spills() -> None:
    assembly = compiled(GFX942, kernels.ALL_KINDS, False).asm["amdgcn"]
    assert re.search(r"\.vgpr_spill_count:\s+0\b", assembly)
    assert re.search(r"\.sgpr_spill_count:\s+0\b", assembly)
    registers = re.search(r"\.vgpr_count:\s+(\d+)", assembly)
    assert registers is not None
    assert int(registers[1]) <= 128


def amd_loops(assembly: str) -> list[Loop]:
    """By the comments of the compiler: the blocks of each innermost loop."""
    blocks: dict[str, list[str]] = {}
    header = ""
    for line in assembly.splitlines():
        if label := re.match(r"\.LBB0_\d+:(.*)", line):
            comment = label[1]
            inner = re.search(r"in Loop: Header=(BB\d+_\d+) ", comment)
            own = line.partition(":")[0].removeprefix(".L") if "Loop Header" in comment else ""
            header = inner[1] if inner else own
        elif header and (instruction := re.match(r"\s+([a-z]+_\S+.*)", line)):
            blocks.setdefault(header, []).append(instruction[1])
    return list(map(Loop, blocks.values()))


@pytest.mark.parametrize("kind", list(AMD_LIMITS), ids=lambda kind: kind.name)
def test_the_loop_for_amd_reads_with_wide_loads_and_no_double_precision(kind: Kind) -> None:
    found = amd_loops(compiled(GFX942, 1 << kind, False).asm["amdgcn"])
    main = [loop for loop in found if loop.count(r"_dpp\b")]
    assert len(main) == 1
    loop = main[0]
    assert loop.count(r"(global|buffer|flat)_load_dwordx4") == WORDS_PER_THREAD // 4
    assert loop.count("_f64") == 0
    assert loop.count("scratch_") == 0
    # A wave executes vector and scalar instructions: both are counted, as the limit of the docs does.
    assert len(loop.body) / WORDS_PER_THREAD <= AMD_LIMITS[kind], len(loop.body) / WORDS_PER_THREAD
