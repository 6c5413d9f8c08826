"""Watching never breaks the job: every entry point into ddpcheck is made to raise, one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.analysis.step_coverage.build import MAIN_CHECKS
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import Run, RunWatched, WatchedRun

pytestmark = pytest.mark.slow

CHAOS = JOBS / "chaos.py"
# Commands at a time. In some jobs the intact rank waits two seconds for the broken one, so they leave cores idle.
PARTS = 3
# A lower bound on the entry points: the job lists all of them by itself.
KNOWN = {
    "agent.open",
    "agent.before_wrap",
    "agent.after_wrap",
    "agent.before_forward",
    "agent.before_step",
    "agent.after_step",
    "agent.group_closed",
    "exit.close",
    "parameters.after_step",
    "optimizers.after_step",
    "structure.wrapper_changed",
}


def test_every_entry_point_may_fail(ddpcheck: RunWatched, unwatched: Run, tmp_path: Path) -> None:
    def run_part(part: int) -> tuple[WatchedRun, dict[str, Any]]:
        out = tmp_path / f"broken-{part}.json"
        command = prepared(CHAOS, "--part", part, "--parts", PARTS, "--out", out)
        done = ddpcheck(*command, out=tmp_path / f"run-{part}")
        # The job succeeds; some checks are lost.
        assert done.status == 10, str(done)
        return done, json.loads(out.read_text())

    plain = tmp_path / "plain.json"
    alone = unwatched(*prepared(CHAOS, "--out", plain))
    assert alone.status == 0, str(alone)
    expected = json.loads(plain.read_text())["jobs"][""]["ranks"]

    with ThreadPoolExecutor(PARTS) as pool:
        parts = list(pool.map(run_part, range(PARTS)))

    broken: set[str] = set()
    wrong = {}
    for done, results in parts:
        assert done.report["verdict"] == "incomplete"
        jobs = results["jobs"]
        assert {entry for entry, result in jobs.items() if entry and not result["reached"]} == set()
        for number, (entry, result) in enumerate(jobs.items()):
            if problems := _wrong(entry, result, expected, done, number):
                wrong[entry] = result, problems
        broken |= {*jobs} - {""}
    assert {entry: [str(each)[:700] for each in problems] for entry, (_, problems) in wrong.items()} == {}
    assert broken == set(parts[0][1]["entries"]) >= KNOWN


def _wrong(
    entry: str, result: Mapping[str, Any], expected: list[str], done: WatchedRun, number: int
) -> list[Any]:
    """What is not as expected in the job in which this entry point failed on rank 1."""
    # The job replaces a parameter after wrapping, with the same values on both ranks: a note.
    replaced = ("DDP104", "note")
    matches = [
        f
        for f in done.report["findings"]
        if f["attempt"] == number and (f["code"], f["severity"]) != replaced
    ]
    summary = [(f["code"], f["severity"], f["ranks"], f["evidence"].get("entry")) for f in matches]
    wrong: list[Any] = []
    if entry == "sharded.of":
        # How parameters are distributed remains unknown, so those of FSDP are not compared.
        summary = [each for each in summary if each[:2] != ("DDP606", "error")]
    severity = "warning" if entry.partition(".")[0] in MAIN_CHECKS else "note"
    if summary != ([("DDP605", severity, [1], entry)] if entry else []):
        wrong.append(summary)
    if result["ranks"] != expected:
        wrong.append("other bits")
    if result["exits"] != [0, 0] or result["late"]:
        wrong.append("exit status")
    return wrong


# Simulates an agent that cannot be imported, in the process that imports torch.
NO_AGENT = """
import runpy, sys
sys.modules["ddpcheck.agent.install"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, {jobs!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_agent_that_cannot_be_installed(ddpcheck: RunWatched, unwatched: Run, tmp_path: Path) -> None:
    job = (JOBS / "battery.py", "--variants", "plain", "--out")
    alone = unwatched(*prepared(*job, tmp_path / "plain.json"))
    assert alone.status == 0, str(alone)
    script = NO_AGENT.format(jobs=str(JOBS))
    done = ddpcheck(sys.executable, "-c", script, *job, tmp_path / "broken.json")
    assert (done.status, done.report["exit_code"]) == (10, 0), str(done)
    results = [json.loads((tmp_path / name).read_text()) for name in ("plain.json", "broken.json")]
    assert results[0]["plain/2"]["ranks"] == results[1]["plain/2"]["ranks"]
    assert done.report["verdict"] == "incomplete"
    assert done.codes() == ["DDP605"]
    assert done.finding("DDP605")["evidence"]["entry"] == "bootstrap.install"
    [fault] = done.files("fault-*.jsonl")
    assert (done.folder / fault).stat().st_mode & 0o777 == 0o600
    assert "ModuleNotFoundError" in (done.folder / fault).read_text()


def test_a_rank_that_cannot_open_its_session(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """Nothing else is known of such a rank, so the report is incomplete."""
    script = tmp_path / "job.py"
    script.write_text(
        "import torch.distributed as d, ddpcheck.agent.rank_context as s\ns.RankContext = None\n"
        "d.init_process_group('gloo')\nprint('trained')\n"
    )
    done = ddpcheck("torchrun", "--nproc-per-node", "1", script)
    assert (done.status, done.report["exit_code"]) == (10, 0), str(done)
    assert done.stdout == "trained\n"
    assert "Traceback" not in done.stderr
    assert done.report["verdict"] == "incomplete"
    assert done.codes() == ["DDP605"]
    fault = done.finding("DDP605")
    assert (fault["ranks"], fault["evidence"]["entry"]) == ([0], "agent.open")
