"""Every way to install ddpcheck gives a complete package that works outside the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

LEFT_BEHIND = (
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", "ddpcheck-runs", ".hypothesis", "*.so"
)  # fmt: skip
KINDS = ["plain", "editable", "wheel", "sdist"]

pytestmark = [pytest.mark.slow, pytest.mark.needs("gcc")]


def run(*command: object, cwd: Path) -> str:
    # Without the checkout on the path, and without a ddpcheck that watches.
    hidden = ("PYTHONPATH", "DDPCHECK_CONFIG")
    environment = {key: value for key, value in os.environ.items() if key not in hidden}
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def copy_tree(target: Path) -> Path:
    """Builds leave files behind, so they run in a copy."""
    shutil.copytree(ROOT, target, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_BEHIND))
    return target


def build(kind: str, source: Path, out: Path) -> Path:
    """A wheel or an sdist of `source`, by the build backend itself, which downloads nothing."""
    out.mkdir(exist_ok=True)
    script = f"import sys; from setuptools import build_meta; print(build_meta.build_{kind}(sys.argv[1]))"
    return out / run(sys.executable, "-c", script, out, cwd=source).splitlines()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sdist")
    return build("sdist", copy_tree(folder / "tree"), folder / "out")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build("wheel", copy_tree(folder / "tree"), folder / "out")


def fresh_environment(path: Path) -> Path:
    """A new environment that uses the dependencies of this one."""
    venv.create(path, with_pip=False, symlinks=True)
    site_packages = next(path.glob("lib/python*/site-packages"))
    (site_packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return path / "bin"


def install(what: list[object], binaries: Path, cwd: Path) -> None:
    pip = [sys.executable, "-m", "pip", "--python", binaries / "python", "install", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed"]
    run(*pip, *offline, *what, cwd=cwd)


@pytest.mark.parametrize("kind", KINDS)
def test_an_installed_ddpcheck_is_complete(kind: str, wheel: Path, sdist: Path, tmp_path: Path) -> None:
    binaries = fresh_environment(tmp_path / "environment")
    away = tmp_path / "away"
    away.mkdir()
    what: dict[str, list[object]] = {"wheel": [wheel], "sdist": [sdist]}
    if kind not in what:
        tree = copy_tree(tmp_path / "tree")
        what |= {"plain": [tree], "editable": ["--editable", tree]}
    install(what[kind], binaries, away)

    assert run(binaries / "ddpcheck", "--version", cwd=away).startswith("ddpcheck ")
    assert run(binaries / "ddpcheck", "explain", "DDP201", cwd=away).startswith("# DDP201: ")
    listed = run(binaries / "ddpcheck", "explain", cwd=away).splitlines()
    assert len(listed) == len(list((ROOT / "ddpcheck" / "explanations").glob("*.md")))
    script = (
        "import ddpcheck.probes.digest, ddpcheck.reports.terminal.report, ddpcheck.bootstrap, pathlib, torch\n"
        "from ddpcheck.probes.scan.library import native_kernel; assert native_kernel(torch.float32)\n"
        "from ddpcheck.analysis.report import Report, Verdict; from ddpcheck.reports.html.page import to_html\n"
        "assert 'uPlot' in to_html(Report(Verdict.OK, 0, 0, (), 0, (), (), ()))\n"
        "print(*ddpcheck.bootstrap.__path__, ddpcheck.__file__, ddpcheck.reports.__file__, sep='\\n')"
    )
    bootstrap, *files = run(binaries / "python", "-c", script, cwd=away).splitlines()
    assert (Path(bootstrap) / "sitecustomize.py").is_file()
    assert all(Path(file).is_relative_to(tmp_path) for file in files), "imported from elsewhere"


def names_in_wheel(path: Path) -> set[str]:
    with zipfile.ZipFile(path) as archive:
        return set(archive.namelist())


def test_the_sdist_and_the_tree_give_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    again = build("wheel", next(tmp_path.glob("ddpcheck-*")), tmp_path / "out")
    assert names_in_wheel(again) == names_in_wheel(wheel)


def test_the_wheel_contains_every_source_and_nothing_else(wheel: Path) -> None:
    in_tree = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ddpcheck").rglob("*")
        if path.suffix in (".py", ".md", ".typed") or path.name == "py.typed"
    }
    for room in "probes", "reports":
        in_tree |= {f"ddpcheck/{path.relative_to(ROOT).as_posix()}" for path in (ROOT / room).rglob("*.py")}
    assets = (ROOT / "reports" / "html" / "assets").iterdir()
    in_tree |= {f"ddpcheck/{path.relative_to(ROOT).as_posix()}" for path in assets}
    in_wheel = {name for name in names_in_wheel(wheel) if ".dist-info/" not in name}
    compiled = {"ddpcheck/probes/scan/_native.so"}
    assert in_wheel == in_tree | compiled


def test_one_wheel_for_every_python_and_without_torch(wheel: Path, sdist: Path) -> None:
    assert wheel.name.split("-")[2:4] == ["py3", "none"]
    with zipfile.ZipFile(wheel) as archive:
        [metadata] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        required = re.findall(
            r"^Requires-Dist: ([\w-]+)([^;\n]*)$", archive.read(metadata).decode(), re.MULTILINE
        )
    assert "typer" in dict(required)
    assert "torch" not in dict(required)


def test_the_compiled_part_runs_on_systems_of_many_years(wheel: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "auditwheel", "show", wheel]
    shown = " ".join(run(*command, cwd=tmp_path).split())
    assert f'"manylinux_2_17_{os.uname().machine}"' in shown


def test_the_image_is_built_from_files_that_exist() -> None:
    """No Docker here: the steps of the Dockerfile are those of the tests above, its paths are checked."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {".git", ".venv", "ddpcheck-runs"} <= set(ignored)
    stages = [line.split()[-1] for line in lines if line.startswith("FROM") and " AS " in line]
    copied = [line.split()[1:] for line in lines if line.startswith("COPY")]
    assert [words[0].removeprefix("--from=") for words in copied if words[0].startswith("--")] == stages
    # The symlinks to probes/ and reports/ are part of the context.
    assert not {"probes", "reports", "ddpcheck"} & set(ignored)
    assert 'ENTRYPOINT ["ddpcheck"]' in lines
