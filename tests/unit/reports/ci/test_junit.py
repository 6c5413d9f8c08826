"""JUnit XML: true to the schema that Jenkins publishes, and to what was and was not checked."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.analysis.step_coverage.model import Coverage
from ddpcheck.explanations import codes
from ddpcheck.reports.ci.junit import to_junit
from tests.helpers.paths import ROOT
from tests.helpers.sample_reports import attacking, of_many_ranks, stored

SCHEMA = ROOT / "tests" / "helpers" / "junit-10.xsd"
UNKNOWN = Report(Verdict.INCOMPLETE, 0, 0, ("x\x00\ufffe",), None, (), (), ())


def cases(report: Report, fail_on: str = "error") -> dict[str, ElementTree.Element]:
    suite = ElementTree.fromstring(to_junit(report, fail_on).encode()).find("testsuite")
    assert suite is not None
    return {case.get("classname", ""): case for case in suite.iter("testcase")}


def outcome(case: ElementTree.Element) -> str:
    return " ".join(child.tag for child in case) or "passed"


@pytest.mark.parametrize(
    "report", [stored("1-sound"), attacking(), stored("1-killed"), of_many_ranks(), UNKNOWN]
)
def test_it_follows_the_schema(report: Report, tmp_path: Path) -> None:
    xmlschema = pytest.importorskip("xmlschema")
    file = tmp_path / "junit.xml"
    file.write_text(to_junit(report), encoding="utf-8")
    xmlschema.XMLSchema(SCHEMA).validate(file)


def test_one_case_for_each_code_and_one_for_the_command() -> None:
    others = {"ddpcheck.command", "ddpcheck.coverage"}
    assert set(cases(stored("1-sound"))) == {*others, *(f"ddpcheck.{code}" for code in codes())}


@pytest.mark.parametrize(
    ("policy", "expected"),
    [(("error", False), "error"), (("error", True), "system-out"), (("never", False), "system-out")],
)
def test_a_gap_in_the_coverage_is_an_error_unless_it_is_accepted(
    policy: tuple[str, bool], expected: str
) -> None:
    incomplete = replace(stored("1-sound"), coverage=Coverage(False, "not_compared", 12, 6))
    suite = ElementTree.fromstring(to_junit(incomplete, *policy).encode()).find("testsuite")
    assert suite is not None
    [case] = [case for case in suite.iter("testcase") if case.get("classname") == "ddpcheck.coverage"]
    assert [child.tag for child in case] == [expected]
    assert suite.get("errors") == ("1" if expected == "error" else "0")
    assert outcome(cases(stored("1-sound"))["ddpcheck.coverage"]) == "passed"


def test_a_finding_fails_its_case_and_no_other() -> None:
    by_name = cases(stored("1-learning-rate"))
    assert [name for name, case in by_name.items() if case.find("failure") is not None] == ["ddpcheck.DDP206"]
    failure = by_name["ddpcheck.DDP206"].find("failure")
    assert failure is not None
    assert failure.get("type") == "DDP206"
    assert "group 0, lr  0.001   0.001   0.0001" in (failure.text or "")
    assert "fix: Compute learning rates" in (failure.text or "")


def test_counts_are_those_of_the_cases() -> None:
    suite = ElementTree.fromstring(to_junit(stored("1-learning-rate")).encode()).find("testsuite")
    assert suite is not None
    outcomes = [outcome(case) for case in suite.iter("testcase")]
    assert int(suite.get("tests", "")) == len(outcomes)
    assert int(suite.get("failures", "")) == outcomes.count("failure") == 1
    assert int(suite.get("skipped", "")) == outcomes.count("skipped") > 0


def test_unchecked_codes_are_skipped_and_not_passed() -> None:
    # This run was recorded before gradients were checked.
    by_name = cases(stored("1-learning-rate"))
    assert outcome(by_name["ddpcheck.DDP204"]) == "skipped"
    assert outcome(by_name["ddpcheck.DDP201"]) == "passed"
    nothing = cases(UNKNOWN)
    assert outcome(nothing["ddpcheck.DDP201"]) == outcome(nothing["ddpcheck.command"]) == "skipped"


@pytest.mark.parametrize(
    ("fail_on", "expected"), [("error", "system-out"), ("warning", "failure"), ("never", "system-out")]
)
def test_warnings_fail_where_the_run_fails_on_them(fail_on: str, expected: str) -> None:
    warning = Finding("DDP303", Severity.WARNING, "Every epoch came in the same order", "it did")
    report = replace(stored("1-sound"), findings=(warning,))
    assert outcome(cases(report, fail_on)["ddpcheck.DDP303"]) == expected


def test_a_command_that_failed_is_an_error() -> None:
    report = replace(stored("1-sound"), verdict=Verdict.FAILED, exit_code=3)
    error = cases(report)["ddpcheck.command"].find("error")
    assert error is not None
    assert error.get("type") == "status 3"
