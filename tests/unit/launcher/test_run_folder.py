"""Creates and names run folders, and rejects unusable ones."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpcheck.config import Config
from ddpcheck.errors import OutputFolderError
from ddpcheck.launcher import run_folder
from ddpcheck.launcher.run_folder import (
    begin_run,
    find_job_id,
    finish_run,
    make_run_folder,
    run_name,
    spans_nodes,
)
from ddpcheck.records.reader import read_run_file

COMMAND = ["torchrun", "--nproc", "4", "train.py", "--token", "abc"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "NNODES", "PET_NNODES", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture(params=[0o000, 0o022, 0o777])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def config(path: Path) -> Config:
    return Config(run_dir=str(path), run_id="x")


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (COMMAND, "train"),
        (["python", "-m", "torch.distributed.run", "--nproc", "2", "src/fit model.py"], "fit-model"),
        (["python", "-m", "pkg.train", "--x"], "train"),
        (["python", "-m", "pkg.__main__"], "pkg"),
        (["torchrun", "--module", "pkg.sub.main"], "main"),
        (["bash", "./scripts/go.sh"], "go"),
        (["accelerate", "launch", "a/b/c.py"], "c"),
        (["/usr/bin/srun", "-n", "4", "job"], "srun"),
        (["python", "-c", "print(1)"], "python"),
        (["./.py"], "py"),
        (["x" * 99 + ".py"], "x" * 40),
        ([], "run"),
    ],
)
def test_name(command: list[str], name: str) -> None:
    assert run_name(command) == name


def test_default_folder(here: Path) -> None:
    first, second = make_run_folder(COMMAND), make_run_folder(COMMAND)
    assert first.path != second.path
    assert first.path.parent == here / "ddpcheck-runs"
    assert first.run_id.endswith("-train")
    assert make_run_folder(COMMAND, name="my run").path.name.endswith("-my-run")


def test_permissions_do_not_depend_on_the_umask(here: Path, umask: int) -> None:
    (here / "ddpcheck-runs").mkdir()
    (here / "ddpcheck-runs").chmod(0o755)
    folder = make_run_folder(COMMAND)
    begin_run(folder, COMMAND, config(folder.path))
    finish_run(folder, 0, 1.0)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert (folder.path / "run.json").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.path.iterdir()] == ["run.json"]


def test_run_file(here: Path) -> None:
    folder = make_run_folder(COMMAND, out=Path("out"))
    assert folder.path == here / "out"
    assert begin_run(folder, COMMAND, config(folder.path)) == folder
    begun = json.loads((folder.path / "run.json").read_text())
    assert begun["schema"] == 1
    assert begun["command"] == [*COMMAND[:-1], "***"]
    assert begun["cwd"] == str(here)
    assert begun["config"]["run_dir"] == str(here / "out")
    assert "ended" not in begun
    finish_run(folder, 3, 1.23456)
    ended = read_run_file(folder.path)
    assert (ended["exit_code"], ended["seconds"]) == (3, 1.235)
    assert ended["id"] == begun["id"]
    assert ended["ended"] >= begun["started"]


def test_refusals(here: Path) -> None:
    (here / "file").write_text("")
    for out in ("file", "file/below", "/proc/nope/run"):
        with pytest.raises(OutputFolderError, match="--out"):
            make_run_folder(COMMAND, out=Path(out))
    folder = make_run_folder(COMMAND, out=Path("taken"))
    begin_run(folder, COMMAND, config(folder.path))
    with pytest.raises(OutputFolderError, match="already contains a run"):
        make_run_folder(COMMAND, out=Path("taken"))
    (here / "old").mkdir()
    (here / "old" / "rank-00000.jsonl").write_text("")
    with pytest.raises(OutputFolderError, match="already contains a run"):
        make_run_folder(COMMAND, out=Path("old"))
    (here / "ddpcheck-runs").write_text("")
    with pytest.raises(OutputFolderError, match="is a file"):
        make_run_folder(COMMAND)


def test_an_empty_folder_is_used(here: Path) -> None:
    (here / "empty").mkdir()
    assert make_run_folder(COMMAND, out=Path("empty")).path == here / "empty"


def test_a_folder_of_other_files_is_left_alone(here: Path) -> None:
    (here / "photos").mkdir()
    (here / "photos" / "cat.png").touch()
    with pytest.raises(OutputFolderError, match="contains other files"):
        make_run_folder(COMMAND, out=Path("photos"))
    # Another node is about to begin the run, or has begun.
    (here / "beginning").mkdir()
    (here / "beginning" / ".run.json.node1.77").touch()
    assert make_run_folder(COMMAND, out=Path("beginning")).path == here / "beginning"
    (here / "beginning" / "node-a.jsonl").touch()
    (here / "beginning" / "captures").mkdir()
    assert make_run_folder(COMMAND, out=Path("beginning")).path == here / "beginning"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_unwritable(here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    with pytest.raises(OutputFolderError, match="permission denied"):
        make_run_folder(COMMAND, out=Path("locked/run"))


def test_nodes_of_one_job_share_a_folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["torchrun", "--nnodes", "2", "train.py"]
    first = make_run_folder(command, out=Path("shared"))
    begin_run(first, command, config(first.path))
    second = make_run_folder(command, out=Path("shared"))
    assert second.joined
    assert begin_run(second, command, config(second.path)).joined
    # Not joined: another job, a job on one node, and a run whose launcher has ended.
    for other in (["torchrun", "--nnodes", "2", "eval.py"], ["torchrun", "train.py"]):
        with pytest.raises(OutputFolderError):
            make_run_folder(other, out=Path("shared"))
    monkeypatch.setattr(run_folder, "process_start", lambda pid: -1)
    with pytest.raises(OutputFolderError):
        make_run_folder(command, out=Path("shared"))
    finish_run(first, 0, 1.0)
    monkeypatch.undo()
    monkeypatch.chdir(here)
    with pytest.raises(OutputFolderError):
        make_run_folder(command, out=Path("shared"))


@pytest.mark.parametrize(
    ("command", "environ", "several"),
    [
        (["torchrun", "--nnodes=1:4", "t.py"], {}, True),
        (["torchrun", "--nnodes", "1", "t.py"], {}, False),
        (["torchrun", "t.py", "--nnodes"], {}, False),
        (["accelerate", "launch", "--num_machines", "2", "t.py"], {}, True),
        (["python", "t.py"], {"SLURM_NNODES": "2"}, True),
        (["python", "t.py"], {"SLURM_NNODES": "1"}, False),
        ([], {}, False),
    ],
)
def test_spans_nodes(command: list[str], environ: dict[str, str], several: bool) -> None:
    assert spans_nodes(command, environ) is several


SLURM = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "1"}


@pytest.mark.parametrize(
    ("given", "command", "environ", "expected"),
    [
        ("mine", ["torchrun", "--rdzv-id", "7"], SLURM, "mine"),
        ("", ["torchrun", "--rdzv-id", "7", "train.py"], SLURM, "7"),
        ("", ["torchrun", "--rdzv_id=7", "train.py"], {}, "7"),
        ("", ["torchrun", "--rdzv-id", "none", "train.py"], {}, ""),
        ("", ["torchrun", "train.py"], {"PET_RDZV_ID": "8"}, "8"),
        ("", ["python", "train.py"], SLURM, "42.1"),
        ("", ["python", "train.py"], {**SLURM, "SLURM_RESTART_COUNT": "2"}, "42.1.2"),
        ("", ["python", "train.py"], {"PBS_JOBID": "5.head"}, "5.head"),
        ("", ["python", "train.py"], {}, ""),
    ],
)
def test_job_id_sources_in_order(
    given: str, command: list[str], environ: dict[str, str], expected: str
) -> None:
    assert find_job_id(given, command, environ) == expected
