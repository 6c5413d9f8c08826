"""Allowed imports per package: few in ranks, one direction of data flow, no torch in the command line."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT

PACKAGE = ROOT / "ddpcheck"

# Packages whose code runs inside the ranks, in the user's Python environment.
IN_RANK = [
    "agent",
    "bootstrap",
    "probes",
    "records",
    "config",
    "doctor",
    "guard",
    "injection",
    "links",
    "machine_identity",
    "patches",
    "privacy",
    "step_ranges",
    "torch_compat",
    "device_api",
    "wakeup",
]
IN_RANK_MAY_IMPORT = {*IN_RANK, "errors", "version", ""}
# The doctor's ranks collect facts about their machines with the standard library only. They import the report inside
# a function, only where rich is installed.
ALSO_BY = {"doctor": {"sampling", "analysis", "formatting", "reports"}}
# Optional packages: imported inside a function, or at the top of a file that only a function imports
# (`triton_kernel.py`). `node_kinds.py` decodes node logs, which only the analysis reads.
ACCELERATORS = {"xxhash", "triton", "pynvml", "amdsmi", "msgspec"}

FORBIDDEN = {
    "analysis": {"torch", "rich", "typer", "reports", "cli", "launcher", "agent", "bootstrap"},
    "rules": {"torch", "rich", "typer", "reports", "cli", "launcher", "agent", "bootstrap", "probes"},
    "diff": {"torch", "rich", "typer", "reports", "cli", "launcher", "agent", "bootstrap"},
    "traces": {
        "torch",
        "rich",
        "typer",
        "reports",
        "cli",
        "launcher",
        "agent",
        "bootstrap",
        "probes",
        "records",
    },
    "doctor": {"rich", "typer", "cli", "launcher", "agent", "bootstrap", "probes"},
    "doctor/checks": {"torch", "rich", "typer", "reports", "cli", "launcher", "sampling"},
    "sampling": {"torch", "rich", "typer", "analysis", "reports", "cli", "agent", "bootstrap", "probes"},
    "reports": {"torch", "typer", "probes", "agent", "launcher", "bootstrap", "cli", "records"},
    "probes": {"rich", "typer", "analysis", "reports", "cli", "launcher", "agent", "bootstrap"},
    "selftest": {"rich", "typer", "reports", "cli", "agent", "bootstrap"},
    "explanations": {"torch", "rich", "typer"},
}


def sources(package: str) -> list[Path]:
    path = PACKAGE / package
    if path.is_dir():
        # `probes` and `reports` are symlinks, which rglob does not follow in every version of Python.
        return sorted(path.resolve().rglob("*.py"))
    file = path.with_suffix(".py")
    return [file] if file.exists() else []


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module that `path` imports at run time, and whether the import is at the top level."""
    tree = ast.parse(path.read_text(), str(path))
    inside = {
        id(node) for function in ast.walk(tree) if _is_function(function) for node in ast.walk(function)
    }
    typing_only = {
        id(node) for block in ast.walk(tree) if _is_typing_block(block) for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        top = id(node) not in inside
        if isinstance(node, ast.Import):
            yield from ((alias.name, top) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = ".".join([*package_of(path, node.level), *filter(None, [module])])
            yield module, top
            if module.startswith("ddpcheck"):
                yield from ((f"{module}.{alias.name}", top) for alias in node.names)


def package_of(path: Path, level: int) -> list[str]:
    """The package that a relative import in `path` starts from."""
    parts = list(path.relative_to(ROOT).parent.parts)
    installed = parts if parts[0] == "ddpcheck" else ["ddpcheck", *parts]
    return installed[: len(installed) - level + 1]


def _is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))


def _is_typing_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def package_name(module: str) -> str:
    """The package below ddpcheck, or the top-level name of any other module."""
    parts = module.split(".")
    if parts[0] != "ddpcheck":
        return parts[0]
    return parts[1] if len(parts) > 1 else ""


@pytest.mark.parametrize("package", IN_RANK)
def test_ranks_need_only_the_standard_library_and_torch(package: str) -> None:
    for path in sources(package):
        for module, top in imports(path):
            name = package_name(module)
            assert not (top and module.endswith(("triton_table", "node_kinds"))), path
            if module.split(".")[0] == "ddpcheck":
                # Names such as ddpcheck.__version__ are not packages.
                allowed = name in IN_RANK_MAY_IMPORT or name.startswith("__")
                allowed = allowed or (name in ALSO_BY.get(package, ()) and not (top and name == "reports"))
            else:
                allowed = name in sys.stdlib_module_names or name == "torch"
                own_file = path.stem in ("triton_table", "node_kinds")
                allowed = allowed or (name in ACCELERATORS and (own_file or not top))
            assert allowed, f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize("package", FORBIDDEN)
def test_data_flows_one_way(package: str) -> None:
    for path in sources(package):
        for module, _ in imports(path):
            assert package_name(module) not in FORBIDDEN[package], (
                f"{path.relative_to(ROOT)} imports {module}"
            )


def test_nvml_is_imported_inside_functions() -> None:
    for path in sources("sampling"):
        for module, top in imports(path):
            assert not (top and package_name(module) == "pynvml"), (
                f"{path.relative_to(ROOT)} imports {module}"
            )


def test_the_bootstrap_is_standard_library_only() -> None:
    for path in sources("bootstrap"):
        for module, _ in imports(path):
            assert package_name(module) != "torch", f"{path.relative_to(ROOT)} imports {module}"


@pytest.mark.parametrize(
    "statement",
    [
        "import ddpcheck.__main__, ddpcheck.cli.app",
        "import ddpcheck.__main__ as m\ntry: m.main(['explain'])\nexcept SystemExit: pass",
        "import ddpcheck.__main__ as m\ntry: m.main(['run', '--help'])\nexcept SystemExit: pass",
        "import ddpcheck.__main__ as m\ntry: m.main(['doctor', '--help'])\nexcept SystemExit: pass",
    ],
)
def test_command_line_starts_without_heavy_imports(statement: str) -> None:
    assert heavy_imports(statement) == {"loaded:"}


def test_reports_need_no_torch() -> None:
    """numpy belongs to the analysis."""
    imported = heavy_imports("import ddpcheck.reports.terminal.report, ddpcheck.reports.json_report")
    assert imported <= {"loaded:", "numpy"}


def heavy_imports(statement: str) -> set[str]:
    heavy = "torch", "numpy", "xxhash", "msgspec", "ddpcheck.probes", "ddpcheck.agent"
    check = f"import sys\n{statement}\nprint('loaded:', *(set({heavy!r}) & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()[-1].split())


def test_auto_needs_neither_rich_nor_typer(tmp_path: Path) -> None:
    if not sources("auto"):
        pytest.skip("there is no ddpcheck.auto")
    hidden = "rich", "typer", "xxhash", "pynvml"
    check = f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\nimport ddpcheck.auto"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("DDPCHECK_CONFIG", None)
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert "not checked" not in done.stderr


def test_ranks_of_the_doctor_need_only_torch(tmp_path: Path) -> None:
    hidden = "rich", "typer", "msgspec", "xxhash", "pynvml"
    check = (
        f"import sys\nsys.modules.update(dict.fromkeys({hidden!r}))\n"
        "import ddpcheck.doctor.__main__, ddpcheck.doctor.rendezvous\nprint('torch' in sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", check],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    assert done.stdout.strip() == "False"


def test_sources_are_not_empty() -> None:
    # Without files, the tests above would always pass.
    assert all(
        sources(package)
        for package in ("probes", "reports", "analysis", "traces", "config", "sampling", "doctor")
    )
    assert package_name("ddpcheck.probes.digest") == "probes"
    assert package_name("rich.table") == "rich"
    assert package_of(ROOT / "probes" / "digest" / "trees.py", 2) == ["ddpcheck", "probes"]
