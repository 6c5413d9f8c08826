"""Nothing is lost: killed ranks, truncated files, full disks and removed folders still leave a readable report."""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.report_builder import analyse_run
from tests.helpers.commands import BIN, CommandResult
from tests.helpers.fork_server import prepared
from tests.helpers.launchers import torchrun
from tests.helpers.paths import JOBS
from tests.helpers.tracebacks import frames_of_ddpcheck
from tests.helpers.watched_run import RunWatched, WatchedRun, run_to_end, run_watched

pytestmark = pytest.mark.slow

KILLED, FORKED = JOBS / "killed.py", JOBS / "forked.py"
KILLS = 20


def complaints(done: WatchedRun) -> list[tuple[str, list[int]]]:
    return [(f["code"], f["ranks"]) for f in done.report["findings"] if f["severity"] != "note"]


def test_a_rank_killed_at_a_random_moment_is_reported(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """Twenty jobs, each an attempt; in half of them the other ranks are stopped at once."""
    out = tmp_path / "killed.json"
    done = ddpcheck(*prepared(KILLED, "--jobs", KILLS, "--out", out))
    assert done.status == 9, str(done)
    assert done.report["verdict"] == "failed"
    assert "Traceback" not in done.stderr
    jobs = json.loads(out.read_text())
    # Stacks of ranks that did not end after their peer was killed.
    assert [job["late"] for job in jobs if job["late"]] == []
    wrong = [
        (job, unexpected) for number, job in enumerate(jobs) if (unexpected := _wrong(done, number, job))
    ]
    assert wrong == []
    assert len(jobs) == len(done.report["attempts"]) == KILLS


def _wrong(done: WatchedRun, number: int, job: dict[str, Any]) -> Any:
    """What the report contains about this job, unless it is that its victim died."""
    results = [(f["code"], f["ranks"]) for f in done.report["findings"] if f["attempt"] == number]
    rows = {row["rank"]: row["status"] for row in done.report["attempts"][number]["ranks"]}
    # The others may have been stopped before they opened their files, which is a finding too.
    missing = [rank for rank, status in rows.items() if status == "missing"]
    if job["victim"] in missing:
        # Killed before its first line was written: it counts as a rank that never reported.
        return None if ("DDP601", missing) in results else (results, rows, set())
    wanted = [("DDP602", [job["victim"]])] + ([("DDP601", missing)] if missing else [])
    # Among ranks that ended before the launcher watched them, the first to die is not known.
    unseen = _unseen(done, number)
    if job["victim"] in unseen:
        results = [(code, sorted({*ranks} - (unseen - {job["victim"]}))) for code, ranks in results]
    return None if results == wanted else (results, rows, unseen)


def _unseen(done: WatchedRun, number: int) -> set[int]:
    """Ranks of this job that the launcher found gone, after their parent had reaped them."""
    pids = {row["pid"]: row["rank"] for row in done.report["attempts"][number]["ranks"]}
    return {
        pids[record["pid"]]
        for record in done.node_records("rank_exit")
        if record["pid"] in pids and record.get("found_gone") and record["signal"] is None
    }


TORCHRUN_JOB = """
import os, signal, sys, threading, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
dist.init_process_group("gloo")
if dist.get_rank() == int(sys.argv[1]):
    threading.Timer(float(sys.argv[2]), os.kill, (os.getpid(), signal.SIGKILL)).start()
ddp = DDP(torch.nn.Linear(4, 4))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
while True:
    optimizer.zero_grad()
    ddp(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    time.sleep(0.005)
"""


# Each of the two ranks is killed once.
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_killed_under_torchrun_is_reported(ddpcheck: RunWatched, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    victim, delay = chance.randrange(2), chance.uniform(0.0, 3.0)
    script = tmp_path / "job.py"
    script.write_text(TORCHRUN_JOB)
    done = ddpcheck(*torchrun(2, script, victim, delay))
    assert done.status == 1, str(done)
    assert done.report["verdict"] == "failed"
    assert done.finding("DDP602")["ranks"] == [victim], str(done)
    # The surviving rank fails in the user's code; no frame of ddpcheck is in its traceback.
    assert frames_of_ddpcheck(done.stderr) == [], str(done)
    [attempt] = done.report["attempts"]
    assert [row["status"] for row in attempt["ranks"]][victim] == "died"


@pytest.fixture(scope="module")
def healthy_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two ranks and twenty steps."""
    done = run_watched(prepared(FORKED), tmp_path_factory.mktemp("healthy"))
    assert done.status == 0, str(done)
    return done.folder


@pytest.fixture
def stored(healthy_run: Path, tmp_path: Path) -> Path:
    """A copy of it to damage."""
    return Path(shutil.copytree(healthy_run, tmp_path / "stored"))


def codes(folder: Path) -> list[str]:
    return [finding.code for finding in analyse_run(folder).findings if finding.severity.value != "note"]


def test_a_file_truncated_anywhere_is_read_up_to_there(stored: Path) -> None:
    """A rank killed while it writes: at any length there is no exception and no false divergence."""
    path = stored / "rank-00001.jsonl"
    whole = path.read_bytes()
    assert codes(stored) == []
    for size in sorted({*range(0, len(whole), 97), *range(len(whole) - 200, len(whole))}):
        path.write_bytes(whole[:size])
        results = codes(stored)
        assert set(results) <= {"DDP601", "DDP602"}, (size, results)
        assert len(results) == 1 or size == len(whole) - 1, (size, results)


GARBAGE = [
    b"\n",
    b"\x00" * 300 + b"\n",
    b"\xff\xfe\xfa\n",
    b"null\n",
    b"[]\n",
    b"{}\n",
    b'{"kind":"digest"}\n',
    b'{"kind":"digest","module":{},"stage":1,"step":"x","root":[],"leaves":0,"width":"w"}\n',
    b'{"kind":"digest","module":0,"stage":"params","step":1e999,"root":"","leaves":"","width":2}\n',
    b'{"kind":"digest","module":99,"stage":"params","step":3,"root":"ab","leaves":"!!","width":0}\n',
    b'{"kind":"module","module":0,"name":"x","group":["a"],"ordinal":0,"parameters":[[]],"buffers":[]}\n',
    b'{"kind":"end"}\n',
    b'{"kind":"from the future","what":1}\n',
    b"[" * 100_000 + b"\n",
    b'{"kind":"rank","rank":' + b"9" * 5000 + b"}\n",
    b'{"kind":"digest","module":0,"sta',
]


def test_garbage_between_records_is_skipped(stored: Path, tmp_path: Path) -> None:
    before = analyse_run(stored)
    for path in stored.glob("rank-*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        damaged = [
            part for line, junk in zip(lines, GARBAGE * len(lines), strict=False) for part in (line, junk)
        ]
        # A truncated line would include the next one, so the last kind of garbage comes at the very end only.
        path.write_bytes(b"".join(part for part in damaged if part != GARBAGE[-1]) + GARBAGE[-1])
    for path in stored.glob("node-*.jsonl"):
        path.write_bytes(b"".join(GARBAGE[:-1]) + path.read_bytes() + GARBAGE[-1])
    (stored / "fault-1.jsonl").write_bytes(b"".join(GARBAGE))
    after = analyse_run(stored)
    assert [finding.code for finding in after.findings] == [finding.code for finding in before.findings]
    assert (after.verdict, after.steps, after.world_size) == (before.verdict, before.steps, before.world_size)
    done = run_to_end([BIN / "ddpcheck", "report", stored], tmp_path, {})
    assert done.status in (0, 10)
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\xff", b'{"command": 3, "exit_code": "x"}'])
def test_a_damaged_run_json_loses_only_its_own_content(stored: Path, tmp_path: Path, content: bytes) -> None:
    (stored / "run.json").write_bytes(content)
    done = run_to_end([BIN / "ddpcheck", "report", stored, "--json"], tmp_path, {})
    assert "Traceback" not in done.stderr
    report = json.loads(done.stdout)
    assert (report["world_size"], report["steps"], report["findings"]) == (2, 20, []), str(done)


def test_a_missing_rank_file_is_reported(stored: Path) -> None:
    (stored / "rank-00001.jsonl").unlink()
    report = analyse_run(stored)
    assert report.verdict.value == "incomplete"
    [finding] = [finding for finding in report.findings if finding.code == "DDP601"]
    assert finding.ranks == (1,)


# Enough to fill the small disk and to reach the limit on file sizes.
STEP_COUNT = 400
# Every step is recorded: the records have to fill the disk.
EVERY_STEP = ("--budget", "off")
STEPS = ("--steps", str(STEP_COUNT))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> CommandResult:
    """The job of the tests below, without ddpcheck."""
    done = run_to_end(prepared(FORKED, *STEPS), tmp_path_factory.mktemp("alone"), {})
    assert done.status == 0, str(done)
    return done


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 32 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=32k,mode=700", "tmpfs", str(folder)], check=True)
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.needs("tmpfs")
def test_a_full_disk_loses_records_only(ddpcheck: RunWatched, alone: CommandResult, small_disk: Path) -> None:
    done = ddpcheck(*prepared(FORKED, *STEPS), out=small_disk, options=EVERY_STEP)
    # Not 0: the steps without records were not compared.
    assert (done.status, done.stdout) == (10, alone.stdout), str(done)
    assert "Traceback" not in done.stderr
    # There was no space for report.json either, so the terminal shows what is missing.
    assert "DDP605" in done.stderr
    assert os.strerror(errno.ENOSPC) in done.stderr
    assert "DDP602" not in done.stderr
    report = analyse_run(small_disk)
    assert 0 < report.steps < STEP_COUNT


def test_a_limit_on_file_sizes_loses_records_only(ddpcheck: RunWatched, alone: CommandResult) -> None:
    """The ranks cannot write, the launcher can: report.json lists the ranks whose records are incomplete."""
    limited = f"ulimit -f 12; exec {sys.executable} {FORKED} {' '.join(STEPS)}"
    done = ddpcheck("bash", "-c", limited, options=EVERY_STEP)
    assert (done.status, done.stdout, done.report["exit_code"]) == (10, alone.stdout, 0), str(done)
    assert "Traceback" not in done.stderr
    assert sorted(complaints(done)) == [("DDP605", [0]), ("DDP605", [1])]
    assert done.report["coverage"]["gap"] == "records_lost"


@pytest.mark.parametrize("damage", ["remove", "replace"])
def test_a_removed_run_folder_does_not_affect_the_job(
    ddpcheck: RunWatched, alone: CommandResult, tmp_path: Path, damage: str
) -> None:
    """The job ends as without ddpcheck, which exits with a status of its own because it has no report."""
    words = prepared(FORKED, *STEPS, "--damage", damage, "--damage-at", 50)
    job = shlex.join(map(str, words))
    done = ddpcheck("bash", "-c", f"{job}; echo ended with $?")
    assert done.stdout == f"{alone.stdout}ended with 0\n"
    assert done.status == 1, str(done)
    assert "Traceback" not in done.stderr
    assert str(tmp_path / "run") in done.stderr
