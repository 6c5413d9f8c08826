"""DDP605: ddpcheck disabled one of its probes."""

from __future__ import annotations

import re

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.step_coverage.build import MAIN_CHECKS, lost_checks
from ddpcheck.formatting import name_ranks
from ddpcheck.records.reasons import KERNEL_PROBE, NO_EXCHANGE, KernelLoss, NoHangWatch
from ddpcheck.rules.rule import Rule

RULE = Rule(
    code="DDP605",
    severity=Severity.NOTE,
    title="ddpcheck disabled one of its probes",
    summary="ddpcheck disabled one of its probes, and why",
    needs=(),
)

_MOST_HOSTS = 4
# The probe in fault records about missing names of torch; their error is "torch 2.9.0 has no NAME: CONSEQUENCE".
_MISSING_NAME = "torch_compat"


# What is missing, and what to do about it.
_KERNEL_LOSSES = {
    KernelLoss.NO_TRITON: (
        "Triton is not installed",
        "Install the triton package that belongs to your torch.",
    ),
    KernelLoss.NO_COMPILER: (
        "Triton found no C compiler",
        "Install a C compiler in the image, or set CC; `ddpcheck doctor` looks for it.",
    ),
    KernelLoss.NO_CACHE_FOLDER: (
        "Triton cannot write its cache folder",
        "Set TRITON_CACHE_DIR to a folder that can be written.",
    ),
    KernelLoss.COMPILATION: (
        "Triton cannot compile the kernel",
        "Update Triton, or report it with this message.",
    ),
    KernelLoss.WRONG_RESULT: (
        "The kernel gave a wrong result in its self-check",
        "Report it with this message.",
    ),
    KernelLoss.NO_KERNEL: ("There is no kernel for this type of device", ""),
    KernelLoss.LAUNCH: (
        "The kernel could not be launched any more",
        "If the device is out of memory, reduce what the job allocates. Otherwise report it with this message.",
    ),
}


def find(context: RuleContext) -> list[Finding]:
    faults: dict[tuple[str, str, str], list[int]] = {}
    for rank, data in context.attempt.ranks.items():
        for fault in data.faults:
            faults.setdefault((f"{fault.probe}.{fault.entry}", fault.error, fault.where), []).append(rank)
    for fault in context.unattributed_faults:
        ranks = faults.setdefault((f"{fault.probe}.{fault.entry}", fault.error, fault.where), [])
        ranks += [fault.rank] if fault.rank is not None and fault.rank not in ranks else []
    findings = [_fault(context, *key, tuple(sorted(ranks))) for key, ranks in faults.items()]
    findings += [_unwritten(context, rank, text) for rank, text in sorted(context.write_errors.items())]
    findings += _untested_versions(context)
    # The launcher's faults belong to the run, so they are reported once.
    return findings + (_of_launchers(context) if context.number == 0 else [])


# docs/compatibility.md has the results from this version on.
OLDEST_TORCH = (2, 4)
_TORCH_VERSION = re.compile(r"(\d+)\.(\d+)")


def _untested_versions(context: RuleContext) -> list[Finding]:
    """Versions with which ddpcheck was not tested, or is known to give wrong findings."""
    old: dict[str, list[int]] = {}
    for rank, data in sorted(context.attempt.ranks.items()):
        findings = _TORCH_VERSION.match(data.header.torch)
        if findings is not None and (int(findings[1]), int(findings[2])) < OLDEST_TORCH:
            old.setdefault(f"torch {data.header.torch}", []).append(rank)
        if data.header.python.endswith("t"):
            old.setdefault(f"the free-threaded build of Python {data.header.python[:-1]}", []).append(rank)
    return [
        context.finding(
            RULE,
            f"{name_ranks(ranks).capitalize()} {'uses' if len(ranks) == 1 else 'use'} {what}, with which ddpcheck was "
            "not tested. Findings may be wrong or missing.",
            ranks=tuple(ranks),
            evidence={"entry": "versions", "version": what},
            cause="ddpcheck reads internals of torch that differ between versions",
            fix=f"Use torch {'.'.join(map(str, OLDEST_TORCH))} or later on a standard build of Python, or look at "
            "findings with this in mind.",
        )
        for what, ranks in old.items()
    ]


def _of_launchers(context: RuleContext) -> list[Finding]:
    notes = context.notes
    findings = [_unsampled(context, *key, tuple(sorted(hosts))) for key, hosts in notes.unsampled.items()]
    findings += [_incomplete_log(context, notes.unwritten)] if notes.unwritten else []
    return findings + [
        _no_hang_watch(context, why, tuple(sorted(notes.no_hang_watch[why.value])))
        for why in NoHangWatch
        if why.value in notes.no_hang_watch
    ]


def _unsampled(context: RuleContext, source: str, error: str, hosts: tuple[str, ...]) -> Finding:
    names = f"{', '.join(hosts[:_MOST_HOSTS])}{' …' if len(hosts) > _MOST_HOSTS else ''}"
    # The thread that reads all sources failed, not a single source.
    whole_node = source in ("", "sample", "thread")
    return context.finding(
        RULE,
        f"Sampling {'the node' if whole_node else source} failed{f' on {names}' if hosts else ''}: {error}. The job "
        f"was not affected{'' if whole_node else ', and other samples continued'}; these samples are missing.",
        evidence={"entry": f"sampler.{source}", "error": error, "hosts": list(hosts[:_MOST_HOSTS])},
        cause="a driver that does not respond, an unexpected environment, or a bug in ddpcheck",
        fix="For GPUs, check the driver (nvidia-smi). Otherwise report it with this message.",
    )


def _incomplete_log(context: RuleContext, lines: int) -> Finding:
    return context.finding(
        RULE,
        f"{lines} lines of the node log could not be written: hardware samples are missing, or notes on how processes "
        "ended. The ranks' own records are not affected.",
        evidence={"lines": lines},
        cause="the run folder cannot be written, or its disk is nearly full",
        fix="Free some space, or choose another run folder with --out.",
    )


# Cause and fix of hangs that cannot be detected.
_NO_HANG_WATCH = {
    NoHangWatch.NO_MEMORY: (
        "there is no place for memory that ranks and ddpcheck share: /dev/shm and TMPDIR cannot be written, and the "
        "run folder is on a network file system",
        "Mount a tmpfs at /dev/shm, or set TMPDIR to a folder that can be written.",
    ),
    NoHangWatch.HIDDEN: (
        "the ranks run in a container whose processes ddpcheck cannot see",
        "Put 'ddpcheck run --' inside the container, or start ddpcheck's container with --pid=host.",
    ),
}


def _no_hang_watch(context: RuleContext, why: NoHangWatch, ranks: tuple[int, ...]) -> Finding:
    cause, fix = _NO_HANG_WATCH[why]
    return context.finding(
        RULE,
        f"Hangs{f' of {name_ranks(ranks)}' if ranks else ''} are not detected. Replicas are compared as usual.",
        ranks=ranks,
        evidence={"entry": "launcher.hangs", "why": why.value},
        cause=cause,
        fix=fix,
    )


def _no_exchange(context: RuleContext, error: str, ranks: tuple[int, ...]) -> Finding:
    return context.finding(
        RULE,
        f"{name_ranks(ranks).capitalize()} cannot share memory with ddpcheck ({error}). Hangs of these ranks are not "
        "detected, and values that differ are not kept. Replicas are compared as usual, from the records.",
        ranks=ranks,
        evidence={"entry": f"{NO_EXCHANGE}.open", "error": error, "why": NoHangWatch.NO_MEMORY.value},
        cause="they run in a container with a /dev/shm of its own, or as another user, and the run folder is on a file "
        "system that other machines may use",
        fix="Share it with the container (-v /dev/shm:/dev/shm, or --ipc=host), and run the job as the user that runs "
        "ddpcheck.",
    )


def _fault(context: RuleContext, entry: str, error: str, where: str, ranks: tuple[int, ...]) -> Finding:
    where_failed = f" on {name_ranks(ranks)}" if ranks else ""
    if entry.startswith(f"{_MISSING_NAME}."):
        return _missing_name(context, entry, error, ranks)
    if entry.startswith(f"{KERNEL_PROBE}."):
        return _kernel_loss(context, entry, error, ranks)
    probe = entry.partition(".")[0]
    if probe == NO_EXCHANGE:
        return _no_exchange(context, error, ranks)
    lost = lost_checks(probe)
    checks = f"these checks are not complete from then on: {'; '.join(lost)}" if lost else ""
    return context.finding(
        RULE,
        f"ddpcheck's probe {entry} failed{where_failed} and was disabled: {error}. Training was not affected; "
        f"{checks or 'what this probe checks was not checked from then on'}.",
        severity=Severity.WARNING if probe in MAIN_CHECKS else Severity.NOTE,
        ranks=ranks,
        evidence={"entry": entry, "error": error, "where": where, "lost_checks": list(lost)},
        cause="a bug in ddpcheck, or an unexpected environment",
        fix="Report it with this message. "
        + (
            "Until it is mended, a run without findings is no proof that replicas agree."
            if probe in MAIN_CHECKS
            else "The other checks of this run are valid."
        ),
    )


def _missing_name(context: RuleContext, entry: str, error: str, ranks: tuple[int, ...]) -> Finding:
    version, _, name_and_consequence = error.partition(" has no ")
    return context.finding(
        RULE,
        f"This version of torch has no {name_and_consequence or entry}. Training was not affected, and all other "
        "checks were made.",
        ranks=ranks,
        evidence={"entry": entry, "error": error, "where": ""},
        cause=f"{version} renamed or removed an internal name that ddpcheck uses",
        fix="Update ddpcheck, or use a version of torch that it supports.",
    )


def _kernel_loss(context: RuleContext, entry: str, error: str, ranks: tuple[int, ...]) -> Finding:
    name = entry.partition(".")[2]
    known = name in {loss.value for loss in KernelLoss}
    cause, fix = _KERNEL_LOSSES[KernelLoss(name)] if known else (name, "")
    return context.finding(
        RULE,
        f"{cause} ({error}): tensors on the device are read by operators of torch, which takes much longer"
        f"{f' on {name_ranks(ranks)}' if ranks else ''}. One step was checked first, and then as few as keep the cost "
        "below the budget, at most 5 % of a step. Digests and sketches are the same.",
        severity=Severity.WARNING,
        ranks=ranks,
        evidence={"entry": entry, "error": error, "where": ""},
        cause=cause,
        fix=fix or "--budget off checks every step, which may take longer than the step itself.",
    )


def _unwritten(context: RuleContext, rank: int, text: str) -> Finding:
    message = (
        f"Rank {rank} could not continue to write its records: {text}. Later steps are not in this report."
        if rank in context.attempt.ranks
        else f"Rank {rank} could not write any record: {text}. It trained, but was not checked."
    )
    return context.finding(
        RULE,
        message,
        severity=Severity.WARNING,
        ranks=(rank,),
        evidence={"error": text},
        cause="the run folder cannot be written",
        fix="Free some space, or choose another run folder with --out.",
    )


def failed_rule(context: RuleContext, code: str, error: Exception) -> Finding:
    """Reported in place of the findings of a rule that raised an exception."""
    return context.finding(
        RULE,
        f"ddpcheck's rule for {code} failed: {type(error).__name__}: {error}. What it checks was not checked.",
        severity=Severity.WARNING,
        evidence={"rule": code, "error": f"{type(error).__name__}: {error}"},
        cause="a bug in ddpcheck, or unexpected records",
        fix="Report it with this message. The other checks of this run are valid.",
    )
