"""The pytest plugin: started commands, functions on ranks, and failure messages."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from ddpcheck import pytest as plugin
from ddpcheck import pytest_rank
from ddpcheck.analysis.report import Report, Verdict
from ddpcheck.reports.json_report import to_json
from tests.helpers.sample_reports import stored


def write_down(path: str, text: str = "nothing") -> None:
    """Replaces a training function."""
    Path(path).write_text(text)


def checker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, report: Report | None, status: int
) -> tuple[plugin.Checker, list[list[str]]]:
    """A checker whose jobs end immediately with this report."""
    commands: list[list[str]] = []

    def run(command: Sequence[str], cwd: Path, timeout: float) -> tuple[int, str]:
        commands.append(list(command))
        folder = Path(command[command.index("--out") + 1])
        folder.mkdir(parents=True)
        if report is not None:
            (folder / "report.json").write_text(to_json(report))
        return status, "first line\nlast line"

    monkeypatch.setattr(plugin, "_run", run)
    return plugin.Checker(tmp_path, tmp_path), commands


def test_a_script_is_started_on_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, commands = checker(tmp_path, monkeypatch, stored("1-sound"), 0)
    report = check.run("train.py", "--epochs", 1, ranks=3, fail_on="warning", options=["--every", "2"])
    assert report.verdict is Verdict.OK
    [command] = commands
    watch, job = command[: command.index("--")], command[command.index("--") + 1 :]
    assert watch[1:4] == ["-m", "ddpcheck", "run"]
    assert watch[-4:] == ["--fail-on", "warning", "--every", "2"]
    assert job[1:] == [
        "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "train.py", "--epochs", "1"
    ]  # fmt: skip


def test_a_finding_fails_the_test_and_is_in_the_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, _ = checker(tmp_path, monkeypatch, stored("1-learning-rate"), 10)
    with pytest.raises(pytest.fail.Exception) as failed:
        check.run("train.py")
    message = str(failed.value)
    assert message.startswith("Replicas diverge at step 5 in 0.weight (DDP206)\n")
    assert "group 0, lr  0.001   0.001   0.0001" in message
    assert "last line" not in message  # the job itself did not fail


def test_a_failed_job_shows_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = replace(stored("1-sound"), verdict=Verdict.FAILED, exit_code=1)
    check, _ = checker(tmp_path, monkeypatch, report, 1)
    with pytest.raises(pytest.fail.Exception, match="last line"):
        check.run("train.py")


def test_a_missing_report_fails_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, _ = checker(tmp_path, monkeypatch, None, 0)
    with pytest.raises(pytest.fail.Exception, match="wrote no report"):
        check.run("train.py")


def test_ranks_import_the_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check, commands = checker(tmp_path, monkeypatch, stored("1-sound"), 0)
    check.run(write_down, str(tmp_path / "message"), text="from a rank")
    assert commands[0][-3:-1] == ["-m", "ddpcheck.pytest_rank"]
    monkeypatch.setattr(sys, "path", list(sys.path))
    pytest_rank.main(json.loads(commands[0][-1]))
    assert (tmp_path / "message").read_text() == "from a rank"


def test_a_module_that_is_not_importable_is_loaded_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "elsewhere.py"
    file.write_text("def say(path):\n    import pathlib; pathlib.Path(path).write_text(__name__)\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "no_such_name", raising=False)
    call = {"file": str(file), "module": "no_such_name", "function": "say", "path": []}
    pytest_rank.main({**call, "arguments": [str(tmp_path / "message")], "keywords": {}})
    monkeypatch.delitem(sys.modules, "no_such_name")
    assert (tmp_path / "message").read_text() == "no_such_name"


def test_functions_that_ranks_cannot_import_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check, commands = checker(tmp_path, monkeypatch, stored("1-sound"), 0)
    with pytest.raises(TypeError, match="top level of a module"):
        check.run(lambda: None)
    with pytest.raises(TypeError, match="JSON serializable"):
        check.run(write_down, object())
    assert commands == []


def test_a_job_that_takes_too_long_is_stopped(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(60)"]
    with pytest.raises(pytest.fail.Exception, match=r"did not end within 1 seconds:\nbegun"):
        plugin._run(command, tmp_path, 1.0)
