"""Settings of a project: pyproject.toml and variables, and findings that it ignores."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.cli.project_settings import project_settings
from ddpcheck.config import Config, environment_variable, options
from ddpcheck.errors import UsageError
from ddpcheck.reports.json_report import to_json
from tests.unit.cli.test_run import Launcher
from tests.unit.reports.views.test_timing import built

REASON = "rank 1 reads from the slow disk, which is replaced next week"
IGNORE = f'[tool.ddpcheck]\nignore = [{{ code = "DDP402", reason = "{REASON}" }}]\n'


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Launcher:
    launcher = Launcher()
    monkeypatch.setitem(sys.modules, "ddpcheck.launcher.run", launcher)
    monkeypatch.chdir(tmp_path)
    return launcher


def run(launcher: Launcher, *arguments: str) -> Config:
    with pytest.raises(SystemExit) as leaving:
        main(["run", *arguments, "--", "true"])
    assert leaving.value.code == 0
    assert launcher.called is not None
    return launcher.called[1]


def test_the_command_line_precedes_the_variable_and_the_variable_the_file(
    launcher: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.ddpcheck]\nfail-on = "warning"\nevery = 4\nhtml = true\nlive = false\n'
    )
    config = run(launcher)
    assert (config.fail_on, config.every, config.html, config.live) == ("warning", 4, "", False)
    monkeypatch.setenv("DDPCHECK_FAIL_ON", "never")
    monkeypatch.setenv("DDPCHECK_OPTIMIZER_STATE", "1")
    config = run(launcher)
    assert (config.fail_on, config.every, config.optimizer_state) == ("never", 4, True)
    config = run(launcher, "--fail-on", "error", "--every", "2")
    assert (config.fail_on, config.every) == ("error", 2)


def test_a_file_above_counts_and_one_without_a_table_does_not(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(IGNORE)
    inner = tmp_path / "src" / "model"
    inner.mkdir(parents=True)
    (inner / "pyproject.toml").write_text("[project]\nname = 'model'\n")
    found = project_settings(inner)
    assert (found.path, found.ignore) == (tmp_path / "pyproject.toml", {"DDP402": REASON})


@pytest.mark.parametrize(
    ("table", "named"),
    [
        ("fail_fast = true", "fail_fast"),
        ("every = [1]", "every"),
        ('ignore = ["DDP402"]', "reason"),
        ('ignore = [{ code = "DDP402", reason = " " }]', "reason"),
        ('ignore = [{ code = "DDP999", reason = "x" }]', "DDP999"),
        ('ignore = [{ code = "DDP201", reason = "x" }]', "DDP201 cannot be ignored"),
        ('ignore = [{ code = "DDP606", reason = "x" }]', "DDP606 cannot be ignored"),
        ("every = ", "not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_run(tmp_path: Path, table: str, named: str) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.ddpcheck]\n{table}\n")
    with pytest.raises(UsageError, match=named):
        project_settings(tmp_path)


def test_an_ignored_finding_is_a_note_with_its_reason(tmp_path: Path) -> None:
    folder = built(tmp_path / "run", 2).save()
    assert ("DDP402", Severity.WARNING) in [
        (finding.code, finding.severity) for finding in analyse_run(folder).findings
    ]
    description = json.loads((folder / "run.json").read_text())
    # A finding that the verdict is about stays, also if run.json was written by hand.
    description["config"] = {**description.get("config", {}), "ignore": {"DDP402": REASON, "DDP201": "x"}}
    (folder / "run.json").write_text(json.dumps(description))
    report = analyse_run(folder)
    [finding] = [finding for finding in report.findings if finding.code == "DDP402"]
    assert finding.severity is Severity.NOTE
    assert finding.message.endswith(f"Ignored in pyproject.toml: {REASON}.")
    assert REASON in to_json(report)


def test_every_option_has_a_variable_of_its_own() -> None:
    names = [environment_variable(name, declared) for name, declared in options()]
    assert len(set(names)) == len(names)
    # Read by ranks or by tests, with another meaning.
    assert not {"DDPCHECK_CONFIG", "DDPCHECK_HASH", "DDPCHECK_DEBUG", "DDPCHECK_TRACES"} & set(names)


def test_help_groups_the_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["run", "--help"])
    text = capsys.readouterr().out
    headings = [
        line.removesuffix(":") for line in text.splitlines() if line.endswith(":") and line[:1].strip()
    ]
    assert headings[-1] == "Settings"
    assert {declared.group for _, declared in options()} <= set(headings)
