"""Jobs in an environment that has torch and nothing of ddpcheck, and commands that cannot be run at all."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

import pytest
from conftest import EXAMPLE, RunWatched, environment, healthy

# torch, and what `import torch` and its launcher need; numpy is left out, as many people do.
NEEDED = (
    "torch",
    "torchgen",
    "functorch",
    "typing_extensions",
    "sympy",
    "mpmath",
    "networkx",
    "jinja2",
    "markupsafe",
    "fsspec",
    "filelock",
)
ABSENT = ("ddpcheck", "typer", "rich", "xxhash", "pynvml", "numpy")


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment with torch alone, borrowed from this one by links."""
    home = tmp_path_factory.mktemp("bare")
    venv.create(home, with_pip=False, symlinks=True)
    [packages] = home.glob("lib/python*/site-packages")
    for name in NEEDED:
        spec = importlib.util.find_spec(name)
        assert spec is not None, name
        assert spec.origin is not None, name
        origin = Path(spec.origin)
        source = origin.parent if origin.name == "__init__.py" else origin
        (packages / source.name).symlink_to(source)
    python = home / "bin" / "python"
    code = "import importlib.util as u, sys; print([n for n in sys.argv[1:] if u.find_spec(n)])"
    done = subprocess.run(
        [python, "-c", code, *ABSENT], env=environment(), cwd=home, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]", "the environment is not as bare as it should be"
    return python


@pytest.mark.slow
def test_healthy_job_without_our_dependencies(ddpcheck: RunWatched, bare_python: Path) -> None:
    watched = ddpcheck(
        bare_python, "-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, "--epochs", "1"
    )
    healthy(watched, world_size=2, steps=16)
    assert {watched.records(rank)[0]["algorithm"] for rank in (0, 1)} == {"multilinear-128"}


@pytest.mark.slow
def test_divergence_without_our_dependencies(ddpcheck: RunWatched, bare_python: Path) -> None:
    job = ("-m", "torch.distributed.run", "--nproc-per-node", "2", EXAMPLE, "--epochs", "1")
    watched = ddpcheck(bare_python, *job, "--mistake", "bypass")
    assert watched.status == 10, str(watched)
    finding = watched.finding("DDP202")
    assert (finding["severity"], finding["step"], finding["stage"]) == ("error", 0, "applied")
    assert finding["parameter"] is not None
    assert watched.files("fault-*.jsonl") == []


def test_command_that_does_not_exist(ddpcheck: RunWatched) -> None:
    watched = ddpcheck("no-such-launcher", "train.py")
    assert watched.status == 127
    assert watched.stdout == ""
    assert watched.stderr == "ddpcheck: no-such-launcher: command not found\n"


def test_folder_that_cannot_be_made(ddpcheck: RunWatched, tmp_path: Path) -> None:
    """The job must not run for hours before anyone learns of it."""
    file = tmp_path / "file"
    file.write_text("mine")
    watched = ddpcheck(sys.executable, "-c", "print('ran')", out=Path("/proc/ddpcheck"))
    assert (watched.status, watched.stdout) == (1, "")
    assert one_sentence(watched.stderr, "/proc/ddpcheck: cannot be created", "--out")
    watched = ddpcheck(sys.executable, "-c", "print('ran')", out=file / "run")
    assert (watched.status, watched.stdout) == (1, "")
    assert one_sentence(watched.stderr, str(file), "--out")
    watched = ddpcheck(sys.executable, "-c", "print('ran')", out=file)
    assert (watched.status, watched.stdout) == (1, "")
    assert one_sentence(watched.stderr, str(file), "is a file")
    assert file.read_text() == "mine"


def test_folder_that_holds_a_run(ddpcheck: RunWatched) -> None:
    first = ddpcheck(sys.executable, "-c", "print('first')")
    kept = {path.name: path.read_bytes() for path in first.folder.iterdir()}
    assert "run.json" in kept
    second = ddpcheck(sys.executable, "-c", "print('second')")
    assert (second.status, second.stdout) == (1, "")
    assert one_sentence(second.stderr, str(first.folder), "already contains a run")
    assert {path.name: path.read_bytes() for path in first.folder.iterdir()} == kept


def one_sentence(stderr: str, *parts: str) -> bool:
    assert stderr.startswith("ddpcheck: "), stderr
    assert stderr.count("\n") == 1, stderr
    assert "Traceback" not in stderr
    return all(part in stderr for part in parts)
