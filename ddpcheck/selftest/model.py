"""What `ddpcheck selftest` found: the parts, the verdict, and the page to send back."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ddpcheck.version import VERSION

# Version of the document. 1 (2026-11): first version.
SELFTEST_SCHEMA = 1
DIFFERENT_STATUS = 10
_MOST_LINES = 8


@dataclass(frozen=True)
class WeightsResult:
    """The final weights of the same job with and without ddpcheck, on every rank."""

    ranks: int
    steps: int
    tensors: int
    # Tensors whose bits differ, as "rank 1: 0.weight".
    differing: tuple[str, ...] = ()
    # Whether two runs without ddpcheck have the same bits; None: not tried, because nothing differs.
    plain_repeats: bool | None = None
    # Why there is no comparison.
    error: str = ""


@dataclass(frozen=True)
class CostResult:
    """Blocks of steps with and without ddpcheck, in turns, so that both meet the same machine."""

    steps: int
    plain: tuple[float, ...] = ()
    watched: tuple[float, ...] = ()
    # What ddpcheck measured itself, per step on the host and on the device.
    own_us: float | None = None
    device_us: float | None = None

    @property
    def ratio(self) -> float | None:
        """The median over the pairs of blocks."""
        pairs = [
            after / before for before, after in zip(self.plain, self.watched, strict=False) if before > 0
        ]
        return median(pairs) if pairs else None

    @property
    def added_us(self) -> float | None:
        differences = [after - before for before, after in zip(self.plain, self.watched, strict=False)]
        return 1e6 * median(differences) / self.steps if differences and self.steps else None

    @property
    def plain_us(self) -> float | None:
        return 1e6 * median(self.plain) / self.steps if self.plain and self.steps else None


@dataclass(frozen=True)
class SelftestReport:
    """All parts. A part that could not run has an error, which counts as a disagreement."""

    time: str
    host: str
    environment: Mapping[str, Any] = field(default_factory=dict)
    gpus: Mapping[str, Any] = field(default_factory=dict)
    kernels: Sequence[Mapping[str, Any]] = ()
    weights: WeightsResult | None = None
    cost: CostResult | None = None
    verdict: str = ""
    findings: tuple[str, ...] = ()
    errors: tuple[str, ...] = ()

    @property
    def has_device(self) -> bool:
        return bool(self.environment.get("devices"))

    @property
    def disagreements(self) -> list[str]:
        """What does not agree, as sentences; empty if everything does."""
        problems = list(self.errors)
        for kernel in self.kernels:
            if kernel["differences"]:
                problems.append(f"The {kernel['name']} on {kernel['device']} differs from the reference.")
            # On the CPU, what is missing is replaced by operators of torch at a small cost.
            if kernel["missing"] and kernel["device"] != "cpu":
                problems.append(f"No kernel on {kernel['device']}: {kernel['missing']}")
        weights = self.weights
        if weights is not None and weights.error:
            problems.append(f"The job did not run: {weights.error}")
        elif weights is not None and weights.differing:
            problems.append(
                "The final weights differ with and without ddpcheck."
                if weights.plain_repeats
                else "The final weights differ, but they also differ between two runs without ddpcheck: this machine "
                "does not compute the same bits twice, so nothing can be concluded."
            )
        errors = [each for each in self.findings if each.startswith(("error", "warning"))]
        if errors:
            problems.append(f"ddpcheck reported on a healthy job: {'; '.join(errors)}")
        return problems

    @property
    def status(self) -> int:
        return DIFFERENT_STATUS if self.disagreements else 0

    def to_json(self) -> str:
        weights, cost = self.weights, self.cost
        document = {
            "schema": SELFTEST_SCHEMA,
            "ddpcheck": VERSION,
            "verdict": "different" if self.disagreements else "ok",
            "device": self.has_device,
            "disagreements": self.disagreements,
            "time": self.time,
            "host": self.host,
            "environment": dict(self.environment),
            "gpus": dict(self.gpus),
            "kernels": [dict(kernel) for kernel in self.kernels],
            "weights": None if weights is None else {**vars(weights), "differing": list(weights.differing)},
            "cost": None
            if cost is None
            else {
                **vars(cost),
                "plain": list(cost.plain),
                "watched": list(cost.watched),
                "ratio": cost.ratio,
                "added_us": cost.added_us,
            },
            "findings": list(self.findings),
        }
        return json.dumps(document, indent=1, allow_nan=False) + "\n"


def headline(report: SelftestReport) -> str:
    where = (
        f"on {len(report.environment['devices'])} x {report.environment['devices'][0]}"
        if report.has_device
        else "on the CPU; no device was there, so nothing of this shows how ddpcheck works on one"
    )
    count = len(report.disagreements)
    return (
        f"All parts agree, {where}."
        if not count
        else f"{count} disagreement{'s' if count > 1 else ''}, {where}."
    )


def page(report: SelftestReport) -> list[tuple[str, list[str]]]:
    """The page as titles and lines, for the terminal and for the file."""
    sections = [("Environment", _environment_lines(report)), ("Kernels", _kernel_lines(report))]
    sections.append(("Weights", _weight_lines(report)))
    sections.append(("Cost", _cost_lines(report)))
    if report.disagreements:
        sections.append(("Disagreements", report.disagreements))
    return sections


def as_text(report: SelftestReport) -> str:
    """The page to send back: plain text."""
    lines = [f"ddpcheck {VERSION} selftest, {report.time}", headline(report)]
    for title, rows in page(report):
        lines += ["", title, *(f"  {row}" for row in rows)]
    return "\n".join(lines) + "\n"


def _environment_lines(report: SelftestReport) -> list[str]:
    facts, gpus = report.environment, report.gpus
    versions = [
        ("torch", "torch"),
        ("CUDA", "cuda"),
        ("ROCm", "rocm"),
        ("NCCL", "nccl"),
        ("Triton", "triton"),
    ]
    lines = [
        f"Python {facts.get('python', '?')}, "
        + ", ".join(f"{title} {facts[key]}" for title, key in versions if facts.get(key))
    ]
    devices = facts.get("devices") or ()
    for name in dict.fromkeys(devices):
        lines.append(f"{list(devices).count(name)} x {name} ({facts.get('device_type')})")
    if not devices:
        lines.append("no device that torch can use")
    if gpus.get("gpus"):
        kinds = {kind for row in gpus.get("topology") or () for kind in row if kind != "X"}
        linked = f", connected by {', '.join(sorted(kinds))}" if kinds else ""
        lines.append(f"driver {gpus.get('driver')}, {len(gpus['gpus'])} GPUs{linked}")
    elif gpus.get("note"):
        lines.append(f"driver: {gpus['note']}")
    return lines


def _kernel_lines(report: SelftestReport) -> list[str]:
    lines = []
    for kernel in report.kernels:
        name = f"{kernel['name']} on {kernel['device']}"
        if kernel["missing"]:
            lines.append(f"{name}: not there ({kernel['missing']})")
            continue
        speed = kernel.get("gigabytes_per_second")
        fast = f", {speed:.0f} GB/s for digest and sketch" if speed else ""
        if kernel["differences"]:
            lines.append(
                f"{name}: DIFFERS in {len(kernel['differences'])} of {kernel['tensors']} tensors or more"
            )
            lines += [f"  {each}" for each in kernel["differences"][:_MOST_LINES]]
        else:
            lines.append(f"{name}: equal to operators of torch on the CPU, {kernel['tensors']} tensors{fast}")
    return lines or ["not compared"]


def _weight_lines(report: SelftestReport) -> list[str]:
    weights = report.weights
    if weights is None or weights.error:
        return [f"not compared: {weights.error if weights is not None else 'the job did not run'}"]
    job = f"{weights.ranks} ranks, {weights.steps} steps, {weights.tensors} tensors"
    if not weights.differing:
        return [f"bit-identical with and without ddpcheck: {job}"]
    return [f"DIFFERENT in {len(weights.differing)} tensors: {job}", *weights.differing[:_MOST_LINES]]


def _cost_lines(report: SelftestReport) -> list[str]:
    cost = report.cost
    if cost is None or cost.ratio is None or cost.added_us is None or cost.plain_us is None:
        return ["not measured"]
    lines = [
        f"step time with ddpcheck / without: {cost.ratio:.3f} ({cost.added_us:+,.0f} us on {cost.plain_us:,.0f} us per "
        f"step; medians of {len(cost.plain)} blocks of {cost.steps} steps, in turns)"
    ]
    if cost.own_us is not None:
        device = f", {cost.device_us:,.0f} us on the device" if cost.device_us else ""
        lines.append(
            f"ddpcheck measured itself: {cost.own_us:,.0f} us per step in the training thread{device}"
        )
    lines.append(f"report of the watched job: {report.verdict or 'none'}")
    lines += [f"  {each}" for each in report.findings[:_MOST_LINES]]
    return lines
