"""What PyTorch itself reports about a fault: nothing, a warning, an error, or a hang."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tests.corpus.jobs import Job, Outcome, run_batch

WAIT_SECONDS = 20.0
DETAIL = {"TORCH_DISTRIBUTED_DEBUG": "INFO"}
_MOST_LETTERS = 160

# "/path/file.py:12: UserWarning: text" of Python, "[rank0]:[W1116 13:20:31.5 reducer.cpp:1] text" of torch's core.
_PYTHON_WARNING = re.compile(r"^\S+:\d+: (?P<text>\w*Warning: .*)$", re.MULTILINE)
_CORE_WARNING = re.compile(r"^(\[rank\d+\]:)?\[W\d{4} [^\]]*\] (?P<text>.*)$", re.MULTILINE)
# The last line of a traceback, with torchrun's prefix.
_ERROR = re.compile(r"^(\[rank\d+\]: ?)?(?P<text>[\w.]*(Error|Exception|Interrupt)\b: .*)$", re.MULTILINE)
# Errors that only follow from the end of another rank.
_SECOND_HAND = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "recvVector",
    "SignalException",
)
_NO_WORDS = ("ChildFailedError",)
# Messages that every job causes.
_OF_NO_MATTER = ("destroy_process_group", "Detected CPU only", "OMP_NUM_THREADS", "socket.cpp")


@dataclass(frozen=True)
class PlainResult:
    """The outcome of a job without ddpcheck."""

    kind: str  # "nothing", "a warning", "an error", "a hang"
    quote: str = ""
    # How often the job was run before and failed by a defect of torch.
    retried: int = field(default=0, compare=False)

    def __str__(self) -> str:
        return f"{self.kind}: {self.quote}" if self.quote else self.kind


def run_plainly(jobs: Sequence[Job], env: Mapping[str, str]) -> dict[str, PlainResult]:
    """Outcomes by the names of the jobs, which share one launcher."""
    outcomes = run_batch(jobs, watched=False, seconds=WAIT_SECONDS, env=env)
    return {o.job.name: replace(classify(o), retried=o.retried) for o in outcomes}


def classify(outcome: Outcome) -> PlainResult:
    """By the exit status first, then by the messages."""
    text = "\n".join(outcome.stderr)
    own_ends = [status for rank, status in enumerate(outcome.exits) if rank not in outcome.stopped]
    if any(own_ends) or outcome.status not in (0, None):
        return PlainResult("an error", _error(outcome, text))
    if outcome.stopped:
        return PlainResult("a hang")
    warnings = [
        match["text"]
        for pattern in (_PYTHON_WARNING, _CORE_WARNING)
        for match in pattern.finditer(text)
        if not any(word in match[0] for word in _OF_NO_MATTER)
    ]
    return PlainResult("a warning", _short(warnings[0])) if warnings else PlainResult("nothing")


def _error(outcome: Outcome, text: str) -> str:
    errors = [match["text"] for match in _ERROR.finditer(text)]
    errors = [error for error in errors if not any(word in error for word in _NO_WORDS)]
    own = [error for error in errors if not any(word in error for word in _SECOND_HAND)]
    if own or errors:
        return _short((own or errors)[0])
    return f"exit statuses {list(outcome.exits)}" if outcome.exits else f"exit status {outcome.status}"


def _short(text: str) -> str:
    # Positions in gloo's source do not help a reader.
    text = re.sub(r"\[[^\]]*\.(cc|cpp|h):\d+\]\s*", "", text)
    text = " ".join(text.split())
    return text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1].rstrip()}…"
