"""The run in about ten lines, one for each subject: every report begins or ends with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ddpcheck.analysis.report import Check, DataEpoch, RankStatus, RankSummary, Report
from ddpcheck.analysis.timing.model import TimeTable
from ddpcheck.formatting import counted, percent_text, rank_ranges, size_text, time_text
from ddpcheck.reports.views.cost import cost_lines, folded_line, thinned_out
from ddpcheck.reports.views.hardware import Node, hardware_nodes
from ddpcheck.reports.views.memory import memory_location, memory_rows, similar_ranks
from ddpcheck.reports.views.ranks import last_position
from ddpcheck.reports.views.table import CellMark
from ddpcheck.reports.views.timing import exposed_medians, milliseconds, step_shares, straggler_text

# Ranks that ended in more ways than this are in the table of ranks only.
_MOST_GROUPS = 3
_MOST_NAMED = 3
_STRAGGLER_CODE = "DDP402"
_SAMPLES = {"overlap": "on several ranks", "missing": "missing"}
_FAILED = {RankStatus.RAISED, RankStatus.DIED, RankStatus.MISSING}


@dataclass(frozen=True)
class SummaryLine:
    """One subject of the run."""

    label: str
    text: str
    mark: CellMark | None = None


def summary_lines(report: Report) -> list[SummaryLine]:
    """What every run is asked about; subjects that were not recorded are left out."""
    times = max(report.time, key=lambda table: len(table.ranks), default=None)
    lines = [
        _replicas(report),
        _ranks(report),
        _data(report.data),
        *(_times(times, report.not_judged) if times is not None and times.ranks else []),
        _exposed(report),
        _memory(report),
        _hardware(hardware_nodes(report)),
        _not_checked(report.checks),
        *_not_judged(report),
        *_cost(report),
    ]
    return [line for line in lines if line is not None]


def _replicas(report: Report) -> SummaryLine | None:
    """What the comparisons found, and how many parameters they cover."""
    compared = [check for check in report.checks if check.compared]
    differ = [check for check in compared if check.outcome == "differ"]
    if report.world_size < 2 or not report.checks:
        return None
    coverage = report.coverage
    covered = ""
    if coverage is not None and coverage.trained:
        covered = f"; {coverage.compared} of {counted(coverage.trained, 'trained parameter')} compared"
    if differ:
        names = ", ".join(check.name for check in differ[:_MOST_NAMED])
        more = f" and {len(differ) - _MOST_NAMED} more" if len(differ) > _MOST_NAMED else ""
        return SummaryLine("replicas", f"differ in {names}{more}{covered}", CellMark.ERROR)
    if not compared:
        return SummaryLine("replicas", f"not compared{covered}", CellMark.WARNING)
    incomplete = coverage is not None and not coverage.complete
    text = f"agree in {counted(len(compared), 'kind')} of comparisons{covered}"
    return SummaryLine("replicas", text, CellMark.WARNING if incomplete else CellMark.OK)


def _ranks(report: Report) -> SummaryLine | None:
    if not report.attempts:
        return None
    last = report.attempts[-1]
    groups = _ended_alike(last.ranks)
    failed = any(rank.status in _FAILED for rank in last.ranks)
    text = ", ".join(map(_group, groups[:_MOST_GROUPS]))
    more = sum(len(group) for group in groups[_MOST_GROUPS:])
    hosts = {rank.host for rank in last.ranks if rank.host}
    text += f", {more} more ended otherwise" if more else ""
    text += f", on {counted(len(hosts), 'host')}" if len(hosts) > 1 else ""
    attempts = (
        f" (attempt {last.number}, the last of {len(report.attempts)})" if len(report.attempts) > 1 else ""
    )
    return SummaryLine("ranks", text + attempts, CellMark.ERROR if failed else None)


def _ended_alike(ranks: Sequence[RankSummary]) -> list[list[RankSummary]]:
    """Ranks with the same status, those that failed first."""
    groups: dict[RankStatus, list[RankSummary]] = {}
    for rank in ranks:
        groups.setdefault(rank.status, []).append(rank)
    return [groups[status] for status in sorted(groups, key=lambda status: status not in _FAILED)]


def _group(group: Sequence[RankSummary]) -> str:
    steps = sorted({rank.steps for rank in group})
    after = f"{steps[0]:,}" if len(steps) == 1 else f"{steps[0]:,} to {steps[-1]:,}"
    position = last_position(group[0])
    where = (
        position if position and len(group) == 1 else f"after {after} {'step' if steps == [1] else 'steps'}"
    )
    return f"{rank_ranges(rank.rank for rank in group)} {group[0].status.value} {where}"


def _data(epochs: Sequence[DataEpoch]) -> SummaryLine | None:
    """The first epoch; the table has all of them."""
    if not epochs:
        return None
    first = epochs[0]
    counts = sorted(set(first.per_rank.values()))
    parts = [] if first.samples < 0 else [f"{counted(first.samples, 'sample')} per epoch"]
    if counts:
        parts.append(f"{counts[0]:,}{f' to {counts[-1]:,}' if len(counts) > 1 else ''} per rank")
    known = {"overlap": first.overlap, "missing": first.missing}
    about = "" if first.exact else "about "
    amounts = {
        name: f"{about}{count:,}" if count else "none" for name, count in known.items() if count is not None
    }
    parts += [f"{amount} {_SAMPLES[name]}" for name, amount in amounts.items()]
    wrong = any(known.values())
    return SummaryLine("data", ", ".join(parts), CellMark.WARNING if wrong else None) if parts else None


def _times(times: TimeTable, not_judged: Mapping[str, str]) -> list[SummaryLine]:
    pauses = f", {counted(times.pauses, 'step')} with a pause excluded" if times.pauses else ""
    line = SummaryLine(
        "step time",
        f"median {milliseconds(times.step_us / 1000)} ms over {counted(times.steps, 'step')}{pauses}",
    )
    lines = [line]
    if len(times.ranks) > 1:
        lines.append(SummaryLine("", f"mean over ranks: {step_shares(times.scaling)}"))
        straggler = straggler_text(times)
        none = "not judged" if _STRAGGLER_CODE in not_judged else "none"
        lines.append(SummaryLine("stragglers", straggler or none, CellMark.WARNING if straggler else None))
    return lines


def _exposed(report: Report) -> SummaryLine | None:
    """From traces of profiled steps: the same figures as in DDP401."""
    exposed = exposed_medians(report.overlap)
    if exposed is None:
        return None
    share, waiting = percent_text(100 * exposed.transfer_share), percent_text(100 * exposed.wait_share)
    return SummaryLine(
        "profile",
        f"exposed transfers {time_text(exposed.transfer_ns)} ({share}) and waiting for the last rank "
        f"{time_text(exposed.wait_ns)} ({waiting}) of a step of {time_text(exposed.step_ns)}; medians of "
        f"{counted(exposed.steps, 'profiled step')}",
    )


def _memory(report: Report) -> SummaryLine | None:
    rows = memory_rows(report)
    if not rows:
        return None
    highest = max(rows, key=lambda row: row["most"])
    lowest = min(rows, key=lambda row: row["most"])
    text = f"peak {size_text(highest['most'])} {memory_location(rows)}"
    if len(similar_ranks(rows)) > 1:
        text += f" (rank {highest['rank']}; lowest {size_text(lowest['most'])} on rank {lowest['rank']})"
    return SummaryLine("memory", text)


def _hardware(nodes: Sequence[Node]) -> SummaryLine | None:
    measured = [node for node in nodes if node["cpu"] is not None]
    if not measured:
        return None
    busiest = max(measured, key=lambda node: float(node["cpu"]["mean"]))
    gpus = sum(len(node["gpus"]) for node in nodes)
    of = f" on {busiest['host']}, the busiest of {len(nodes)} nodes" if len(nodes) > 1 else ""
    return SummaryLine(
        "hardware",
        f"mean CPU {busiest['cpu']['mean']:.0f} % of {counted(busiest['cpus'], 'CPU')}{of}; "
        + (counted(gpus, "GPU") if gpus else "no GPU"),
    )


def _not_checked(checks: Sequence[Check]) -> SummaryLine | None:
    names = [check.name for check in checks if check.outcome == "not checked"]
    if not names:
        return None
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return SummaryLine("not checked", ", ".join(names[:_MOST_NAMED]) + more)


def _not_judged(report: Report) -> list[SummaryLine]:
    """Findings that the run could not show, so that their absence is not taken for health."""
    texts = [f"{code}: {reason}" for code, reason in sorted(report.not_judged.items())]
    return [SummaryLine("" if index else "not judged", text) for index, text in enumerate(texts)]


def _cost(report: Report) -> list[SummaryLine]:
    """What ddpcheck itself took, and what its budget left out."""
    texts = [cost_lines(report)[0].removeprefix("ddpcheck ")] if report.cost is not None else []
    thinned = thinned_out(report)
    texts += [f"to keep to its budget, {thinned}"] if thinned else []
    texts += filter(None, [folded_line(report)])
    return [SummaryLine("" if index else "ddpcheck", text) for index, text in enumerate(texts)]
