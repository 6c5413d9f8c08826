"""`ddpcheck trace`: output, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddpcheck.__main__ import main
from tests.helpers.trace_builder import all_reduce, kernel, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "traces"
    folder.mkdir()
    write(folder / "rank0.json", all_reduce(0, 100), 0)
    write(folder / "rank1.json", all_reduce(60, 100), 1)
    return folder


def run(*arguments: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["trace", *map(str, arguments)])
    code = ended.value.code
    return code if isinstance(code, int) else 0


def test_terminal(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(folder) == 0
    out, err = capsys.readouterr()
    assert "Rank 1 arrived last most often: in 1 of 1 collectives." in out
    assert err == ""


def test_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", *sorted(folder.iterdir())) == 0
    document = json.loads(capsys.readouterr().out)
    assert [rank["wait_ns"] for rank in document["ranks"]] == [60_000, 0]
    assert document["transfer_ns"] == 40_000


def test_merged(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "all.json.gz"
    assert run(folder, "--merged", out) == 0
    assert out.exists()
    assert "One timeline of all ranks is in" in capsys.readouterr().out
    # With --json nothing but JSON is printed.
    assert run(folder, "--json", "--merged", out) == 0
    json.loads(capsys.readouterr().out)


def test_a_folder_with_a_bad_file(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken.json").write_text('{"traceEvents": [{"na')
    assert run(folder) == 1
    # A long path may be broken anywhere.
    out = "".join(capsys.readouterr().out.split())
    assert "leftout:" in out
    assert "broken.jsoniscutoff" in out
    assert "Rank1arrivedlast" in out


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hello", "is not a trace: it does not begin like JSON"),
        ('{"traceEvents": [{"ph": "X"', "is cut off"),
        ('{"lr": 1}', "is JSON but not a trace"),
        ('{"traceEvents": []}', "contains no communication"),
    ],
)
def test_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str) -> None:
    (tmp_path / "trace.json").write_text(text)
    assert run(tmp_path / "trace.json") == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ddpcheck: ")
    assert message in err
    assert err.count("\n") == 1


def test_only_compute(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(write(tmp_path / "rank0.json", kernel("gemm", 0, 5))) == 1
    assert "contains no communication" in capsys.readouterr().err


def test_usage(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 2
    assert run(folder, "--merged", tmp_path / "picture.png") == 2
    assert run(tmp_path / "nowhere.json") == 1
    assert "there is no file" in capsys.readouterr().err
    assert run("--help") == 0
    assert "ddpcheck trace rank0.json.gz" in capsys.readouterr().out
