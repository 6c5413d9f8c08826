"""Runs the corpus, prints tables, writes docs/corpus.md on request, and fails on any difference."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from fnmatch import fnmatch
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TypeVar

if __package__ in (None, ""):  # started as a file
    sys.path[0] = str(Path(__file__).parents[2])

from rich.console import Console

from tests.corpus import document, on_device, table
from tests.corpus.header import Header, HeaderError, read_header
from tests.corpus.jobs import Job, batches, end_all, jobs_of, run_batch
from tests.corpus.plain import DETAIL, PlainResult, run_plainly
from tests.corpus.results import Program, Results, Row
from tests.corpus.verdict import Verdict, judge

ROOT = Path(__file__).parents[2]
FAULTS, VARIANTS, HEALTHY = "examples/faults", "examples/faults/variants", "examples/healthy"
# Large enough to import torch seldom, small enough to keep all cores busy.
MOST_IN_A_BATCH = 12

Report = Callable[[str], None]
_T = TypeVar("_T")
_R = TypeVar("_R")


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    console = Console(width=max(140, Console().width) if not sys.stdout.isatty() else None)
    try:
        headers = {
            folder: collect(options.root / folder, options.only) for folder in (FAULTS, VARIANTS, HEALTHY)
        }
    except HeaderError as error:
        print(error, file=sys.stderr)
        return 2
    if options.device != "cpu":
        headers = {folder: on_device.expected(scripts) for folder, scripts in headers.items()}
    if not any(headers.values()):
        print("no script matches", file=sys.stderr)
        return 2
    results = run_corpus(headers, options, _reporter())
    table.show(results, console)
    if options.json:
        options.json.write_text(json.dumps(as_json(results), indent=1), encoding="utf-8")
    if options.docs:
        options.docs.write_text(document.render(results), encoding="utf-8")
    if options.update:
        scripts = [path for folder in headers for path in (options.root / folder).glob("*.py")]
        page = document.update(options.update.read_text(encoding="utf-8"), results, scripts)
        options.update.write_text(page, encoding="utf-8")
    return 0 if results.passed else 1


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.corpus", description=__doc__)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="commands at once")
    parser.add_argument(
        "--only", metavar="GLOB", help="only scripts whose name or folder/name matches; several by comma"
    )
    parser.add_argument("--times", type=int, default=1, help="how often to run everything under ddpcheck")
    parser.add_argument("--no-plain", action="store_true", help="do not run the scripts without ddpcheck")
    parser.add_argument(
        "--device",
        choices=("cpu", "sim"),
        default="cpu",
        help="where DDP modules are; sim: the simulated accelerator",
    )
    parser.add_argument("--no-real", action="store_true", help="do not run programs by other authors")
    parser.add_argument(
        "--docs", type=Path, metavar="FILE", help="write the page to FILE; needs the whole corpus"
    )
    parser.add_argument(
        "--update", type=Path, metavar="FILE", help="replace the rows of these scripts in the page FILE"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what each script gave to FILE")
    parser.add_argument("--root", type=Path, default=ROOT, help="folder that holds examples/")
    options = parser.parse_args(arguments)
    if options.docs and (options.only or options.no_plain or options.device != "cpu"):
        parser.error("--docs needs the whole corpus: remove --only, --no-plain and --device")
    if options.device != "cpu":
        # Without ddpcheck the device makes no difference, and other authors' programs know nothing of it.
        options.no_plain = options.no_real = True
    return options


def collect(folder: Path, only: str | None = None) -> list[Header]:
    """The headers of a folder's scripts, ordered by the numbers of their bugs."""
    headers = [
        read_header(path)
        for path in sorted(folder.glob("*.py"))
        if not only or any(_matches(path, each) for each in only.split(","))
    ]
    return sorted(headers, key=lambda header: (header.bugs or (0,), header.name))


def _matches(path: Path, pattern: str) -> bool:
    return fnmatch(path.stem, pattern) or fnmatch(f"{path.parent.name}/{path.stem}", pattern)


def run_corpus(headers: dict[str, list[Header]], options: argparse.Namespace, report: Report) -> Results:
    """Everything the options ask for."""
    torch = version("torch")
    jobs = [
        job
        for folder in headers.values()
        for header in folder
        if not header.lacks(torch)
        for job in jobs_of(header)
    ]
    verdicts: dict[Path, list[Verdict]] = {}
    for time_number in range(options.times):
        if options.times > 1:
            report(f"time {time_number + 1} of {options.times}")
        for verdict in run_watched(jobs, options.jobs, report, device_environment(options.device)):
            verdicts.setdefault(verdict.outcome.job.header.path, []).append(verdict)
    plain_results: tuple[dict[str, PlainResult], dict[str, PlainResult]] = ({}, {})
    if not options.no_plain:
        of_faults = [job for job in jobs if job.header in headers[FAULTS]]
        plain_results = run_all_plainly(of_faults, options.jobs, report)

    def rows(folder: str) -> tuple[Row, ...]:
        return tuple(_row(header, verdicts.get(header.path, []), plain_results) for header in headers[folder])

    programs = None if options.no_real or options.only else real_programs(report)
    return Results(rows(FAULTS), rows(VARIANTS), rows(HEALTHY), programs)


def _row(
    header: Header,
    verdicts: list[Verdict],
    plain_results: tuple[dict[str, PlainResult], dict[str, PlainResult]],
) -> Row:
    name = jobs_of(header)[0].name
    plain, detailed = (one.get(name) for one in plain_results)
    return Row(header, tuple(verdicts), plain, detailed, header.lacks(version("torch")))


def device_environment(device: str) -> dict[str, str]:
    """Variables that make a script place its DDP modules on a device."""
    if device == "cpu":
        return {}
    from tests.accelerator.autoload import environment

    return environment(f"devices={on_device.DEVICES}", placed=True)


def run_watched(
    jobs: Sequence[Job], workers: int, report: Report, env: dict[str, str] | None = None
) -> list[Verdict]:
    """The verdict on each job, in their order."""
    verdicts: dict[Job, Verdict] = {}
    for outcomes in _all(partial(run_batch, env=env), batches(jobs, MOST_IN_A_BATCH), workers):
        for outcome in outcomes:
            verdict = verdicts[outcome.job] = judge(outcome)
            report(f"{'ok  ' if verdict.passed else 'MISS'} {outcome.job.name}")
            for miss in verdict.misses:
                report(f"     {miss}")
    return [verdicts[job] for job in jobs]


def run_all_plainly(
    jobs: Sequence[Job], workers: int, report: Report
) -> tuple[dict[str, PlainResult], dict[str, PlainResult]]:
    """What PyTorch itself reports about each job, by default and with its own debugging."""
    plain_results: tuple[dict[str, PlainResult], dict[str, PlainResult]] = ({}, {})
    asked = [(number, batch) for number in (0, 1) for batch in batches(jobs, MOST_IN_A_BATCH, watched=False)]

    def ask(question: tuple[int, list[Job]]) -> tuple[int, dict[str, PlainResult]]:
        number, batch = question
        return number, run_plainly(batch, DETAIL if number else {})

    for number, answers in _all(ask, asked, workers):
        plain_results[number].update(answers)
        for name, answer in answers.items():
            report(f"plainly{', INFO' if number else ''}: {name}: {answer}")
    return plain_results


def as_json(results: Results) -> dict[str, dict[str, object]]:
    """By part of the corpus and script: whether it was as expected, why it was not run, and what was wrong."""
    parts = {"faults": results.faults, "variants": results.variants, "healthy": results.healthy}
    return {
        part: {
            row.header.name: {
                "jobs": len(row.verdicts),
                "passed": sum(verdict.passed for verdict in row.verdicts),
                "skipped": row.skipped,
                "misses": [miss for verdict in row.verdicts for miss in verdict.misses],
            }
            for row in rows
        }
        for part, rows in parts.items()
        if rows
    }


def real_programs(report: Report) -> tuple[Program, ...] | None:
    """Programs by other authors, if this checkout has them."""
    if importlib.util.find_spec("tests.corpus.real_programs") is None:
        return None
    run_all = importlib.import_module("tests.corpus.real_programs").run_all
    return tuple(Program(one.name, one.passed, one.total, one.note) for one in run_all(report))


def _all(function: Callable[[_T], _R], arguments: Iterable[_T], workers: int) -> Iterator[_R]:
    """Results in the order of completion; an exception in the caller stops the jobs."""
    with ThreadPoolExecutor(workers) as pool:
        try:
            for future in as_completed([pool.submit(function, argument) for argument in arguments]):
                yield future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            end_all()
            raise


def _reporter() -> Report:
    began, lock = time.monotonic(), threading.Lock()

    def report(line: str) -> None:
        with lock:
            print(f"{time.monotonic() - began:6.1f}s  {line}", flush=True)

    return report


def command() -> int:
    """`main` for a shell: SIGTERM stops all commands that it started."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(command())
