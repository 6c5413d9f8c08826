"""`ddpcheck explain`, and the rest of the command line."""

from __future__ import annotations

import pytest

from ddpcheck import explanations
from ddpcheck.__main__ import main
from ddpcheck.version import VERSION


def status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as leaving:
        main(list(arguments))
    return leaving.value.code


@pytest.mark.parametrize("code", ["DDP201", "ddp201", " Ddp201", "201"])
def test_a_page(code: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("explain", code) == 0
    assert capsys.readouterr().out == explanations.page("DDP201")


def test_a_page_on_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert status("explain", "DDP201") == 0
    shown = capsys.readouterr().out
    assert "Parameters diverged" in shown
    assert "**" not in shown


def test_the_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("explain") == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(explanations.codes())
    assert "DDP201  Parameters diverged" in lines


@pytest.mark.parametrize("beginning", ["DDP30", "ddp30", "30"])
def test_all_codes_with_one_beginning(beginning: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("explain", beginning) == 0
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == [code for code in explanations.codes() if code.startswith("DDP30")]


@pytest.mark.parametrize(("code", "message"), [("DDP219", "DDP21"), ("hello", "lists all codes")])
def test_an_unknown_code(code: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("explain", code) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert message in error


@pytest.mark.parametrize("option", ["--version", "-V"])
def test_version(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert status(option) == 0
    assert capsys.readouterr().out == f"ddpcheck {VERSION}\n"


@pytest.mark.parametrize("arguments", [["--no-such"], ["no-such"], ["report", "--no-such"]])
def test_wrong_usage(arguments: list[str]) -> None:
    assert status(*arguments) == 2
