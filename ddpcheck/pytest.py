"""A plugin for pytest: runs a script or a function on several ranks and fails the test where something is found.

Loaded by pytest itself once ddpcheck is installed; docs/ci.md shows its use.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

if TYPE_CHECKING:
    from ddpcheck.analysis.report import Report

_MARK = "ddpcheck"
_MOST_LINES = 40
_GRACE_SECONDS = 60.0
Target = str | Path | Callable[..., object]


class Checker:
    """What the fixture gives: each `run` is one job under ddpcheck."""

    def __init__(self, folder: Path, start: Path) -> None:
        self._folder, self._start = folder, start
        self._runs = 0

    def run(
        self,
        target: Target,
        *arguments: object,
        ranks: int = 2,
        fail_on: str = "error",
        timeout: float = 600.0,
        options: Sequence[str] = (),
        **keywords: Any,
    ) -> Report:
        """Run `target` on so many ranks of this machine, and fail the test on a finding or where it fails itself.

        A script gets `arguments` as its command line. A function has to stand at the top of a module, and gets
        `arguments` and `keywords`, which travel as JSON. `options` are those of `ddpcheck run`.
        """
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        job = (
            _script(target, arguments)
            if isinstance(target, (str, Path))
            else _call(target, arguments, keywords)
        )
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        watch = ["ddpcheck", "run", "--quiet", "--out", str(folder), "--fail-on", fail_on, *options]
        command = [sys.executable, "-m", *watch, "--", sys.executable, "-m", *launcher, *job]
        return _judged(folder, *_run(command, self._start, timeout))


def _run(command: Sequence[str], cwd: Path, timeout: float) -> tuple[int, str]:
    """Status and output. A job that takes too long is asked to stop first: ddpcheck then takes its ranks along."""
    with subprocess.Popen(
        command,
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
            return process.returncode, output
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                output, _ = process.communicate(timeout=_GRACE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                output, _ = process.communicate()
        pytest.fail(f"the job did not end within {timeout:g} seconds:\n{_tail(output)}", pytrace=False)


def _script(target: str | Path, arguments: Sequence[object]) -> list[str]:
    return [str(target), *map(str, arguments)]


def _call(target: Callable[..., object], arguments: Sequence[object], keywords: dict[str, Any]) -> list[str]:
    """What a rank needs to find the function again: never the function itself."""
    name, file = target.__qualname__, inspect.getsourcefile(target)
    if "<" in name or "." in name or file is None:
        raise TypeError(f"{name} cannot be run on ranks: it has to stand at the top of a module in a file")
    call = {
        "file": file,
        "module": target.__module__,
        "function": name,
        "path": sys.path,
        "arguments": arguments,
        "keywords": keywords,
    }
    try:
        return ["-m", "ddpcheck.pytest_rank", json.dumps(call, allow_nan=False)]
    except (TypeError, ValueError) as error:
        raise TypeError(f"arguments for ranks travel as JSON, and these cannot: {error}") from None


def _judged(folder: Path, status: int, output: str) -> Report:
    from ddpcheck.reports.json_report import from_json

    path = folder / "report.json"
    if not path.is_file():
        pytest.fail(f"ddpcheck left no report (status {status}):\n{_tail(output)}", pytrace=False)
    report = from_json(path.read_text(encoding="utf-8"))
    if status:
        pytest.fail(_message(report, output), pytrace=False)
    return report


def _message(report: Report, output: str) -> str:
    from ddpcheck.analysis.finding import Severity
    from ddpcheck.reports.finding_text import finding_text
    from ddpcheck.reports.verdict import in_order, verdict_sentence

    parts = [verdict_sentence(report)]
    parts += [finding_text(item) for item in in_order(report) if item.severity is not Severity.NOTE]
    if report.exit_code:
        parts.append(f"The end of the job's output:\n{_tail(output)}")
    return "\n\n".join([*parts, f"run folder: {report.run.get('path')}"])


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_MOST_LINES:])


@pytest.fixture
def ddpcheck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checker:
    """Runs scripts and functions on several ranks, watched."""
    return Checker(tmp_path_factory.mktemp("ddpcheck"), request.config.invocation_params.dir)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARK}(ranks=2, fail_on='error', timeout=600.0, options=()): run this test on several ranks, watched by "
        "ddpcheck, and fail it on a finding",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """A marked test needs the fixture, though it does not name it."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker(_MARK)
        and _MARK not in item.fixturenames
    ):
        item.fixturenames.append(_MARK)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A marked test runs on its ranks instead of here."""
    marker = pyfuncitem.get_closest_marker(_MARK)
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    values = {name: pyfuncitem.funcargs[name] for name in names}
    checker = cast(Checker, pyfuncitem.funcargs[_MARK])
    checker.run(pyfuncitem.function, **{**marker.kwargs, **values})
    return True
