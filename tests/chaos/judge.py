"""What should not have happened to a job, to its records and to its report."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.errors import UserError
from ddpcheck.launcher.runs import launcher_has_ended
from ddpcheck.records.reader import read_run_file
from ddpcheck.reports.json_report import to_json
from tests.chaos.faults import Effect, Fault
from tests.chaos.scene import Launch, Scene, weights
from tests.helpers.tracebacks import frames_of_ddpcheck

_FRAME = re.compile(r'File "[^"]+", line \d+')
_SENTENCE = re.compile(r"^ddpcheck: .*\S.*$", re.MULTILINE)


def wrongs(scene: Scene, fault: Fault, expected: Mapping[int, str]) -> Iterator[str]:
    """`expected`: the weights of the same job without ddpcheck."""
    yield from _wrong_job(scene, fault, expected)
    for launch in scene.launches:
        if launch.gone:
            continue
        if launch.status == -14:
            yield f"ddpcheck run did not end: {_end(launch)}"
        elif launch.status not in fault.statuses:
            yield f"status {launch.status}: {_end(launch)}"
        if _raised_by_ddpcheck(launch.stderr):
            yield f"a traceback of ddpcheck: {_end(launch)}"
    # Nodes with one run folder have one report.
    for run_dir in {launch.run_dir for launch in scene.launches if not launch.gone}:
        of_folder = [launch for launch in scene.launches if launch.run_dir == run_dir and not launch.gone]
        yield from _wrong_report(scene, fault, run_dir, of_folder)
    yield from scene.left_behind()


def _end(launch: Launch) -> str:
    return launch.stderr[-1500:]


def _wrong_job(scene: Scene, fault: Fault, expected: Mapping[int, str]) -> Iterator[str]:
    if fault.effect is not Effect.NONE:
        return
    exits = [path.read_text() for path in sorted(scene.state.glob("exits-*"))]
    if set(" ".join(exits).split()) != {"0"}:
        yield f"the job was harmed: {exits or 'no end'}; {_end(scene.launches[0])}"
    elif weights(scene.state) != expected:
        yield "the job has other weights"


def _raised_by_ddpcheck(text: str) -> bool:
    """Whether the last frame of a traceback is ddpcheck's. Frames that pass an error of the job on may be above it."""
    tracebacks = text.split("Traceback (most recent call last)")[1:]
    last_frames = (_FRAME.findall(each)[-1:] for each in tracebacks)
    return any(frames_of_ddpcheck(frame) for frames in last_frames for frame in frames)


def _wrong_report(scene: Scene, fault: Fault, run_dir: Path, launches: list[Launch]) -> Iterator[str]:
    stderr = "\n".join(launch.stderr for launch in launches)
    if not (run_dir / "report.json").is_file():
        if fault.reports:
            yield f"no report: {stderr[-1500:]}"
        elif not _SENTENCE.search(stderr) and -9 not in fault.statuses:
            yield f"neither a report nor a sentence: {stderr[-1500:]}"
    if not run_dir.is_dir():
        if str(run_dir) not in stderr:
            yield f"no sentence about the run folder: {stderr[-1500:]}"
        return
    try:
        # As `ddpcheck report`, whose message is that of the error.
        abandoned = launcher_has_ended(read_run_file(run_dir))
        report = json.loads(to_json(analyse_run(run_dir, abandoned=abandoned)))
    except UserError as error:
        if fault.keeps_records:
            yield f"`ddpcheck report`: {error}"
        return
    except Exception as error:
        yield f"`ddpcheck report` raises {type(error).__name__}: {error}"
        return
    codes = {each["code"] for each in report["findings"] if each["severity"] != "note"}
    if fault.codes and not codes & fault.codes:
        yield f"findings {sorted(codes)}, but none of {sorted(fault.codes)}"
    if codes - fault.codes - fault.also:
        yield f"findings {sorted(codes - fault.codes - fault.also)} without such a mistake"
    if fault.keeps_records:
        before = analyse_run(scene.copies[run_dir]).steps
        if report["steps"] < before:
            yield f"{report['steps']} steps are readable, {before} were before the fault"
