"""Resources of a host: disk, processors, memory, system limits."""

from __future__ import annotations

import math
from collections.abc import Iterator

from ddpcheck.analysis.finding import Severity
from ddpcheck.doctor.facts.record import Facts
from ddpcheck.doctor.model import Diagnosis, DoctorContext, Host, check, diagnosis, note, ok, problem, warning
from ddpcheck.formatting import size_text

_MIN_DISK = 64 << 20
_LOW_DISK = 1 << 30
_THREADS_VARIABLE = "OMP_NUM_THREADS"
# Usable processors per single-threaded rank above which the idle ones are worth a note.
_IDLE_PROCESSORS_PER_RANK = 8
_LOW_MEMORY = 1 << 30
_MIN_SHM = 256 << 20
_LOW_SHM = 1 << 30
_SHM_CAUSE = (
    "Data-loader workers and NCCL pass data through /dev/shm. If it is full, they are killed by SIGBUS."
)
_SHM_FIX = "Start the container with more (`--shm-size=8g` or `--ipc=host`), or delete old files in /dev/shm."
_MIN_FILES, _LOW_FILES = 1024, 4096
_MIN_PROCESSES = 1024
_MIN_LOCKED = 64 << 20


@check("run folder", order=50)
def run_folder(context: DoctorContext) -> list[Diagnosis]:
    return context.by_host(_run_folder)


def _run_folder(facts: Facts) -> list[Diagnosis]:
    folder = facts.folder
    if not folder:
        return []
    fix = "Choose another folder with `ddpcheck run --out DIR`."
    if not folder.get("writable"):
        reason = folder.get("reason") or folder.get("error") or "unknown"
        return [
            problem(
                f"The run folder cannot be created: {reason}.",
                "`ddpcheck run` writes the records of all ranks there and would not start.",
                fix,
            )
        ]
    free = int(folder.get("free", 0))
    if free >= _LOW_DISK:
        kind = f" ({folder['kind']})" if folder.get("kind") else ""
        return [ok(f"writable, {size_text(free)} free{kind}")]
    return [
        diagnosis(
            Severity.ERROR if free < _MIN_DISK else Severity.WARNING,
            f"Only {size_text(free)} free on the disk of the run folder.",
            "Records and the job's own checkpoints cannot be written to a full disk.",
            f"Free some space. {fix}",
        )
    ]


@check("processors", order=120)
def processors(context: DoctorContext) -> list[Diagnosis]:
    if not context.is_job:
        return [_processors_of_machine(context.facts[0])]
    return [each for host in context.hosts for each in _processors_of_host(host)]


def _processors_of_machine(facts: Facts) -> Diagnosis:
    usable = _usable_processors([facts])
    total = facts.processors.get("all", 0)
    if usable < total and facts.processors.get("quota") is not None:
        return note(
            f"The container may use {usable:g} of {total} processors.",
            "Programs see all of them and start too many threads.",
            f"Set {_THREADS_VARIABLE} to {max(1, int(usable))} divided by the number of ranks on this machine.",
        )
    return ok(f"{usable:g} of {total} usable")


def _processors_of_host(host: Host) -> list[Diagnosis]:
    usable = _usable_processors(host.facts)
    threads = [int(each.torch.get("threads") or 0) for each in host.facts]
    ranks = len(host.facts)
    if not usable or not all(threads):
        return []
    each = " and ".join(sorted({str(count) for count in threads}))
    if sum(threads) > usable:
        return [
            warning(
                f"{_rank_count(ranks)} with {each} threads each share {usable:g} processors.",
                "Threads compete for processors in every CPU operation.",
                f"Set {_THREADS_VARIABLE}={max(1, int(usable / ranks))}"
                + (", or start fewer ranks." if ranks > usable else "."),
                hosts=(host.name,),
                ranks=host.ranks,
            )
        ]
    on_gpus = any(facts.gpus.get("gpus") for facts in host.facts)
    if max(threads) == 1 and usable >= _IDLE_PROCESSORS_PER_RANK * ranks and not on_gpus:
        return [
            note(
                f"{_rank_count(ranks)} with 1 thread each leave most of {usable:g} processors idle.",
                f"torchrun sets {_THREADS_VARIABLE}=1 for several ranks if it is not set.",
                f"Set {_THREADS_VARIABLE}={int(usable / ranks)} if the job computes on the CPU.",
                hosts=(host.name,),
                ranks=host.ranks,
            )
        ]
    return [ok(f"{usable:g} for {_rank_count(ranks)} with {each} threads each", hosts=(host.name,))]


def _usable_processors(facts: list[Facts] | tuple[Facts, ...]) -> float:
    """Processors that any of the ranks may run on, at most the quota of their control group."""
    allowed = {one for each in facts for one in each.processors.get("allowed", ())}
    quotas = [each.processors.get("quota") or math.inf for each in facts]
    return min(float(len(allowed)), min(quotas, default=math.inf))


def _rank_count(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


@check("memory", order=130)
def memory(context: DoctorContext) -> list[Diagnosis]:
    return context.by_host(_memory)


def _memory(facts: Facts) -> list[Diagnosis]:
    memory = facts.memory
    total, available, limit = memory.get("total") or 0, memory.get("available") or 0, memory.get("limit")
    if not total:
        return []
    diagnoses = []
    if limit is not None and limit < total:
        diagnoses.append(
            note(
                f"The container may use {size_text(limit)} of {size_text(total)}.",
                "It applies to all ranks and data-loader workers of this host together. Above it, processes are killed "
                "without a message.",
                "Request more from the scheduler or the container (`--mem`, `--memory`) if the job needs it.",
            )
        )
    if min(available, limit or available) < _LOW_MEMORY:
        diagnoses.append(
            warning(
                f"Only {size_text(min(available, limit or available))} of memory available.",
                "torch alone takes several hundred megabytes in every rank and data-loader worker.",
                "End other programs on this host.",
            )
        )
    return diagnoses or [ok(f"{size_text(available)} of {size_text(total)} available")]


@check("shared memory", order=140)
def shared_memory(context: DoctorContext) -> list[Diagnosis]:
    return context.by_host(_shared_memory)


def _shared_memory(facts: Facts) -> list[Diagnosis]:
    shared = facts.memory.get("shared") or {}
    if not shared:
        return []
    if shared.get("error") or not shared.get("writable", True):
        reason = shared.get("error") or "it is not writable"
        return [warning(f"/dev/shm cannot be used: {reason}.", _SHM_CAUSE, _SHM_FIX)]
    total, free = shared["total"], shared["free"]
    text = f"{size_text(free)} of {size_text(total)} free in /dev/shm"
    if free >= _LOW_SHM:
        return [ok(text)]
    severity = Severity.WARNING if free < _MIN_SHM else Severity.NOTE
    return [diagnosis(severity, f"Only {text}.", _SHM_CAUSE, _SHM_FIX)]


@check("limits", order=150)
def limits(context: DoctorContext) -> list[Diagnosis]:
    return context.by_host(_limits)


def _limits(facts: Facts) -> list[Diagnosis]:
    if not facts.limits or facts.limits.get("error"):
        return []
    diagnoses = [*_open_files(facts), *_processes(facts), *_locked_memory(facts)]
    return diagnoses or [ok(_limits_line(facts))]


def _open_files(facts: Facts) -> Iterator[Diagnosis]:
    soft, hard = _soft_and_hard(facts, "open_files")
    if soft is None or soft >= _LOW_FILES:
        return
    raised = "" if hard is None else f" (up to {hard} without an administrator)"
    yield diagnosis(
        Severity.WARNING if soft < _MIN_FILES else Severity.NOTE,
        f"The limit of open files is {soft} per process.",
        "Every tensor from a data-loader worker and every connection takes one: jobs with many workers or ranks fail "
        "with `Too many open files`.",
        f"Raise it before starting the job: `ulimit -n 65536`{raised}.",
    )


def _processes(facts: Facts) -> Iterator[Diagnosis]:
    soft, _ = _soft_and_hard(facts, "processes")
    if soft is None or soft >= _MIN_PROCESSES or facts.limits.get("root"):
        return
    yield warning(
        f"The limit of processes and threads is {soft} per user.",
        "Every rank and data-loader worker starts several threads; above the limit they fail to start.",
        "Raise it before starting the job (`ulimit -u`), or start fewer threads.",
    )


def _locked_memory(facts: Facts) -> Iterator[Diagnosis]:
    """Only relevant for InfiniBand: RDMA needs locked memory."""
    soft, _ = _soft_and_hard(facts, "locked_memory")
    if soft is None or soft >= _MIN_LOCKED or not facts.infiniband:
        return
    yield warning(
        f"The limit of locked memory is {size_text(soft)} per process, and this host has InfiniBand.",
        "NCCL must lock its buffers for InfiniBand. It fails, or falls back to a slower transport.",
        "Remove the limit (`ulimit -l unlimited`; `--ulimit memlock=-1` for a container).",
    )


def _soft_and_hard(facts: Facts, name: str) -> tuple[int | None, int | None]:
    soft, hard = facts.limits.get(name) or (None, None)
    return soft, hard


def _limits_line(facts: Facts) -> str:
    files, processes = _soft_and_hard(facts, "open_files")[0], _soft_and_hard(facts, "processes")[0]
    return f"{files or 'unlimited'} open files, {processes or 'unlimited'} processes"
