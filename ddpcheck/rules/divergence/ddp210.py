"""DDP210: buffers differ after synchronisation, or are mapped to different names."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

from ddpcheck.analysis.aggregate.agreement import Disagreement, groups_of, odd_ranks
from ddpcheck.analysis.context import RuleContext
from ddpcheck.analysis.divergence.nodes import apart_findings
from ddpcheck.analysis.evidence import of_disagreement
from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.module_key import ModuleKey
from ddpcheck.formatting import name_ranks
from ddpcheck.records.reasons import BufferState, is_stored_as
from ddpcheck.records.schema import STATISTICS, DigestRecord, Stage, TensorKind


def find(case: RuleContext) -> list[Finding]:
    findings = []
    for module in case.modules():
        findings += _names(case, module) or _values(case, module) or _at_the_end(case, module)
    return findings + apart_findings(case, "DDP210")


def _names(case: RuleContext, module: ModuleKey) -> list[Finding]:
    names = {
        rank: [str(row[0]) for row in data.as_wrapped[module].buffers]
        for rank, data in case.attempt.of_module(module).items()
    }
    groups = [ranks for _, ranks in groups_of({rank: "\n".join(each) for rank, each in names.items()})]
    if len(groups) < 2:
        return []
    usual, other = names[groups[0][0]], names[groups[1][0]]
    place = next(i for i, (a, b) in enumerate(zip_longest(usual, other)) if a != b)
    at_place = {ranks: (*names[ranks[0]][place:], "not there")[0] for ranks in groups}
    return [
        case.finding(
            "DDP210",
            f"Buffers stand in another order on {name_ranks(groups[1])}: number {place} is "
            f"{at_place[groups[0]]} on {name_ranks(groups[0])} and {at_place[groups[1]]} on "
            f"{name_ranks(groups[1])}. DDP copies them by position.",
            module=module,
            stage=Stage.INIT_BEFORE.value,
            parameter=(usual[place:] or other[place:])[0],
            ranks=odd_ranks(groups),
            evidence={
                "position": place,
                "names": {name_ranks(ranks): at_place[ranks] for ranks in groups[:4]},
            },
            cause="buffers mapped to different names",
            fix="Register buffers in the same order on every rank: iterate over lists or sorted names, never "
            "sets.",
        )
    ]


def _values(case: RuleContext, module: ModuleKey) -> list[Finding]:
    found = case.attempt.agreement.tally(module, Stage.BUFFERS, TensorKind.BUFFERS).first
    if found is None:
        return []
    evidence = of_disagreement(case.attempt, found, case.folder)
    differing = evidence["parameters"]
    names = differing["names"]
    return [
        case.finding(
            "DDP210",
            f"Right after DDP had synchronised the buffers, at synchronisation {found.moment.step}, "
            f"{differing['count']} of {differing['of']} were not the same on all ranks; odd: "
            f"{name_ranks(found.odd_ranks())}.",
            found=found,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="the synchronisation did not reach these buffers",
            fix="Register the buffers before wrapping and the same way on every rank, and do not replace "
            "DDP's buffer hooks by ones that leave buffers out.",
        )
    ]


def _at_the_end(case: RuleContext, module: ModuleKey) -> list[Finding]:
    """Only ranks that wrote to buffers after their last step speak here: rank 0 may do so alone, and save."""
    found = case.attempt.agreement.tally(module, Stage.BUFFERS_END, TensorKind.BUFFERS).first
    # Models that have parted measure different statistics; why they parted is told elsewhere.
    if (
        found is None
        or case.attempt.agreement.tally(module, Stage.PARAMS, TensorKind.PARAMETERS).first is not None
    ):
        return []
    evidence = of_disagreement(case.attempt, found, case.folder)
    differing = evidence["parameters"]
    names = differing["names"]
    said = [record for record in found.sightings.values() if isinstance(record, DigestRecord)]
    if any(is_stored_as(record.how, BufferState.NOT_SYNCED) for record in said):
        # Ranks that left at different moments rightly hold something else.
        together = len({record.forward for record in said}) == 1
        return [_left_alone(case, found, evidence)] if together else []
    # Other buffers may be a rank's own notes.
    measured = any(name.rpartition(".")[2] in STATISTICS for name in names)
    return [
        case.finding(
            "DDP210",
            f"After the last step {name_ranks(tuple(found.sightings))} wrote to buffers, and "
            f"{differing['count']} of {differing['of']} ended up different; odd: {name_ranks(found.odd_ranks())}. "
            "Each rank evaluates another model, and a checkpoint depends on who writes it.",
            severity=Severity.WARNING if measured else Severity.NOTE,
            found=found,
            parameter=names[0] if names else None,
            evidence=evidence,
            cause="buffers were written after the last training step, on each rank from its own data",
            fix="Average the statistics over all ranks (all_reduce them) once they are recomputed, or broadcast "
            "rank 0's.",
        )
    ]


def _left_alone(case: RuleContext, found: Disagreement, evidence: dict[str, Any]) -> Finding:
    differing = evidence["parameters"]
    names = differing["names"]
    return case.finding(
        "DDP210",
        f"DDP was told to leave buffers alone, and {differing['count']} of {differing['of']} are not the same on all "
        f"ranks at the end, apart from statistics of normalisation; odd: {name_ranks(found.odd_ranks())}. Each rank "
        "evaluates another model, and a checkpoint depends on who writes it.",
        severity=Severity.NOTE,
        found=found,
        parameter=names[0] if names else None,
        evidence=evidence,
        cause="broadcast_buffers=False, and buffers that each rank updates from its own data",
        fix="Update them from values that were reduced or gathered first (a codebook by all_reduce of its sums, a "
        "queue by all_gather of its keys). Nothing, if they are meant to be each rank's own.",
    )
