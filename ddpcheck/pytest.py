"""pytest plugin: runs a script or a function on several ranks, and fails the test if there is a finding.

pytest loads it automatically if ddpcheck is installed. See docs/ci.md.
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

_MARKER = "ddpcheck"
_MAX_OUTPUT_LINES = 40
_GRACE_SECONDS = 60.0
Target = str | Path | Callable[..., object]


class Checker:
    """The value of the fixture. Each call of `run` is one job under ddpcheck."""

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
        """Run `target` on `ranks` processes of this machine; fail the test on a finding or if the job fails.

        A script gets `arguments` as its command line. A function must be defined at the top level of a module, and
        gets `arguments` and `keywords`, which are passed as JSON. `options` are options of `ddpcheck run`.
        """
        self._runs += 1
        folder = self._folder / f"run-{self._runs}"
        job = (
            _script_call(target, arguments)
            if isinstance(target, (str, Path))
            else _function_call(target, arguments, keywords)
        )
        launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        checker = ["ddpcheck", "run", "--quiet", "--out", str(folder), "--fail-on", fail_on, *options]
        command = [sys.executable, "-m", *checker, "--", sys.executable, "-m", *launcher, *job]
        return _checked_report(folder, *_run(command, self._start, timeout))


def _run(command: Sequence[str], cwd: Path, timeout: float) -> tuple[int, str]:
    """Exit status and output. After the timeout, SIGTERM comes first: ddpcheck then ends all ranks."""
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


def _script_call(target: str | Path, arguments: Sequence[object]) -> list[str]:
    return [str(target), *map(str, arguments)]


def _function_call(
    target: Callable[..., object], arguments: Sequence[object], keywords: dict[str, Any]
) -> list[str]:
    """What a rank needs to import the function. The function itself is not serialized."""
    name, file = target.__qualname__, inspect.getsourcefile(target)
    if "<" in name or "." in name or file is None:
        raise TypeError(f"{name} cannot run on ranks: define it at the top level of a module file")
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
        raise TypeError(f"arguments for ranks must be JSON serializable: {error}") from None


def _checked_report(folder: Path, status: int, output: str) -> Report:
    from ddpcheck.reports.json_report import from_json

    path = folder / "report.json"
    if not path.is_file():
        pytest.fail(f"ddpcheck wrote no report (status {status}):\n{_tail(output)}", pytrace=False)
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
        parts.append(f"Last lines of the job's output:\n{_tail(output)}")
    return "\n\n".join([*parts, f"run folder: {report.run.get('path')}"])


def _tail(output: str) -> str:
    return "\n".join(output.splitlines()[-_MAX_OUTPUT_LINES:])


@pytest.fixture
def ddpcheck(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Checker:
    """Runs scripts and functions on several ranks under ddpcheck."""
    return Checker(tmp_path_factory.mktemp("ddpcheck"), request.config.invocation_params.dir)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        f"{_MARKER}(ranks=2, fail_on='error', timeout=600.0, options=()): run this test on several ranks under "
        "ddpcheck, and fail it on a finding",
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """Add the fixture to marked tests that do not request it."""
    if (
        isinstance(item, pytest.Function)
        and item.get_closest_marker(_MARKER)
        and _MARKER not in item.fixturenames
    ):
        item.fixturenames.append(_MARKER)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a marked test on its ranks instead of in this process."""
    marker = pyfuncitem.get_closest_marker(_MARKER)
    if marker is None:
        return None
    names = inspect.signature(pyfuncitem.obj).parameters
    values = {name: pyfuncitem.funcargs[name] for name in names}
    checker = cast(Checker, pyfuncitem.funcargs[_MARKER])
    checker.run(pyfuncitem.function, **{**marker.kwargs, **values})
    return True
