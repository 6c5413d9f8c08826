"""Reading a run needs little memory, independent of its length."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.kinds.digests import DigestRecord, Stage, TensorKind
from ddpcheck.records.kinds.modules import HyperRecord, ModuleRecord
from ddpcheck.records.kinds.rank import EndRecord, RankHeader
from ddpcheck.records.registry import RECENT_SUFFIX, recent_header, to_line
from tests.helpers.run_builder import leaves_of, packed

NAMES = [f"layer{number}.weight" for number in range(100)]
STEPS = 20_000


def write_run(
    folder: Path, ranks: int, steps: int, outlier_from: int | None = None, schedule: tuple[int, ...] = ()
) -> int:
    """A long run of records as ranks write them; returns the size of its files."""
    rows = [[name, "float32", [4], 1] for name in NAMES]
    same = packed(leaves_of(NAMES, 0, 0, []), 2)
    other = packed(leaves_of(NAMES, 0, 1, NAMES[:1]), 2)
    for rank in range(ranks):
        with (folder / f"rank-{rank:05d}.jsonl").open("wb") as file:
            file.write(to_line(RankHeader(rank, ranks, "node0", 100 + rank, 1, "a1", 1.0, algorithm="xxh3")))
            file.write(to_line(ModuleRecord(0, "Net", list(range(ranks)), 0, rows, [])))
            parts = to_line(
                DigestRecord(
                    0, Stage.PARAMS.value, 314159, "r" * 32, same, 2, time=1.5, optimizer=0, forward=271828
                )
            ).split(b"314159")
            for step in range(steps):
                if rank in schedule:
                    file.write(to_line(HyperRecord(0, step, {"0.lr": 1 / (step + 1)})))
                line = (b"%d" % step).join(parts).replace(b"271828", b"%d" % (step + 1))
                if outlier_from is not None and rank == 1 and step >= outlier_from:
                    line = line.replace(b"r" * 32, b"s" * 32).replace(same.encode(), other.encode())
                file.write(line)
            file.write(to_line(EndRecord("exit", 2.0)))
    return sum(path.stat().st_size for path in folder.glob("rank-*"))


MEASURE = """
import sys
from pathlib import Path
from ddpcheck.analysis.report_builder import analyse_run

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))

small, large = map(Path, sys.argv[1:])
analyse_run(small)
before = peak()
report = analyse_run(large)
print(peak() - before, report.steps, max(check.compared for check in report.checks))
print(*[(finding.code, finding.step) for finding in report.findings])
"""


def test_twenty_thousand_steps_of_four_ranks(tmp_path: Path) -> None:
    for name, steps in (("small", 1000), ("large", STEPS)):
        (tmp_path / name).mkdir()
        size = write_run(tmp_path / name, 4, steps, outlier_from=steps - 5)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, tmp_path / "small", tmp_path / "large"],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    measured, findings = done.stdout.splitlines()
    grown, steps, compared = map(int, measured.split())
    assert (steps, compared) == (STEPS, STEPS)
    assert findings == f"('DDP201', {STEPS - 5})"
    assert size > 30 << 20
    # Twenty times the steps need one chunk of each file, less than a quarter of the total.
    assert grown << 10 < 8 << 20


@pytest.mark.parametrize("schedule", [(0,), (0, 1)])
def test_ranks_that_write_more_lines_a_step_do_not_fall_behind(
    tmp_path: Path, schedule: tuple[int, ...]
) -> None:
    """Read line by line in turn, the others would run ahead and wait in memory."""
    write_run(tmp_path, 4, 3000, schedule=schedule)
    run = RunReader(tmp_path)
    most = 0
    agreement_of = run.attempts
    real = RunReader._read

    def spy(self: RunReader, path: Path, *shares: int) -> bool:
        nonlocal most
        result = real(self, path, *shares)
        most = max([most, *(len(attempt.agreement._pending) for attempt in agreement_of.values())])
        return result

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunReader, "_read", spy)
        run.poll()
    assert 0 < most < 1100
    (attempt,) = run.attempts.values()
    assert attempt.agreement.stats_of(((0, 1, 2, 3), 0), Stage.PARAMS, TensorKind.PARAMETERS).compared == 3000


def test_a_growing_run_is_read_incrementally(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 50)
    contents = {path: path.read_bytes() for path in sorted(tmp_path.glob("rank-*"))}
    for path in contents:
        path.write_bytes(b"")
    run = RunReader(tmp_path)
    assert not run.poll()
    for cut in (100, 8000, 8001, 12_000, None):
        for path, data in contents.items():
            path.write_bytes(data[:cut])
        assert run.poll() is (cut not in (100, 8001))
    assert not run.poll()
    (attempt,) = run.attempts.values()
    assert attempt.agreement.stats_of(((0, 1), 0), Stage.PARAMS, TensorKind.PARAMETERS).compared == 50
    assert all(rank.end is not None for rank in attempt.ranks.values())


def test_a_file_that_appears_late_is_found(tmp_path: Path) -> None:
    write_run(tmp_path, 2, 5)
    late = tmp_path / "rank-00001.jsonl"
    data = late.read_bytes()
    late.unlink()
    run = RunReader(tmp_path)
    assert run.poll()
    late.write_bytes(data)
    assert run.poll()
    (attempt,) = run.attempts.values()
    assert attempt.ranks.keys() == {0, 1}
    assert attempt.agreement.stats_of(((0, 1), 0), Stage.PARAMS, TensorKind.PARAMETERS).compared == 5


def test_records_that_a_killed_rank_had_collected_for_a_block_are_read(tmp_path: Path) -> None:
    """The last steps of a rank are in its second file; those of the other ranks may be too."""
    write_run(tmp_path, 3, 30, outlier_from=25)
    for rank in (1, 2):
        path = tmp_path / f"rank-{rank:05d}.jsonl"
        *lines, _ = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:20]))
        recent = recent_header(path.stat().st_size) + b"".join(lines[20:])
        path.with_suffix(RECENT_SUFFIX).write_bytes(recent)
    run = RunReader(tmp_path)
    run.finish()
    (attempt,) = run.attempts.values()
    assert [attempt.steps(rank) for rank in range(3)] == [30] * 3
    (module,) = attempt.modules()
    stats = attempt.agreement.stats_of(module, Stage.PARAMS, TensorKind.PARAMETERS)
    assert (stats.compared, stats.differing) == (30, 5)
    assert stats.first is not None
    assert stats.first.key.step == 25
