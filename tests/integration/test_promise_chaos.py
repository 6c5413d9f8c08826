"""Watching never breaks the job: every entry into ddpcheck is made to raise, one at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import JOBS, Run, RunWatched, Watched

pytestmark = pytest.mark.slow

CHAOS = JOBS / "chaos.py"
# What there must be at the least: the test finds the others by itself.
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
    "structure.before_forward",
}


def test_every_entry_point_may_fail(ddpcheck: RunWatched, unwatched: Run, tmp_path: Path) -> None:
    plain, broken = tmp_path / "plain.json", tmp_path / "broken.json"
    alone = unwatched(sys.executable, CHAOS, "--out", plain)
    assert alone.status == 0, str(alone)
    done = ddpcheck(sys.executable, CHAOS, "--out", broken)
    assert done.status == 0, str(done)
    assert done.report["verdict"] in ("ok", "incomplete")

    expected = json.loads(plain.read_text())[""]["ranks"]
    results = json.loads(broken.read_text())
    assert set(results) >= KNOWN
    assert {entry for entry, result in results.items() if entry and not result["reached"]} == set()
    wrong = {
        entry: (result, findings)
        for number, (entry, result) in enumerate(results.items())
        if (findings := _wrong(entry, result, expected, done, number))
    }
    assert wrong == {}


def _wrong(
    entry: str, result: Mapping[str, Any], expected: list[str], done: Watched, number: int
) -> list[Any]:
    """What is not as it should be in the job in which this entry failed on rank 1."""
    found = [f for f in done.report["findings"] if f["attempt"] == number]
    said = [(f["code"], f["severity"], f["ranks"], f["evidence"].get("entry")) for f in found]
    wanted = [("DDP605", "note", [1], entry)] if entry else []
    wrong: list[Any] = [] if said == wanted else [found]
    wrong += [f"{entry} was made to fail"] if entry and entry not in str(said) else []
    wrong += ["other bits"] if result["ranks"] != expected else []
    wrong += ["exit status"] if result["exits"] != [0, 0] or result["late"] else []
    return wrong


# Stands in for an agent that cannot even be imported, in the process that imports torch.
NO_AGENT = """
import runpy, sys
sys.modules["ddpcheck.agent.install"] = None
sys.argv = sys.argv[1:]
sys.path.insert(0, {jobs!r})
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_an_agent_that_cannot_be_installed(ddpcheck: RunWatched, unwatched: Run, tmp_path: Path) -> None:
    job = (JOBS / "battery.py", "--variants", "plain", "--out")
    alone = unwatched(sys.executable, *job, tmp_path / "plain.json")
    assert alone.status == 0, str(alone)
    script = NO_AGENT.format(jobs=str(JOBS))
    done = ddpcheck(sys.executable, "-c", script, *job, tmp_path / "broken.json")
    assert done.status == 0, str(done)
    results = [json.loads((tmp_path / name).read_text()) for name in ("plain.json", "broken.json")]
    assert results[0]["plain/2"]["ranks"] == results[1]["plain/2"]["ranks"]
    assert done.report["verdict"] == "incomplete"
    assert done.codes() == ["DDP605"]
    assert done.finding("DDP605")["evidence"]["entry"] == "bootstrap.install"
    [fault] = done.files("fault-*.jsonl")
    assert (done.folder / fault).stat().st_mode & 0o777 == 0o600
    assert "ModuleNotFoundError" in done.finding("DDP605")["message"]


def test_a_rank_that_cannot_open_its_session(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """Nothing is known of it but that, so the report calls itself incomplete."""
    script = tmp_path / "job.py"
    script.write_text(
        "import torch.distributed as d, ddpcheck.agent.rank_context as s\ns.Session = None\n"
        "d.init_process_group('gloo')\nprint('trained')\n"
    )
    done = ddpcheck("torchrun", "--nproc-per-node", "1", script)
    assert done.status == 0, str(done)
    assert done.stdout == "trained\n"
    assert "Traceback" not in done.stderr
    assert done.report["verdict"] == "incomplete"
    assert done.codes() == ["DDP605"]
    fault = done.finding("DDP605")
    assert (fault["ranks"], fault["evidence"]["entry"]) == ([0], "agent.open")
