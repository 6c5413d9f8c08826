"""Knows the one way in which torch fails a job that has done all its work, so that it can be run once more.

With gloo a worker thread may want the interpreter's lock while the interpreter goes down, or while a DDP module, which
torch keeps in a reference cycle, outlives the group it was made with. The process then aborts ("terminate called
without an active exception") or never ends, now and then and with or without ddpcheck: pytorch#179291 and
pytorch#190489 tell of it. Nothing else is excused: a rank must be seen to stand behind the end of its script's work.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Makes Python write every thread's stack when it aborts, or is told to by SIGABRT.
ENVIRONMENT = {"PYTHONFAULTHANDLER": "1"}
ABORTED = "terminate called without an active exception"
# The last thing that a script does with its group, by itself or through accelerate.
_LEAVES_GROUP = ("destroy_process_group(", ".end_training(")
_DUMP = "Fatal Python error: Aborted"
# Of torchrun: "[rank0]: …".
_RANK = re.compile(r"^\[[^\]]*\]: ?")
_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>.+)')
_THREAD = re.compile(r"(Current thread|Thread) 0x[0-9a-f]+")
# Helpers of multiprocessing that are told to abort along with the ranks.
_NO_RANK = ("resource_tracker.py", "forkserver.py")


@dataclass(frozen=True)
class Frame:
    """One line of a stack."""

    file: str
    line: int


def was_torch_s_own(script: Path, stderr: Sequence[str], *, stopped: bool) -> bool:
    """Whether a job that failed, or had to be `stopped`, was at its end on every rank that left a stack."""
    text = "\n".join(stderr)
    if not stopped and ABORTED not in text:
        return False
    stacks = [stack for stack in main_stacks(text) if not _is_helper(stack)]
    return bool(stacks) and all(_is_behind_the_work(script, stack) for stack in stacks)


def main_stacks(text: str) -> Iterator[list[Frame]]:
    """The stack of each aborted process's main thread, innermost first; empty where it runs no Python any more."""
    lines = [_RANK.sub("", line).strip() for line in text.splitlines()]
    for start in (number for number, line in enumerate(lines) if line == _DUMP):
        # Threads come youngest first, so that the main thread's stack is the last of a dump.
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
    """No Python left to run, or nothing but the return from the function that left the group."""
    return not stack or (
        Path(stack[0].file).name == script.name and 0 < _last_line_with_group(script) <= stack[0].line
    )


def _last_line_with_group(script: Path) -> int:
    lines = script.read_text(encoding="utf-8").splitlines()
    return max((n for n, line in enumerate(lines, 1) if any(w in line for w in _LEAVES_GROUP)), default=0)


def _is_helper(stack: Sequence[Frame]) -> bool:
    return any(Path(frame.file).name in _NO_RANK for frame in stack)
