"""DDP605: ddpcheck switched a probe of its own off."""

from __future__ import annotations

from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.formatting import name_ranks

MOST_HOSTS = 4


def find(case: RuleContext) -> list[Finding]:
    faults: dict[tuple[str, str, str], list[int]] = {}
    for rank, data in case.attempt.ranks.items():
        for fault in data.faults:
            faults.setdefault((f"{fault.probe}.{fault.entry}", fault.error, fault.where), []).append(rank)
    for fault in case.strays:
        ranks = faults.setdefault((f"{fault.probe}.{fault.entry}", fault.error, fault.where), [])
        ranks += [fault.rank] if fault.rank is not None and fault.rank not in ranks else []
    findings = [_fault(case, *key, tuple(sorted(ranks))) for key, ranks in faults.items()]
    findings += [_unwritten(case, rank, text) for rank, text in sorted(case.troubles.items())]
    return findings + (
        _of_launchers(case) if case.number == 0 else []
    )  # matters of the run, not of an attempt


def _of_launchers(case: RuleContext) -> list[Finding]:
    notes = case.notes
    found = [_unsampled(case, *key, tuple(sorted(hosts))) for key, hosts in notes.unsampled.items()]
    return found + ([_incomplete_log(case, notes.unwritten)] if notes.unwritten else [])


def _unsampled(case: RuleContext, source: str, error: str, hosts: tuple[str, ...]) -> Finding:
    told = f"{', '.join(hosts[:MOST_HOSTS])}{' …' if len(hosts) > MOST_HOSTS else ''}"
    alone = source in ("", "sample", "thread")  # not one source, but the thread that reads all of them
    return case.finding(
        "DDP605",
        f"Sampling {'the node' if alone else source} failed{f' on {told}' if hosts else ''}: {error}. The job was not "
        f"touched{'' if alone else ', and all else was sampled on'}; what this would have shown is missing.",
        severity=Severity.NOTE,
        evidence={"entry": f"sampler.{source}", "error": error, "hosts": list(hosts[:MOST_HOSTS])},
        cause="a driver that does not answer, something in this environment that ddpcheck does not expect, or a "
        "fault inside it",
        fix="Look at the driver (nvidia-smi) where it is about GPUs; otherwise please report it with this message.",
    )


def _incomplete_log(case: RuleContext, lines: int) -> Finding:
    return case.finding(
        "DDP605",
        f"{lines} lines of the node's log could not be written: samples of the hardware are missing, or notes of how "
        "processes ended. The ranks' own records are not concerned.",
        severity=Severity.NOTE,
        evidence={"lines": lines},
        cause="the run folder cannot be written, or its disk is nearly full",
        fix="Free some space, or put the run folder elsewhere with --out.",
    )


def _fault(case: RuleContext, entry: str, error: str, where: str, ranks: tuple[int, ...]) -> Finding:
    who = f" on {name_ranks(ranks)}" if ranks else ""
    return case.finding(
        "DDP605",
        f"ddpcheck's own {entry} failed{who} and was switched off: {error}. Training went on untouched; what "
        "this part looks at was not checked from then on.",
        severity=Severity.NOTE,
        ranks=ranks,
        evidence={"entry": entry, "error": error, "where": where},
        cause="a fault inside ddpcheck, or something in this environment that it does not expect",
        fix="Please report it with this message; the other checks of this run hold.",
    )


def _unwritten(case: RuleContext, rank: int, text: str) -> Finding:
    told = (
        f"Rank {rank} could not write its records any more: {text}. What came after is not in this report."
        if rank in case.attempt.ranks
        else f"Rank {rank} could not write any record: {text}. It trained, and nothing of it was checked."
    )
    return case.finding(
        "DDP605",
        told,
        severity=Severity.NOTE,
        ranks=(rank,),
        evidence={"error": text},
        cause="the run folder cannot be written",
        fix="Free some space, or put the run folder elsewhere with --out.",
    )


def failed_rule(case: RuleContext, code: str, error: Exception) -> Finding:
    """Stands in for what a rule of ours would have said, had it not failed itself."""
    return case.finding(
        "DDP605",
        f"ddpcheck's rule for {code} failed: {type(error).__name__}: {error}. What it looks at was not judged.",
        severity=Severity.WARNING,
        evidence={"rule": code, "error": f"{type(error).__name__}: {error}"},
        cause="a fault inside ddpcheck, or records that it does not expect",
        fix="Please report it with this message; the other checks of this run hold.",
    )
