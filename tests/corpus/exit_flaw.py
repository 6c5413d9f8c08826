"""Recognises a defect of torch that fails a job after all its work, so that the job can be run again.

With gloo, a worker thread may need the interpreter's lock while the interpreter shuts down, or while a DDP module,
which torch keeps in a reference cycle, outlives its process group. The process then aborts ("terminate called without
an active exception") or never ends, in a small share of runs, with or without ddpcheck: see pytorch#179291 and
pytorch#190489. No other failure is excused: the stack of a rank must show that the script's work was done.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Makes Python write the stack of every thread when it aborts or receives SIGABRT.
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
ABORTED = "terminate called without an active exception"
# The last use of the process group in a script, directly or through accelerate.
_LEAVES_GROUP = ("destroy_process_group(", ".end_training(")
_DUMP = "Fatal Python error: Aborted"
# torchrun's prefix: "[rank0]: …".
_RANK = re.compile(r"^\[[^\]]*\]: ?")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
# Helper processes of multiprocessing, which abort together with the ranks.
_NO_RANK = ("resource_tracker.py", "forkserver.py")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int


def was_torch_s_own(script: Path, stderr: Sequence[str], *, stopped: bool) -> bool:
    """Whether a job that failed, or had to be `stopped`, had finished its work on every rank that left a stack."""
    text = "\n".join(stderr)
    if not stopped and ABORTED not in text:
        return False
    stacks = [stack for stack in main_stacks(text) if not _is_helper(stack)]
    return bool(stacks) and all(_is_behind_the_work(script, stack) for stack in stacks)


def main_stacks(text: str) -> Iterator[list[Frame]]:
    """The main thread's stack of each aborted process, innermost first; empty if it no longer runs Python."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines()]
    for start in (number for number, line in enumerate(lines) if line == _DUMP):
        # A dump lists the newest thread first, so the main thread is the last.
        stack: list[Frame] | None = None
        for line in lines[start + 1 :]:
            frame = _FRAME.match(line)
            if line == _DUMP or line.startswith("Extension modules:"):
                break
            if _THREAD.match(line):
                stack = []
            elif frame is not None and stack is not None:
                stack.append(Frame(frame["file"], int(frame["line"])))
        if stack is not None:
            yield stack


def _is_behind_the_work(script: Path, stack: Sequence[Frame]) -> bool:
    """Whether no Python is running, or only the return from the function that destroyed the group."""
    return not stack or (
        Path(stack[0].file).name == script.name and 0 < _last_line_with_group(script) <= stack[0].line
    )


def _last_line_with_group(script: Path) -> int:
    lines = script.read_text(encoding="utf-8").splitlines()
    return max((n for n, line in enumerate(lines, 1) if any(w in line for w in _LEAVES_GROUP)), default=0)


def _is_helper(stack: Sequence[Frame]) -> bool:
    return any(Path(frame.file).name in _NO_RANK for frame in stack)
