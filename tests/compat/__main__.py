"""Runs the corpus and the promise tests with another version of torch, and writes a row of docs/compatibility.md.

    make compat TORCH=2.15.0 [PYTHON=python3.13]
    python -m tests.compat --torch 2.15.0 --parts faults,healthy --only 'healthy/p*'   some of it; earlier results stay
    python -m tests.compat --torch 2.15.0 --parts ''                                   only make the environment

The environment is made in build/compat, and keeps its results until it is removed. Exits with 1 if a job differs from
what its script expects.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree

from tests.compat.document import PAGE, update
from tests.compat.environment import ROOT, make_environment
from tests.compat.results import read_results, write_results
from tests.helpers.commands import environment

ANY_TORCH = "DDPCHECK_ANY_TORCH"
CORPUS = ("faults", "variants", "healthy")
TESTS = {
    "identity": ("tests/integration/test_promise_identity.py",),
    "survival": ("tests/integration/test_promise_survival.py", "tests/integration/test_gradients.py"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    folder = make_environment(options.torch, options.python)
    results = read_results(folder)
    parts = [part for part in options.parts.split(",") if part]
    for part in parts:
        if part in CORPUS:
            results = results.with_corpus(run_corpus(folder, options.only or f"{part}/*"))
        else:
            results = results.with_tests(part, run_tests(folder, TESTS[part], options.only))
        write_results(folder, results)
    if parts:
        PAGE.write_text(update(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    for line in results.misses():
        print(line)
    return int(bool(results.misses()))


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.compat", description=__doc__)
    parser.add_argument("--torch", required=True, metavar="VERSION")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment")
    parser.add_argument(
        "--parts",
        default=",".join([*CORPUS, *TESTS]),
        help="what to run, separated by commas; empty: nothing",
    )
    parser.add_argument("--only", help="GLOB of scripts, or an expression for `pytest -k`")
    return parser.parse_args(arguments)


def run_corpus(folder: Path, only: str) -> dict[str, dict[str, dict[str, object]]]:
    """What each script of the corpus gave, by part."""
    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "results.json"
        command = ["-m", "tests.corpus", "--no-plain", "--no-real", "--only", only, "--json", str(found)]
        _run(folder, command)
        return dict(json.loads(found.read_text()))


def run_tests(folder: Path, files: Sequence[str], only: str | None) -> dict[str, str]:
    """By test: "passed", "skipped", or what failed."""
    with tempfile.TemporaryDirectory() as name:
        found = Path(name) / "results.xml"
        chosen = ["-k", only] if only else []
        junit = ["-o", "junit_family=xunit1", f"--junitxml={found}"]
        command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", *files, *chosen, *junit]
        # A version of torch may warn of what the tests need not avoid.
        _run(folder, [*command, "-W", "default"])
        return {case.get("name", ""): _outcome(case) for case in ElementTree.parse(found).iter("testcase")}


def _outcome(case: ElementTree.Element) -> str:
    for kind in ("failure", "error"):
        failed = case.find(kind)
        if failed is not None:
            return f"failed: {failed.get('message', '')[:300]}"
    left_out = [each.get("value", "") for each in case.iter("property") if each.get("name") == "left_out"]
    if left_out:
        return f"passed without {left_out[0]}"
    return "skipped" if case.find("skipped") is not None else "passed"


def _run(folder: Path, command: Sequence[str]) -> None:
    # By the tests, for jobs that this version of torch cannot run.
    path = {"PATH": f"{folder / 'bin'}:{environment()['PATH']}"}
    subprocess.run(
        [folder / "bin" / "python", *command],
        cwd=ROOT,
        env={**environment(), **path, ANY_TORCH: "1"},
        check=False,
    )


if __name__ == "__main__":
    sys.exit(main())
