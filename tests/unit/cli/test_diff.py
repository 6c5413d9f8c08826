"""`ddpcheck diff`: exit statuses, errors and both kinds of output."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from tests.helpers.run_builder import RunBuilder


def build(folder: Path, world_size: int = 2, lr: float = 0.1) -> Path:
    run = RunBuilder(folder, world_size).wrap().optimizer()
    for step in range(4):
        run.apply(step)
        if not step:
            run.hyper(0, {rank: {"0.lr": lr} for rank in run.ranks})
        run.step(step)
    return run.end().save()


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    folder = tmp_path / "ddpcheck-runs"
    build(folder / "20260101-101500-first")
    build(folder / "20260101-111500-second")
    build(folder / "20260101-121500-slower", lr=0.05)
    build(folder / "20260101-131500-wider", world_size=4)
    return folder


def status(*arguments: str) -> int:
    with pytest.raises(SystemExit) as leaving:
        main(["diff", *arguments])
    code = leaving.value.code
    assert isinstance(code, int)
    return code


def test_agreement(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("first", "second") == 0
    assert capsys.readouterr().out.startswith("The runs agree bit for bit over 4 steps\n")


def test_divergence(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("first", str(runs / "20260101-121500-slower")) == 10
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "The runs diverge at step 0, stage hyperparameters, module 0, ranks 0-1"
    assert lines[1] == "  0.lr is 0.1 in run A and 0.05 in run B."
    assert max(map(len, lines)) <= 80


def test_json(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert status("first", "slower", "--json") == 10
    document = json.loads(capsys.readouterr().out)
    assert (document["schema"], document["verdict"], document["method"]) == (1, "parted", "exact")
    assert document["first"]["stage"] == "hyperparameters"
    assert document["first"]["values"][0] == {"what": "0.lr", "a": 0.1, "b": 0.05, "rank": 0}
    assert (document["a"]["world_size"], document["a"]["steps"]) == (2, 4)


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (["first", "nowhere"], "there is no run 'nowhere'"),
        (["first", "wider"], "run A has no gradient sketches"),
        (["first", "second", "--attempt", "3"], "has no attempt 3: it has only attempt 0"),
        (["first", "second", "--attempt", "1,2,3"], "give one or two numbers"),
        (["first", "second", "--attempt", "-1"], "give one or two numbers"),
        (["first", "second", "--rtol", "-1"], "give a number above 0"),
        (["first", "second", "--rtol", "nan"], "give a number above 0"),
    ],
)
def test_usage_errors(
    runs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], printed: str
) -> None:
    assert status(*arguments) == 2
    message = capsys.readouterr()
    assert printed in message.err
    assert message.err.count("\n") == 1
    assert message.out == ""


def test_one_run_is_not_enough(runs: Path) -> None:
    assert status("first") == 2
