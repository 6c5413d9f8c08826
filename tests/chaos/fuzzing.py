"""Commands of ddpcheck on damaged run folders: hypothesis chooses the damage, a process of its own bears it."""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import time
import xml.etree.ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.chaos.campaign import Outcome, Results
from tests.chaos.mutations import CONTROL, MARKUP, mutate_folder
from tests.chaos.sandbox import AUDIT, Called, call, limit_memory
from tests.helpers.cluster import BYTES, Cluster, Interface
from tests.helpers.fork_server import prepared
from tests.helpers.paths import JOBS, ROOT
from tests.helpers.watched_run import run_watched

# Examples of one process.
CHUNK = 100
STATUSES = frozenset({0, 1, 2, 10})
_JOBS: dict[str, tuple[list[object], list[object]]] = {
    "sound": ([], ["--steps", 8]),
    "diverged": (["--profile", "--save-gradients", 3], ["--steps", 16, "--diverge-at", 5]),
}
_TRACES = "*.pt.trace.json.gz"


@dataclass(frozen=True)
class Seeds:
    """Run folders that are damaged, and contents of their files that are mixed into others."""

    folders: tuple[Path, ...]
    contents: tuple[bytes, ...]


def stored_seeds(target: Path) -> Seeds:
    """Stored runs of earlier versions, and one of several nodes with samples of their hardware."""
    target.mkdir(parents=True, exist_ok=True)
    folders = [
        Path(shutil.copytree(path, target / path.name))
        for path in sorted((ROOT / "tests" / "stored_runs").iterdir())
        if path.is_dir()
    ]
    (target / "nodes").mkdir()
    interfaces = [[Interface("eth0", BYTES, 1000, (f"10.0.0.{node + 1}/24",))] for node in range(3)]
    Cluster(target / "nodes", interfaces, steps=12, wait=50_000).build()
    return _seeds([*folders, target / "nodes"])


def fresh_seeds(target: Path) -> Seeds:
    """With what this version writes: records, a report, saved tensors, traces."""
    seeds = stored_seeds(target)
    folders = []
    for name, (options, arguments) in _JOBS.items():
        done = run_watched(
            prepared(JOBS / "forked.py", *arguments), target, options=options, out=target / name
        )
        assert done.report, str(done)
        folders.append(done.folder)
    # They have more kinds of files, and change with the formats.
    return _seeds([*seeds.folders, *folders * 4])


def _seeds(folders: Sequence[Path]) -> Seeds:
    files = {path for folder in folders for path in folder.rglob("*") if path.is_file()}
    return Seeds(tuple(folders), tuple(path.read_bytes() for path in sorted(files)))


def run_example(chance: random.Random, seeds: Seeds, folder: Path) -> tuple[str, list[str]]:
    """Damage a copy of a run in `folder`, and run commands on it: what was done, and what was wrong."""
    run, out, outside = folder / "run", folder / "out", folder / "outside"
    pristine = chance.choice(seeds.folders)
    shutil.copytree(pristine, run)
    out.mkdir()
    outside.write_text("outside\n")
    how = mutate_folder(chance, run, seeds.contents, outside)
    commands = _commands(run, out, pristine, any(run.rglob(_TRACES)))
    wrong = []
    statuses = []
    for arguments in {chance.choice(sorted(commands)), "report --json"}:
        words = commands[arguments]
        called = call(words, run, out)
        statuses.append(f"{arguments}: {called.status}")
        wrong += [
            f"`ddpcheck {arguments}`: {each}" for each in [*called.wrong, *_wrong(called, arguments, out)]
        ]
    if outside.read_text() != "outside\n":
        wrong.append("a file outside of the run folder was changed")
    if strangers := sorted({path.name for path in folder.iterdir()} - {"run", "out", "outside"}):
        wrong.append(f"written beside the run folder: {strangers}")
    return f"{pristine.name}: {how} ({'; '.join(statuses)})", wrong


def _commands(run: Path, out: Path, other: Path, traces: bool) -> dict[str, list[object]]:
    commands: dict[str, list[object]] = {
        "report --json": ["report", run, "--json"],
        "report -v": ["report", run, "-v"],
        "report --html": ["report", run, f"--html={out / 'page.html'}"],
        "report --junit --markdown": [
            "report",
            run,
            "--junit",
            out / "junit.xml",
            "--markdown",
            out / "report.md",
        ],
        "report --github": ["report", run, "--github"],
        "report --tensorboard": ["report", run, out / "events", "--tensorboard"],
        "report --gradients": ["report", run, "--gradients", 3],
        "diff": ["diff", run, other],
        "diff of itself": ["diff", other, run, "--json"],
        "merge": ["merge", run, "--out", out / "merged"],
        "list": ["list", run.parent],
        "list --json": ["list", run.parent, "--json"],
        "collect": ["collect", run],
        "watch --once": ["watch", run, "--once"],
        "records": ["records", run],
    }
    if traces:
        commands |= {
            "trace": ["trace", run / "traces"],
            "trace --json": ["trace", run / "traces", "--json"],
            "trace --merged": ["trace", run / "traces", "--merged", out / "merged.json.gz"],
            "report --trace": ["report", run, out / "timeline.json.gz", "--trace"],
        }
    return commands


def _wrong(called: Called, arguments: str, out: Path) -> list[str]:
    wrong = []
    if called.status not in STATUSES:
        wrong.append(f"status {called.status}: {called.output[-300:]}")
    if "Traceback (most recent call last)" in called.output:
        wrong.append(f"a traceback: {called.output[-600:]}")
    if not called.output.strip() and not called.wrong and called.status:
        wrong.append(f"status {called.status} without a word")
    texts = {path.name: path.read_text(errors="replace") for path in out.glob("*.*") if path.suffix != ".gz"}
    texts["output"] = called.output
    for name, text in texts.items():
        if CONTROL[0] in text:
            wrong.append(f"a control sequence in {name}")
    if MARKUP in texts.get("page.html", ""):
        wrong.append("markup in the page")
    if "junit.xml" in texts:
        try:
            xml.etree.ElementTree.fromstring(texts["junit.xml"])
        except xml.etree.ElementTree.ParseError as error:
            wrong.append(f"junit.xml: {error}")
    if arguments.endswith("--json") and called.status in (0, 10):
        try:
            json.loads(called.output, parse_constant=float)
        except ValueError:
            wrong.append(f"not JSON: {called.output[:300]}")
    return wrong


def run_chunk(number: int, seeds: Seeds, notes: Path, keep: Path) -> None:
    """In a process of its own: examples of hypothesis, each noted in `notes` before and after it."""
    AUDIT.install()
    _warm_up(seeds)
    limit_memory()
    with notes.open("w") as file:

        def note(**what: object) -> None:
            file.write(json.dumps(what) + "\n")
            file.flush()

        @seed(number)
        @settings(
            max_examples=CHUNK,
            database=None,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.randoms(use_true_random=False))
        def examples(chance: random.Random) -> None:
            folder = Path(tempfile.mkdtemp(prefix="chaos-file-"))
            note(began=str(folder))
            try:
                how, wrong = run_example(chance, seeds, folder)
                if wrong:
                    shutil.copytree(folder, keep / folder.name, symlinks=True, copy_function=_copy_file)
                note(how=how, wrong=[*wrong, f"kept in {folder.name}"] if wrong else [])
            finally:
                shutil.rmtree(folder, ignore_errors=True)

        examples()


def _copy_file(source: str, target: str) -> None:
    if os.path.isfile(source):
        shutil.copyfile(source, target)


def _warm_up(seeds: Seeds) -> None:
    """Import what the commands import, so that only the damage is left to be seen."""
    with tempfile.TemporaryDirectory() as folder:
        for pristine in {*seeds.folders[-1:], seeds.folders[0]}:
            base = Path(folder) / pristine.name
            base.mkdir()
            run, out = Path(shutil.copytree(pristine, base / "run")), base / "out"
            out.mkdir()
            for words in _commands(run, out, pristine, any(run.rglob(_TRACES))).values():
                called = call(words, run, out)
                assert called.status in STATUSES, called


def fuzz(files: int, first: int, results: Results, seconds: float, keep: Path) -> None:
    """Run what is missing of `files` examples, begin nothing after `seconds`."""
    until = time.monotonic() + seconds
    done = sum(1 for _ in results)
    if done >= files or seconds <= 0:
        return
    keep.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-seeds-") as folder:
        seeds = fresh_seeds(Path(folder) / "seeds")
        while done < files and time.monotonic() < until:
            number = first + done
            for outcome in _in_a_process(number, seeds, Path(folder) / "notes", keep):
                if done < files:
                    done += 1
                    results.add(outcome)
                    if outcome.wrong:
                        print(
                            f"{done:5}/{files} chunk {number}: {outcome.fault}: {outcome.wrong}", flush=True
                        )
    print(f"{done} damaged files", flush=True)


def _in_a_process(number: int, seeds: Seeds, notes: Path, keep: Path) -> list[Outcome]:
    notes.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_chunk(number, seeds, notes, keep)
            status = 0
        except BaseException as error:
            sys.stderr.write(f"chunk {number}: {type(error).__name__}: {error}\n")
        finally:
            os._exit(status)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    outcomes, began = [], ""
    for line in notes.read_text().splitlines() if notes.exists() else ():
        what = json.loads(line)
        began = what.get("began", "")
        if "how" in what:
            outcomes.append(Outcome(number, what["how"], number, what["wrong"]))
    if status and began:
        outcomes.append(Outcome(number, "?", number, [f"the process ended with {status} ({began})"]))
    if not outcomes:
        outcomes.append(Outcome(number, "?", number, [f"no example: status {status}"]))
    return outcomes
