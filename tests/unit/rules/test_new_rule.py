"""A new rule is one file: the rules of docs/extending.md are dropped into a folder and show up everywhere."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import ddpcheck.rules.divergence
import ddpcheck.rules.job
from ddpcheck import explanations
from ddpcheck.analysis.live.tracker import LiveTracker
from ddpcheck.analysis.run_reader import RunReader
from ddpcheck.records.kinds.rank import RankHeader
from ddpcheck.reports.ci.junit import to_junit
from ddpcheck.reports.verdict import verdict_sentence
from ddpcheck.rules import rule as registry
from ddpcheck.rules import tables
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder

SECTION = (ROOT / "docs" / "extending.md").read_text().partition("## A rule\n")[2].partition("\n## ")[0]
GENERAL, CAUSE = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
OUTLIERS = {1: ["head.weight"]}


def clear_caches() -> None:
    for cached in (registry.rules, explanations.codes, explanations._pages):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def _new_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "ddp699.py").write_text(GENERAL)
    (folder / "ddp299.py").write_text(CAUSE)
    (folder / "DDP699.md").write_text("# DDP699: Arguments differ across ranks\n\nThe page.\n")
    for package, only in ((ddpcheck.rules.job, "ddp699.py"), (ddpcheck.rules.divergence, "ddp299.py")):
        own = folder / package.__name__
        own.mkdir()
        (folder / only).rename(own / only)
        monkeypatch.setattr(package, "__path__", [*package.__path__, str(own)])
    monkeypatch.setattr(explanations, "__path__", [*explanations.__path__, str(folder)])
    clear_caches()
    yield
    for name in ("ddpcheck.rules.job.ddp699", "ddpcheck.rules.divergence.ddp299"):
        sys.modules.pop(name, None)
    monkeypatch.undo()
    clear_caches()


def with_other_arguments(folder: Path) -> RunBuilder:
    build = RunBuilder(folder, 3)
    header = build.records[1][0]
    assert isinstance(header, RankHeader)
    build.records[1][0] = replace(header, argv=["train.py", "--debug"])
    return build.wrap().optimizer()


def test_the_report_has_its_finding(tmp_path: Path) -> None:
    report = with_other_arguments(tmp_path / "run").train(2).end().report()
    [finding] = report.findings
    assert (finding.code, finding.severity.value, finding.ranks) == ("DDP699", "warning", (1,))
    assert finding.title == "Arguments differ across ranks"
    assert "rguments differ across ranks" in verdict_sentence(report)


def test_it_is_silent_in_a_healthy_run(tmp_path: Path) -> None:
    assert RunBuilder(tmp_path / "run", 3).wrap().optimizer().train(2).end().findings() == []


def test_junit_has_a_case_for_it(tmp_path: Path) -> None:
    report = with_other_arguments(tmp_path / "run").train(2).end().report()
    text = to_junit(report, "warning")
    assert 'classname="ddpcheck.DDP699" name="DDP699 Arguments differ across ranks"' in text
    assert '<failure type="DDP699"' in text
    # It needs a comparison of parameters, and there was one.
    assert 'classname="ddpcheck.DDP299"' in text
    empty = RunBuilder(tmp_path / "empty", 2).wrap().end().report()
    assert "parameters after each step: " in to_junit(empty)


def test_the_live_view_shows_it(tmp_path: Path) -> None:
    """Replicas diverge and no other live rule comes before it."""
    build = with_other_arguments(tmp_path / "run").hyper(0, {rank: {"0.lr": 0} for rank in range(3)})
    run = RunReader(build.train(2).train(2, 2, OUTLIERS).save())
    run.poll()
    finding = LiveTracker(run, "train", began=0.0).state(1.0).finding
    assert finding is not None
    assert finding.code == "DDP299"


def test_a_live_rule_without_divergence_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    others = [rule for rule in registry.rules() if rule.code == "DDP699"]
    monkeypatch.setattr("ddpcheck.analysis.live.tracker.in_report_order", lambda: tuple(others))
    run = RunReader(with_other_arguments(tmp_path / "run").train(2).train(2, 2, OUTLIERS).save())
    run.poll()
    finding = LiveTracker(run, "train", began=0.0).state(1.0).finding
    assert finding is not None
    assert finding.code == "DDP699"


def test_tables_and_pages_include_it() -> None:
    row = (
        "(../ddpcheck/explanations/DDP699.md) | warning | yes | ranks were started with different arguments |"
    )
    assert row in tables.findings_table()
    assert "DDP699" in explanations.codes()
    assert explanations.title("DDP699") == "Arguments differ across ranks"


def test_a_new_cause_explains_a_divergence_in_place_of_the_general_rule(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "zero", 3).wrap().optimizer()
    build.hyper(0, {rank: {"0.lr": 0} for rank in range(3)})
    finding = build.train(2).step(2, outliers=OUTLIERS).end().only("DDP299")
    assert (finding.step, finding.ranks) == (2, (1,))
    other = (
        RunBuilder(tmp_path / "other", 3).wrap().optimizer().hyper(0, {r: {"0.lr": 0.1} for r in range(3)})
    )
    other.train(2).step(2, outliers=OUTLIERS).end().only("DDP201")


def test_a_more_exact_cause_still_comes_first(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path / "run", 3).wrap().optimizer()
    build.hyper(0, {rank: {"0.lr": 0} for rank in range(3)})
    build.train(2).rewrite(2, [1], outliers=OUTLIERS).step(2, outliers=OUTLIERS).end().only("DDP208")
