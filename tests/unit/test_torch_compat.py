"""A private name that torch lacks disables only the check that needs it, and is reported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.torch_compat import TABLE
from tests.helpers.paths import ROOT
from tests.helpers.watched_run import records_in

# Records with measurements or properties of the process.
NOT_COMPARED = {
    "rank",
    "clocks",
    "memory",
    "memory_parts",
    "startup",
    "end",
    "trace",
    "ready",
    "loader",
    "cost",
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("names")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    job = ROOT / "tests" / "jobs" / "missing_names.py"
    subprocess.run([sys.executable, str(job), str(folder)], check=True, env=environment, timeout=300)
    return folder


def records(folder: Path) -> list[dict[str, Any]]:
    assert not (folder / "error").exists(), (folder / "error").read_text()
    return records_in(folder / "rank-00000.jsonl")


def comparable(raw_records: list[dict[str, Any]]) -> Counter[str]:
    compared = [{**raw, "time": 0} for raw in raw_records if raw["kind"] not in NOT_COMPARED]
    return Counter(json.dumps(raw, sort_keys=True) for raw in compared)


def test_no_fault_if_all_names_exist(runs: Path) -> None:
    written = records(runs / "none")
    assert [raw for raw in written if raw["kind"] == "fault"] == []
    assert {"digest", "backward", "applied", "clocks", "epoch", "loss"} <= {raw["kind"] for raw in written}


@pytest.mark.parametrize("index", range(len(TABLE)), ids=lambda index: f"{index}-{TABLE[index].name}")
def test_a_missing_name_is_reported_or_not_needed(runs: Path, index: int) -> None:
    private, written = TABLE[index], records(runs / str(index))
    assert (runs / str(index) / "weights").read_text() == (runs / "none" / "weights").read_text()
    faults = [raw for raw in written if raw["kind"] == "fault"]
    assert {raw["probe"] for raw in faults} <= {"torch_compat"}, faults
    assert all(raw["error"].endswith(private.check) for raw in faults)
    if not faults:
        rest = [raw for raw in written if raw["kind"] != "fault"]
        assert comparable(rest) == comparable(records(runs / "none"))


def test_no_other_module_uses_a_private_name_of_torch() -> None:
    """Searches for the names of the table as attributes or strings, and for private attributes of `torch`."""
    names = {private.name for private in TABLE if private.name.startswith("_")}
    listed = "|".join(sorted(map(re.escape, names)))
    pattern = re.compile(
        rf"(?<!self)\.({listed})\b|[\"']({listed})[\"']|\btorch(\.\w+)*\._[a-z]|import _[A-Za-z]"
    )
    paths = [*(ROOT / "ddpcheck" / "agent").rglob("*.py"), *(ROOT / "probes").rglob("*.py")]
    for path in sorted([*paths, ROOT / "ddpcheck" / "patches.py", ROOT / "ddpcheck" / "guard.py"]):
        for number, line in enumerate(path.read_text().splitlines(), 1):
            code = line.partition("  #")[0]
            assert not pattern.search(code), f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
