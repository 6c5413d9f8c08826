"""The code in docs/extending.md does what the page says; `tests/unit/rules/test_new_rule.py` runs its rules."""

from __future__ import annotations

import csv
import io
import re
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import ddpcheck.records.kinds
from ddpcheck import probes
from ddpcheck.analysis import collectors
from ddpcheck.analysis.aggregate.launch import Attempt
from ddpcheck.analysis.aggregate.registry import subscriptions
from ddpcheck.probes import registry as probe_registry
from ddpcheck.records import registry as record_registry
from ddpcheck.records.kinds.rank import RankHeader
from tests.helpers.fake_context import FakeContext
from tests.helpers.paths import ROOT
from tests.helpers.sample_reports import of_many_ranks

PAGE = (ROOT / "docs" / "extending.md").read_text()
NEW_MODULES = (
    "ddpcheck.records.kinds.threads",
    "ddpcheck.probes.threads",
    "ddpcheck.analysis.collectors.threads",
)


def blocks(heading: str) -> list[str]:
    section = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


RECORD, PROBE, COLLECTOR = blocks("A probe")
[REPORT] = blocks("A report")


@pytest.fixture
def _new_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The three files of the page, found by discovery: nothing else is edited."""
    for package, file, source in (
        (ddpcheck.records.kinds, "threads.py", RECORD),
        (probes, "threads.py", PROBE),
        (collectors, "threads.py", COLLECTOR),
    ):
        folder = tmp_path / package.__name__
        path = folder / file
        path.parent.mkdir(parents=True)
        path.write_text(source)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(folder)])
    known = dict(record_registry._registered)
    record_registry.record_kinds.cache_clear()
    subscriptions.cache_clear()
    yield
    for name in NEW_MODULES:
        sys.modules.pop(name, None)
    record_registry._registered.clear()
    record_registry._registered.update(known)
    monkeypatch.undo()
    record_registry.record_kinds.cache_clear()
    subscriptions.cache_clear()


@pytest.mark.usefixtures("_new_files")
def test_a_probe_its_record_and_its_collector_need_no_other_file() -> None:
    [probe_class] = [cls for cls in probe_registry._discover() if cls.name == "threads"]
    context = FakeContext()
    probe: Any = probe_class(context)
    for step in range(2):
        probe.after_step(SimpleNamespace(steps=step))
    released = threading.Event()
    other = threading.Thread(target=released.wait)
    other.start()
    probe.after_step(SimpleNamespace(steps=2))
    released.set()
    other.join()
    records: list[Any] = list(context.records)
    assert [record.step for record in records] == [0, 2]
    assert records[1].count == records[0].count + 1

    assert "threads" in record_registry.record_kinds()
    header = RankHeader(3, 4, "node0", 7, 1, "a", 1.0)
    attempt = Attempt("a")
    for record in (header, *records):
        attempt.feed(header, record)
    collector: Any = import_module("ddpcheck.analysis.collectors.threads").ThreadsCollector
    assert attempt.collector(collector).most == {3: records[1].count}


def test_the_report_has_one_line_per_finding() -> None:
    space: dict[str, Any] = {"__name__": __name__}
    # As a file of its own is read: without the future imports of this file.
    exec(compile(REPORT, "docs/extending.md", "exec", dont_inherit=True), space)
    rows = list(csv.DictReader(io.StringIO(space["to_csv"](of_many_ranks()))))
    assert [(row["code"], row["step"], row["ranks"]) for row in rows] == [("DDP201", "400", "17 924")]
