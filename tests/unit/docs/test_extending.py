"""The code in docs/extending.md does what the page says."""

from __future__ import annotations

import csv
import io
import re
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddpcheck.analysis import context, report_builder
from ddpcheck.records.kinds.rank import RankHeader
from tests.helpers.fake_context import FakeContext
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder
from tests.helpers.sample_reports import of_many_ranks

PAGE = (ROOT / "docs" / "extending.md").read_text()


def examples() -> tuple[dict[str, Any], ...]:
    """What each block of Python on the page defines."""
    found = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        space: dict[str, Any] = {"__name__": __name__}
        # As a file of its own would be read: not with the imports from the future that this file has.
        exec(compile(block, "docs/extending.md", "exec", dont_inherit=True), space)
        found.append(space)
    return tuple(found)


PROBE, RULE, REPORT = examples()


def test_the_probe_writes_when_something_changes() -> None:
    context = FakeContext()
    probe = PROBE["ThreadsProbe"](context)
    probe.after_step(SimpleNamespace(steps=0))
    probe.after_step(SimpleNamespace(steps=1))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    probe.after_step(SimpleNamespace(steps=2))
    done.set()
    other.join()
    first, second = context.records
    assert (first.step, second.step) == (0, 2)  # type: ignore[union-attr]
    assert second.count == first.count + 1  # type: ignore[union-attr]


def test_the_rule_names_the_odd_rank_and_is_silent_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(context, "title", lambda code: "Arguments differ across ranks")
    monkeypatch.setattr(report_builder, "RULES", (RULE["find"],))
    sound = RunBuilder(tmp_path / "sound", 3).wrap().train(2).end()
    assert sound.findings() == []
    build = RunBuilder(tmp_path / "odd", 3)
    header = build.records[1][0]
    assert isinstance(header, RankHeader)
    build.records[1][0] = replace(header, argv=["train.py", "--debug"])
    finding = build.wrap().train(2).end().only("DDP699")
    assert finding.ranks == (1,)
    assert "rank 1: train.py --debug" in finding.message


def test_the_report_has_one_line_a_finding() -> None:
    report = of_many_ranks()
    rows = list(csv.DictReader(io.StringIO(REPORT["to_csv"](report))))
    assert [(row["code"], row["step"], row["ranks"]) for row in rows] == [("DDP201", "400", "17 924")]
