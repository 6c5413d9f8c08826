"""The post-import hook, with a fake torch package, and `import ddpcheck.auto`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.paths import ROOT

# Replaces the agent: prints when it is installed, and whether the DDP module was complete.
STUB = """
import sys, types
sys.path[:0] = [{root!r}, {fake!r}]
entry = types.ModuleType("ddpcheck.agent.install")
def install():
    print("install", hasattr(sys.modules["torch.nn.parallel.distributed"], "DistributedDataParallel"))
    {body}
entry.install = install
import ddpcheck.agent
sys.modules["ddpcheck.agent.install"] = entry
from ddpcheck.injection import DdpImportFinder, arm
hooks = lambda: sum(isinstance(f, DdpImportFinder) for f in sys.meta_path)
"""


@pytest.fixture
def fake_torch(tmp_path: Path) -> Path:
    package = tmp_path / "fake" / "torch" / "nn" / "parallel"
    package.mkdir(parents=True)
    for folder in (package, package.parent, package.parent.parent):
        (folder / "__init__.py").write_text("")
    (package / "distributed.py").write_text("class DistributedDataParallel: pass\nprint('executed')\n")
    return tmp_path / "fake"


def run(fake: Path, code: str, body: str = "pass", **environ: str) -> subprocess.CompletedProcess[str]:
    program = STUB.format(root=str(ROOT), fake=str(fake), body=body) + code
    return subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, **environ},
    )


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_agent_is_installed_after_the_import_and_the_hook_is_removed(fake_torch: Path) -> None:
    code = "arm(); arm(); print(hooks()); import torch.nn.parallel.distributed; print(hooks())"
    assert lines(run(fake_torch, code)) == ["1", "executed", "install True", "0"]


def test_already_imported(fake_torch: Path) -> None:
    code = "import torch.nn.parallel.distributed; arm(); print(hooks())"
    assert lines(run(fake_torch, code)) == ["executed", "install True", "0"]


def test_module_attributes_are_unchanged(fake_torch: Path) -> None:
    code = (
        "import importlib, importlib.util as u\n"
        "name = 'torch.nn.parallel.distributed'\n"
        "s = u.find_spec(name)\n"
        "print(type(s.loader), s.origin, s.cached, 'Distributed' in s.loader.get_source(name))\n"
        "import torch.nn.parallel.distributed as m\n"
        "print(type(m.__loader__), vars(m.__loader__), m.__spec__ == u.find_spec(name), m.__file__)\n"
        "print(m.__spec__.loader is m.__loader__, m.__cached__, sorted(vars(m)))\n"
        "importlib.reload(m)\n"
    )
    plain, checked = lines(run(fake_torch, code)), lines(run(fake_torch, "arm()\n" + code))
    assert [line for line in checked if not line.startswith("install")] == plain
    assert checked.count("install True") == 1


def test_failed_import_can_be_repeated(fake_torch: Path) -> None:
    module = fake_torch / "torch" / "nn" / "parallel" / "distributed.py"
    good = module.read_text()
    module.write_text("raise OSError('libcudart')")
    code = (
        "arm()\n"
        "try:\n    import torch.nn.parallel.distributed\n"
        "except OSError as e:\n    print(e, hooks())\n"
        f"import pathlib; pathlib.Path({str(module)!r}).write_text({good!r})\n"
        "import importlib; importlib.invalidate_caches()\n"
        "import torch.nn.parallel.distributed; print(hooks())"
    )
    assert lines(run(fake_torch, code)) == ["libcudart 1", "executed", "install True", "0"]


@pytest.mark.parametrize("body", ["raise RuntimeError('boom')", "sys.exit(3)", "import nothing_here"])
def test_fault_is_recorded_and_the_import_succeeds(fake_torch: Path, tmp_path: Path, body: str) -> None:
    config = json.dumps({"run_dir": str(tmp_path), "run_id": "x"})
    code = "arm(); import torch.nn.parallel.distributed as d; print(d.DistributedDataParallel)"
    done = run(fake_torch, code, body, DDPCHECK_CONFIG=config)
    assert lines(done)[-1].startswith("<class")
    (path,) = tmp_path.glob("fault-*.jsonl")
    assert path.stat().st_mode & 0o777 == 0o600
    record = json.loads(path.read_text())
    assert (record["kind"], record["probe"], record["entry"]) == ("fault", "bootstrap", "install")
    assert path.name == f"fault-{record['pid']}.jsonl"
    assert "in install" in record["where"]
    assert record["error"].split(":")[0] in {"RuntimeError", "SystemExit", "ModuleNotFoundError"}


def test_fault_without_a_run_folder_is_one_line(fake_torch: Path) -> None:
    config = json.dumps({"run_dir": "/no/such/folder", "run_id": "x"})
    code = "arm(); import torch.nn.parallel.distributed"
    done = run(fake_torch, code, "raise RuntimeError", DDPCHECK_CONFIG=config)
    assert done.returncode == 0
    [line] = done.stderr.splitlines()
    assert "-v /no/such/folder:/no/such/folder" in line


def auto(cwd: Path, **environ: str) -> subprocess.Popen[str]:
    program = "import ddpcheck.auto, os; print(os.environ['DDPCHECK_CONFIG'])"
    plain = {k: v for k, v in os.environ.items() if k not in {"DDPCHECK_CONFIG", "RANK", "WORLD_SIZE"}}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        cwd=cwd,
        env={**plain, "PYTHONPATH": str(ROOT), **environ},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run_job(cwd: Path, size: int, **environ: str) -> tuple[set[str], str]:
    """The run folders of the ranks of one job, and their output to stderr."""
    ranks = [
        auto(cwd, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), MASTER_PORT="29500", **environ)
        for rank in range(size)
    ]
    outputs = [rank.communicate(timeout=300) for rank in ranks]
    assert all(rank.returncode == 0 for rank in ranks), outputs
    configs: list[dict[str, Any]] = [json.loads(stdout) for stdout, _ in outputs]
    return {config["run_dir"] for config in configs}, "".join(stderr for _, stderr in outputs)


def test_auto_ranks_share_one_run_folder(tmp_path: Path) -> None:
    folders, stderr = run_job(tmp_path, 4)
    assert len(folders) == 1
    folder = Path(folders.pop())
    assert folder.parent == tmp_path / "ddpcheck-runs"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert json.loads((folder / "run.json").read_text())["id"] == folder.name
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    assert len(stderr.splitlines()) == 1
    assert str(folder) in stderr


def test_auto_second_run_on_several_nodes_gets_a_new_folder(tmp_path: Path) -> None:
    nodes = {"GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    first, _ = run_job(tmp_path, 3, **nodes)
    restarted, _ = run_job(tmp_path, 3, TORCHELASTIC_RESTART_COUNT="1", **nodes)
    second, _ = run_job(tmp_path, 3, **nodes)
    assert len(first) == len(second) == 1
    assert restarted == first
    assert second != first


def test_auto_joins_the_current_run(tmp_path: Path) -> None:
    config = json.dumps({"run_dir": str(tmp_path / "given"), "run_id": "x"})
    process = auto(tmp_path, DDPCHECK_CONFIG=config)
    stdout, stderr = process.communicate(timeout=300)
    assert (stdout.strip(), stderr) == (config, "")
    assert not (tmp_path / "ddpcheck-runs").exists()


def test_auto_never_stops_the_script(tmp_path: Path) -> None:
    (tmp_path / "ddpcheck-runs").write_text("a file instead of a folder")
    program = "import ddpcheck.auto; print('continued')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "continued\n"
    assert done.stderr.startswith("ddpcheck: this job is not checked")


@pytest.mark.slow
def test_real_torch(tmp_path: Path) -> None:
    from ddpcheck.config import Config
    from ddpcheck.launcher.process.command import command_environment

    code = (
        "import torch, torch.nn.parallel.distributed as d, sys\n"
        "print(d.__file__, type(d.__loader__), vars(d.__loader__), d.DistributedDataParallel.__mro__)\n"
        "print(len(sys.meta_path))"
    )
    environ = command_environment(Config(run_dir=str(tmp_path), run_id="x"))
    plain, checked = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300)
        for env in (None, environ)
    ]
    assert (checked.stdout, checked.stderr) == (plain.stdout, plain.stderr)
    assert list(tmp_path.iterdir()) == []


def test_a_later_import_is_observed_once(fake_torch: Path) -> None:
    (fake_torch / "later.py").write_text("value = 1\n")
    code = (
        "from ddpcheck.injection import LaterImportFinder\n"
        "finder = LaterImportFinder('later', lambda: print('imported', sys.modules['later'].value))\n"
        "sys.meta_path.insert(0, finder)\n"
        "import later, importlib\n"
        "print(finder in sys.meta_path, later.__spec__.origin.endswith('later.py'))\n"
        "importlib.reload(later)\n"
    )
    assert lines(run(fake_torch, code)) == ["imported 1", "False True"]
