"""Rules are found by their files; metadata, explanation pages and tables in the documentation agree with them."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

from ddpcheck import explanations, rules
from ddpcheck.analysis.report import Report
from ddpcheck.rules import rule as registry
from ddpcheck.rules import tables
from ddpcheck.rules.rule import Need
from tests.helpers.paths import ROOT
from tests.helpers.run_builder import RunBuilder

FOLDER = Path(next(iter(rules.__path__)))
FILES = sorted(FOLDER.rglob("ddp*.py"), key=lambda path: path.stem)


def test_every_rule_file_is_found_once() -> None:
    assert [rule.code.lower() for rule in registry.rules()] == [path.stem for path in FILES]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_file_declares_its_own_code(path: Path) -> None:
    module = importlib.import_module(f"ddpcheck.rules.{path.parent.name}.{path.stem}")
    assert (module.__doc__ or "").startswith(f"{path.stem.upper()}: ")
    assert module.RULE.code == path.stem.upper()
    rule = registry.rule_of(module.RULE.code)
    assert rule is not None
    assert rule.find is module.find


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_rule_imports_no_other_rule(path: Path) -> None:
    imported = [
        node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
    ]
    assert not [
        name for name in imported if name and name.rpartition(".")[2].startswith("ddp") and name != "ddpcheck"
    ]


def test_every_page_starts_with_the_title_of_its_rule() -> None:
    assert {code: explanations.title(code) for code in explanations.codes()} == {
        rule.code: rule.title for rule in registry.rules()
    }


@pytest.mark.parametrize("path", tables.TABLES, ids=str)
def test_tables_in_the_documentation_are_up_to_date(path: Path) -> None:
    """If this fails, run `python -m ddpcheck.rules.tables --write`."""
    text = (ROOT / path).read_text()
    assert text == tables.with_table(text, tables.TABLES[path]())


def test_a_file_without_markers_is_an_error() -> None:
    with pytest.raises(ValueError, match="findings: generated"):
        tables.with_table("no table here", "| a |")


def test_needs_use_the_names_of_the_report(tmp_path: Path) -> None:
    report = RunBuilder(tmp_path, 2).wrap(buffers=["norm.mean"]).optimizer().train(2).end().report()
    names = {check.name for check in report.checks}
    for need in Need:
        if need.is_section:
            assert need.value in Report.__dataclass_fields__
        elif need is not Need.RECORDS:
            assert need.value in names


def test_positions_are_unique_and_live_rules_come_in_that_order() -> None:
    positions = [rule.position for rule in registry.in_report_order()]
    assert positions == sorted(set(positions))
    assert [rule.code[3:] for rule in registry.in_report_order() if rule.live] == (
        ["103", "101", "104", "202", "203", "205", "206", "208", "201", "210", "212", "216"]
    )


def test_causes_of_divergence_have_a_general_case_and_distinct_precedence() -> None:
    for causes in (
        [cause for rule in registry.rules() for cause in rule.parameter_causes],
        [cause for rule in registry.rules() for cause in rule.gradient_causes],
    ):
        precedence = [cause.precedence for cause in causes]
        assert len(set(precedence)) == len(precedence)
        last = max(causes, key=lambda cause: cause.precedence)
        assert last.code in ("DDP201", "DDP203")


def test_an_unknown_code_has_no_rule() -> None:
    assert registry.rule_of("DDP999") is None
    assert not registry.is_about("DDP999", Need.MEMORY)
    assert registry.is_about("DDP501", Need.MEMORY)


def test_no_rule_reports_anything_in_a_healthy_run(tmp_path: Path) -> None:
    build = RunBuilder(tmp_path, 4).wrap(buffers=["norm.mean"]).optimizer().train(10).end()
    assert build.findings() == []
