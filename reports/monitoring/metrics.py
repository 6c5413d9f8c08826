"""The metrics of a run: those of a running job from its live state, and those of its report at the end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ddpcheck.analysis.finding import Severity
from ddpcheck.analysis.live.tracker import LiveState
from ddpcheck.analysis.report import Report
from ddpcheck.reports.safe_text import safe_line, shortened
from ddpcheck.version import VERSION

# Ranks and links with a series of their own; monitoring systems keep each for months.
MOST_RANKS = 256
MOST_LINKS = 64
_MOST_CHARACTERS = 120
_MICROSECOND = 1e-6

Labels = Mapping[str, str]


@dataclass(frozen=True)
class Metric:
    """One gauge. Names follow Prometheus: base units, the unit at the end."""

    name: str
    help: str
    unit: str = ""
    samples: tuple[tuple[Labels, float], ...] = field(default=())


# Name, unit and help of every metric.
_METRICS = {
    "ddpcheck_run_info": ("", "The run; always 1"),
    "ddpcheck_steps": ("", "Optimizer steps, of the rank with the most"),
    "ddpcheck_ranks": ("", "Ranks by status"),
    "ddpcheck_replicas_agree": ("", "1 while replicas agree, 0 once they diverged"),
    "ddpcheck_compared_steps": ("", "Steps after which parameters were compared"),
    "ddpcheck_parameters_not_compared": ("", "Trained parameters that are not compared"),
    "ddpcheck_findings": ("", "Findings by code and severity"),
    "ddpcheck_stalled": ("", "1 while no rank makes progress"),
    "ddpcheck_step_seconds": ("seconds", "Median step time"),
    "ddpcheck_phase_seconds": ("seconds", "Median time of each phase of a step, by rank"),
    "ddpcheck_exposed_communication_ratio": ("ratio", "Share of a step: the shortest wait of any rank"),
    "ddpcheck_waiting_ratio": ("ratio", "Share of a step: waiting for the last rank, mean over ranks"),
    "ddpcheck_straggler_seconds": ("seconds", "Cost of a straggler per step, from the report"),
    "ddpcheck_memory_bytes": ("bytes", "Memory of each rank"),
    "ddpcheck_peak_memory_bytes": ("bytes", "Peak memory of each rank"),
    "ddpcheck_link_throughput_bytes_per_second": (
        "bytes_per_second",
        "Throughput of a link between nodes while it was busy, from the report",
    ),
    "ddpcheck_overhead_ratio": ("ratio", "Share of a step that ddpcheck itself takes"),
}
NAMES = tuple(_METRICS)
Samples = dict[str, list[tuple[Labels, float]]]


def live_metrics(state: LiveState) -> list[Metric]:
    """What a running job shows."""
    samples: Samples = {}
    _add(samples, "ddpcheck_run_info", 1, run=state.name, version=VERSION)
    _add(samples, "ddpcheck_steps", state.steps)
    for status in sorted({rank.status for rank in state.ranks}):
        count = sum(rank.status == status for rank in state.ranks)
        _add(samples, "ddpcheck_ranks", count, status=status)
    agreement = state.agreement
    if agreement.compared or agreement.diverged:
        _add(samples, "ddpcheck_replicas_agree", not agreement.diverged)
    _add(samples, "ddpcheck_compared_steps", agreement.compared)
    _add(samples, "ddpcheck_parameters_not_compared", agreement.not_compared)
    _add(samples, "ddpcheck_stalled", state.stalled)
    if state.finding is not None:
        _add_finding(samples, state.finding.code, state.finding.severity, 1)
    times = state.step_time
    if times is not None:
        _add(samples, "ddpcheck_step_seconds", times.step_us * _MICROSECOND)
        _add(samples, "ddpcheck_exposed_communication_ratio", times.exposed)
        _add(samples, "ddpcheck_waiting_ratio", times.late)
    if state.cost_share is not None:
        _add(samples, "ddpcheck_overhead_ratio", state.cost_share)
    for rank in state.ranks[:MOST_RANKS]:
        for phase, us in rank.parts_us.items():
            _add(samples, "ddpcheck_phase_seconds", us * _MICROSECOND, rank=str(rank.rank), phase=phase)
        if rank.memory:
            _add(samples, "ddpcheck_memory_bytes", rank.memory, rank=str(rank.rank))
            _add(samples, "ddpcheck_peak_memory_bytes", rank.peak_memory, rank=str(rank.rank))
    return _metrics(samples)


def report_metrics(report: Report, live: list[Metric]) -> list[Metric]:
    """The last live metrics, with what only the report knows."""
    samples: Samples = {metric.name: list(metric.samples) for metric in live}
    samples["ddpcheck_findings"] = []
    for code, severity in dict.fromkeys((finding.code, finding.severity) for finding in report.findings):
        count = sum((finding.code, finding.severity) == (code, severity) for finding in report.findings)
        _add_finding(samples, code, severity, count)
    if any(check.compared for check in report.checks):
        differ = any(check.compared and check.outcome == "differ" for check in report.checks)
        samples["ddpcheck_replicas_agree"] = [({}, float(not differ))]
    samples["ddpcheck_steps"] = [({}, float(report.steps))]
    for table in report.time:
        if table.straggler is not None:
            for rank in table.straggler.ranks:
                cost = table.straggler.cost_us * _MICROSECOND
                _add(samples, "ddpcheck_straggler_seconds", cost, rank=str(rank))
    times = max(report.time, key=lambda table: len(table.ranks), default=None)
    if times is not None:
        samples["ddpcheck_step_seconds"] = [({}, times.step_us * _MICROSECOND)]
        if len(times.ranks) > 1:
            scaling = times.scaling
            samples["ddpcheck_exposed_communication_ratio"] = [({}, scaling.exposed_communication)]
            samples["ddpcheck_waiting_ratio"] = [({}, scaling.waiting_for_stragglers)]
    if report.cost is not None and report.cost.share is not None:
        samples["ddpcheck_overhead_ratio"] = [({}, report.cost.share)]
    for link in list(report.links.get("links") or ())[:MOST_LINKS]:
        ends = {"source": str(link["source"]), "target": str(link["target"])}
        _add(samples, "ddpcheck_link_throughput_bytes_per_second", link["bandwidth"], **ends)
    return _metrics(samples)


def flat(metrics: list[Metric]) -> dict[str, float]:
    """One number per name, for trackers of experiments: `step_seconds`, `phase_seconds/backward/rank0`."""
    return {"/".join(_flat_name(metric.name, labels)): value for metric, labels, value in _all(metrics)}


def _flat_name(name: str, labels: Labels) -> Iterator[str]:
    yield name.removeprefix("ddpcheck_")
    for label, value in sorted(labels.items()):
        yield f"rank{value}" if label == "rank" else value


def _all(metrics: list[Metric]) -> Iterator[tuple[Metric, Labels, float]]:
    for metric in metrics:
        if metric.name != "ddpcheck_run_info":
            yield from ((metric, labels, value) for labels, value in metric.samples)


def _add(samples: Samples, name: str, value: float, **labels: str) -> None:
    safe = {label: shortened(safe_line(text), _MOST_CHARACTERS) for label, text in labels.items()}
    samples.setdefault(name, []).append((safe, float(value)))


def _add_finding(samples: Samples, code: str, severity: Severity, count: int) -> None:
    _add(samples, "ddpcheck_findings", count, code=code, severity=severity.value)


def _metrics(samples: Samples) -> list[Metric]:
    return [
        Metric(name, about, unit, tuple(samples[name]))
        for name, (unit, about) in _METRICS.items()
        if samples.get(name)
    ]
