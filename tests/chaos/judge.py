"""What should not have happened to a job, to its records and to its report."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ddpcheck.analysis.report_builder import analyse_run
from tests.chaos.faults import Effect, Fault
from tests.chaos.scene import Launch, Scene, weights
from tests.helpers.commands import BIN, environment
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
    said = "\n".join(launch.stderr for launch in launches)
    if not (run_dir / "report.json").is_file():
        if fault.reports:
            yield f"no report: {said[-1500:]}"
        elif not _SENTENCE.search(said) and -9 not in fault.statuses:
            yield f"neither a report nor a sentence: {said[-1500:]}"
    if not run_dir.is_dir():
        if str(run_dir) not in said:
            yield f"no sentence about the run folder: {said[-1500:]}"
        return
    again = _report_again(run_dir)
    if again.returncode not in (0, 10) or "Traceback" in again.stderr:
        if fault.keeps_records or again.returncode != 1 or not again.stderr.strip():
            yield f"`ddpcheck report`: status {again.returncode}: {again.stderr[-1500:]}"
        return
    report: dict[str, Any] = json.loads(again.stdout)
    codes = {each["code"] for each in report["findings"] if each["severity"] != "note"}
    if fault.codes and not codes & fault.codes:
        yield f"findings {sorted(codes)}, but none of {sorted(fault.codes)}"
    if codes - fault.codes - fault.also:
        yield f"findings {sorted(codes - fault.codes - fault.also)} without such a mistake"
    if fault.keeps_records:
        before = analyse_run(scene.copies[run_dir]).steps
        if report["steps"] < before:
            yield f"{report['steps']} steps are readable, {before} were before the fault"


def _report_again(run_dir: Path) -> subprocess.CompletedProcess[str]:
    command = [str(BIN / "ddpcheck"), "report", str(run_dir), "--json"]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300)
