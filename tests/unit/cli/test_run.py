"""`ddpcheck run`: settings that the launcher receives, and usage errors."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from ddpcheck.__main__ import main
from ddpcheck.cli.options import with_options
from ddpcheck.config import Config, option, options
from ddpcheck.errors import CommandNotStarted, UserError
from ddpcheck.reports.outputs import Outputs


class Launcher(ModuleType):
    """Replaces the launcher and records its arguments."""

    def __init__(self) -> None:
        super().__init__("ddpcheck.launcher.run")
        self.called: tuple[list[str], Config] | None = None
        self.outputs = Outputs()
        self.result: int | UserError = 0

    def run_job(self, command: Sequence[str], settings: Config, outputs: Outputs) -> int:
        self.called = (list(command), settings)
        self.outputs = outputs
        if isinstance(self.result, UserError):
            raise self.result
        return self.result


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launcher = Launcher()
    monkeypatch.setitem(sys.modules, "ddpcheck.launcher.run", launcher)
    return launcher


def status(*arguments: str) -> object:
    with pytest.raises(SystemExit) as leaving:
        main(["run", *arguments])
    return leaving.value.code


def test_defaults(launcher: Launcher) -> None:
    assert status("--", "torchrun", "train.py") == 0
    assert launcher.called == (["torchrun", "train.py"], Config())


def test_every_option(launcher: Launcher) -> None:
    options = "--out there --name n --fail-on warning --fail-fast --every 5 --optimizer-state --quiet"
    more = "--gradients full --save-gradients 0,10:13 --sketch-every 3 --hang-timeout 30 --sample-hz 0.5"
    reports = (
        "--html page.html --junit junit.xml --markdown report.md --json copy.json --github --tensorboard"
    )
    assert status(*options.split(), *more.split(), *reports.split(), "--", "true") == 0
    outputs = Outputs(
        "page.html", Path("junit.xml"), Path("report.md"), Path("copy.json"), True, "warning", tensorboard=""
    )
    settings = Config(
        out=Path("there"),
        name="n",
        fail_on="warning",
        fail_fast=True,
        every=5,
        optimizer_state=True,
        gradients="full",
        save_gradients="0,10:13",
        sketch_every=3,
        quiet=True,
        hang_timeout=30.0,
        sample_hz=0.5,
        html="page.html",
        junit=Path("junit.xml"),
        markdown=Path("report.md"),
        json_copy=Path("copy.json"),
        github=True,
        tensorboard=True,
    )
    assert launcher.called == (["true"], settings)
    assert launcher.outputs == outputs


@pytest.mark.parametrize(("argument", "live"), [("--live", True), ("--no-live", False)])
def test_live_view_option(launcher: Launcher, argument: str, live: bool) -> None:
    assert status(argument, "--", "true") == 0
    assert launcher.called == (["true"], Config(live=live))


@pytest.mark.parametrize(
    ("arguments", "window"),
    [
        ([], ""),
        (["--profile"], "5:8"),
        (["--profile-steps", "20:25"], "20:25"),
        (["--profile", "--profile-steps", "3"], "3"),
    ],
)
def test_profiled_steps(launcher: Launcher, arguments: list[str], window: str) -> None:
    assert status(*arguments, "--", "true") == 0
    assert launcher.called is not None
    assert launcher.called[1].profile == window


@pytest.mark.parametrize("steps", ["x", "5:3", "3,7", "5:", "-1"])
def test_profile_steps_must_be_one_range_with_an_end(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], steps: str
) -> None:
    assert status(f"--profile-steps={steps}", "--", "true") == 2
    assert "--profile-steps" in capsys.readouterr().err
    assert launcher.called is None


@pytest.mark.parametrize(
    ("words", "html"),
    [
        ("-- true", None),
        ("--html -- true", ""),
        ("--html --quiet -- true", ""),
        ("--html page.html -- true", "page.html"),
        ("--html=page.html -- true", "page.html"),
        ("--html true", ""),
        ("-- true --html x.html", None),
    ],
)
def test_html_with_and_without_a_file(launcher: Launcher, words: str, html: str | None) -> None:
    assert status(*words.split()) == 0
    assert launcher.called is not None
    assert launcher.outputs.html == html
    assert launcher.called[0][0] == "true"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--html=page.txt", "must end in .html"),
        ("--html=none/page.html", "there is no folder none"),
        ("--junit=none/x.xml", "there is no folder none"),
        ("--markdown=.", "this is a folder"),
    ],
)
def test_output_files_are_checked_before_the_job(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], words: str, message: str
) -> None:
    assert status(words, "--", "true") == 2
    assert launcher.called is None
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["x", "5:3", "-1"])
def test_invalid_steps(launcher: Launcher, capsys: pytest.CaptureFixture[str], steps: str) -> None:
    assert status(f"--save-gradients={steps}", "--", "true") == 2
    assert "--save-gradients" in capsys.readouterr().err


def test_save_gradients_needs_gradients(launcher: Launcher) -> None:
    assert status("--gradients", "off", "--save-gradients", "3", "--", "true") == 2


@pytest.mark.parametrize(
    "command",
    [
        ["torchrun", "--nproc-per-node", "2", "train.py", "--every", "0"],
        ["python", "-c", "print()", "--", "--help", "--quiet"],
        ["echo", "", "a b", "$HOME", "ü"],
    ],
)
@pytest.mark.parametrize("dashes", [[], ["--"]])
def test_the_command_is_unchanged(launcher: Launcher, dashes: list[str], command: list[str]) -> None:
    assert status(*dashes, *command) == 0
    assert launcher.called == (command, Config())


def test_the_status_is_the_launchers(launcher: Launcher) -> None:
    launcher.result = 10
    assert status("true") == 10


def test_user_errors_are_one_line(launcher: Launcher, capsys: pytest.CaptureFixture[str]) -> None:
    launcher.result = CommandNotStarted("there is no program 'torchrn\x1b'", 127)
    assert status("torchrn") == 127
    captured = capsys.readouterr()
    assert captured.err == "ddpcheck: there is no program 'torchrn\\x1b'\n"
    assert captured.out == ""


@pytest.mark.parametrize("option", ["--json", "--junit", "--out", "--name", "--fail-on"])
def test_an_option_does_not_take_the_dashes_for_its_value(
    launcher: Launcher, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    assert status(option, "--", "true") == 2
    assert f"{option} needs a value" in capsys.readouterr().err
    assert launcher.called is None


@pytest.mark.parametrize("arguments", [[], ["--"], ["--quiet"]])
def test_no_command(launcher: Launcher, capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert status(*arguments) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "ddpcheck run -- torchrun --nproc-per-node 4 train.py" in error
    assert launcher.called is None


@pytest.mark.parametrize(
    "arguments",
    [
        ["--every", "0"],
        ["--every", "-1"],
        ["--every", "many"],
        ["--fail-on", "note"],
        ["--hang-timeout", "-1"],
        ["--hang-timeout", "0.5"],
        ["--hang-timeout", "nan"],
        ["--hang-timeout", "soon"],
        ["--sample-hz", "-1"],
        ["--sample-hz", "0.01"],
        ["--sample-hz", "21"],
        ["--sample-hz", "nan"],
        ["--name", "a/b"],
        ["--name", ""],
        ["--name", ".."],
        ["--name", "a\nb"],
        ["--no-such-option"],
    ],
)
def test_wrong_usage(launcher: Launcher, arguments: list[str]) -> None:
    assert status(*arguments, "--", "true") == 2
    assert launcher.called is None


def test_an_option_is_declared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A field with metadata is an option of the command and reaches the ranks; nothing else has to change."""

    @dataclass(frozen=True, kw_only=True)
    class Extended(Config):
        depth: int = field(
            default=3, metadata=option("How deep to look.", metavar="N", min=1, for_ranks=True)
        )

    monkeypatch.setattr("ddpcheck.config.Config", Extended)
    monkeypatch.setattr("ddpcheck.cli.options.Config", Extended)
    received: list[Config] = []

    @with_options()
    def command(**settings: Any) -> None:
        received.append(Extended.from_options(settings))

    app = typer.Typer()
    app.command()(command)
    app(args=["--depth", "7", "--every", "2"], standalone_mode=False)
    [config] = received
    in_rank = Extended.from_environment(config.to_environment())
    assert isinstance(in_rank, Extended)
    assert (in_rank.depth, in_rank.every) == (7, 2)
    with pytest.raises(Exception, match="greater than or equal to 1"):
        app(args=["--depth", "0"], standalone_mode=False)


# What the launcher tells its ranks beside the options.
OF_THE_LAUNCHER = {
    "run_dir",
    "run_id",
    "exchange_file",
    "own_launcher",
    "launcher_host",
    "launcher_boot",
    "ignore",
}


def test_every_setting_has_help_and_reaches_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    declared = dict(options())
    assert declared.keys() | OF_THE_LAUNCHER == {each.name for each in fields(Config)}
    for declaration in declared.values():
        assert declaration.help.split()[0] in shown
    assert "Stop after N seconds without progress (0: never)" in shown


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--help") == 0
    assert "\n    ddpcheck run -- torchrun --nproc-per-node 4 train.py\n" in capsys.readouterr().out
