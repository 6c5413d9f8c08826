"""DDP601: no rank, or not every rank, reported."""

from __future__ import annotations

from pathlib import Path

import ddpcheck
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import RankStatus
from ddpcheck.formatting import name_ranks
from ddpcheck.records.reasons import Unwatched
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP601",
    severity=Severity.ERROR,
    title="Some or all ranks did not report",
    summary="no rank, or not every rank, reported",
    needs=(),
    incomplete=True,
    # A rank that died or hangs explains why others did not report.
    order=603.5,
)


def find(context: RuleContext) -> list[Finding]:
    # If ddpcheck itself failed, DDP605 reports it.
    if not context.attempt.ranks:
        # DDP603 reports ranks that wait for others.
        known = context.unattributed_faults or context.write_errors or context.notes.rendezvous
        return [] if known else [_no_rank(context)]
    failed = {fault.rank for fault in context.unattributed_faults} | set(context.write_errors)
    missing = tuple(row.rank for row in context.with_status(RankStatus.MISSING) if row.rank not in failed)
    if not missing:
        return []
    reported = tuple(sorted(context.attempt.ranks))
    return [
        context.finding(
            RULE,
            f"The job has {context.attempt.world_size} ranks, but only {name_ranks(reported)} reported. There are "
            f"no records of {name_ranks(missing)}.",
            ranks=missing,
            evidence={"reported": list(reported), "world_size": context.attempt.world_size},
            cause="these ranks started without ddpcheck, died before they created their process group, or write "
            "to another folder",
            fix="Start every rank under ddpcheck run, with a run folder that all of them can write to, or "
            "add 'import ddpcheck.auto' at the top of the script.",
        )
    ]


# What the launcher has seen of processes that were not watched, the most definite first.
_SEEN = {
    Unwatched.OPTIONS: (
        "the job's Python runs with -S, -I or -E and ignores injected code",
        "Remove the option, or add 'import ddpcheck.auto' at the top of the script.",
    ),
    Unwatched.NOT_INSTALLED: (
        "the ranks run in a container or under another root, in which ddpcheck does not exist at its path",
        "Mount the folder of this installation and the run folder at the same paths: {mounts}",
    ),
    Unwatched.NO_FOLDER: (
        "the ranks run in a container or under another root, in which the run folder does not exist",
        "Mount the run folder at the same path: {mounts}",
    ),
    Unwatched.OTHER_USER: (
        "the ranks run as another user, who cannot write to the run folder",
        "Run them as the user that runs ddpcheck, or create a folder that both may write to (mkdir -m 1777 DIR) and "
        "pass it with --out.",
    ),
    # Processes in a container lack the variables too.
    Unwatched.CONTAINER: (
        "{name} starts the ranks in a container, which gets no variable, no file and no folder by itself",
        "Put 'ddpcheck run --' inside the container, before the launcher of the ranks. Or pass variables and folders: "
        "-e PYTHONPATH -e DDPCHECK_CONFIG {mounts}",
    ),
    Unwatched.ENVIRONMENT: (
        "the ranks were started with an environment without ddpcheck's variables, as by `srun --export=NONE`, `sudo` "
        "or `env -i`",
        "Pass PYTHONPATH and DDPCHECK_CONFIG on (`ddpcheck env` prints such variables), or put 'ddpcheck run --' "
        "behind the program that resets the environment.",
    ),
    Unwatched.REMOTE: (
        "{name} starts the ranks elsewhere: they did not get ddpcheck's variables (as with `srun --export=NONE`), or "
        "cannot write to the run folder",
        "Put 'ddpcheck run --' behind {name}, on the nodes, or put the run folder on shared storage with --out. For "
        "workers that exist already, see `ddpcheck env`.",
    ),
}


def _seen(context: RuleContext) -> tuple[str, str] | None:
    """Cause and fix by what the launcher has seen."""
    unwatched = context.notes.unwatched
    why = next((each for each in _SEEN if each.value in unwatched), None)
    if why is None:
        return None
    folders = [str(context.folder)]
    if why is not Unwatched.NO_FOLDER:
        folders.insert(0, str(Path(ddpcheck.__file__).parent))
    mounts = " ".join(f"-v {folder}:{folder}" for folder in folders)
    cause, fix = (text.format(name=unwatched[why.value], mounts=mounts) for text in _SEEN[why])
    return cause, fix


def _no_rank(context: RuleContext) -> Finding:
    failed = context.exit_code not in (None, 0)
    seen = _seen(context)
    if seen is not None and not failed:
        return context.finding(
            RULE,
            "No process of the command wrote a record, so there was nothing to check.",
            evidence={"exit_code": context.exit_code, "unwatched": dict(context.notes.unwatched)},
            cause=seen[0],
            fix=seen[1],
        )
    ending = f" The command itself failed (exit status {context.exit_code})." if failed else ""
    return context.finding(
        RULE,
        "No process of the command created a process group or a DDP module, so there was nothing to check."
        + ending,
        evidence={"exit_code": context.exit_code},
        cause="the command failed before it created one"
        if failed
        else "the command does not train with DDP (some launchers silently start only one process), or its "
        "Python runs with -S, -I or -E and ignores injected code",
        fix="Run the command without ddpcheck first."
        if failed
        else "Put the launcher behind 'ddpcheck run --'. With python -S/-I/-E, add 'import ddpcheck.auto' at "
        "the top of the script.",
    )
