"""Rings of plain sockets in labs with a slow link, a slow host or neither, and the slow-link detector's decision.

    python -m tests.lab.ring_trials --times 10

Kernel counters and the analysis of them, without torch: a trial takes about ten seconds and little CPU time, so there
can be many. `slow_link_trials` trains real jobs. Exits with 1 if a decision is wrong. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from ddpcheck.analysis.hardware.statistics import NodeSample
from ddpcheck.analysis.network.model import NodeLink, RouteCounterTable, SlowLink
from ddpcheck.analysis.network.slow_link import carrying, slow_link
from tests.helpers.commands import BIN, environment
from tests.lab.lab import Ended, make_lab

JOB = Path(__file__).parents[1] / "jobs" / "plain_ring.py"
# Mbit/s of every normal link: so low that the CPU does not matter.
USUAL = 100.0
FAULTY, SECONDS, BYTES, PACE = 2, 8.0, 1 << 20, 0.03


@dataclass(frozen=True)
class Trial:
    """Mbit/s of the faulty host's link, or seconds by which that host is late."""

    hosts: int
    slow: float = 0.0
    late: float = 0.0
    times: int = 1

    @property
    def name(self) -> str:
        return f"slow{self.slow:g}" if self.slow else f"late{1000 * self.late:g}" if self.late else "healthy"

    @property
    def steps(self) -> int:
        megabits = BYTES * 2 * (self.hosts - 1) / self.hosts * 8e-6
        return max(10, round(SECONDS / (megabits / (self.slow or USUAL) + PACE + self.late)))


@dataclass(frozen=True)
class Outcome:
    """The slow link that was found, Mbit/s of each link, and milliseconds per step."""

    slow: SlowLink | None
    rates: Sequence[float]
    step: float


# Healthy labs twice as often: a false alarm is worse than a miss.
TRIALS = (
    *(Trial(hosts, times=2) for hosts in (3, 4)),
    *(Trial(hosts, slow=USUAL / factor) for hosts in (3, 4) for factor in (2, 4, 10)),
    *(Trial(hosts, late=0.1) for hosts in (3, 4)),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=1)
    options = parser.parse_args()
    print(
        "| hosts | fault | trials | right | throughput, Mbit/s | of others | factor | cost, ms | measured cost |"
    )
    print("|---|---|---:|---:|---|---|---|---|---:|")
    wrong, healthy = 0, {}
    for trial in TRIALS:
        outcomes = [_run(trial) for _ in range(trial.times * options.times)]
        healthy.setdefault(trial.hosts, median(outcome.step for outcome in outcomes))
        wrong += sum(not _is_right(trial, outcome) for outcome in outcomes)
        print(_row(trial, outcomes, healthy[trial.hosts]), flush=True)
    return int(wrong > 0)


def _run(trial: Trial) -> Outcome:
    with tempfile.TemporaryDirectory() as folder, make_lab(trial.hosts, Path(folder)) as lab:
        for host in lab.hosts:
            host.limit_link(USUAL)
        if trial.slow:
            lab[FAULTY].limit_link(trial.slow)
        ended = lab.run_all(
            lambda number, host: _command(trial, number), env=lambda *_: environment(), seconds=120
        )
    links = [link for number, one in enumerate(ended) for link in _links(trial, number, one)]
    rates = [link.bandwidth * 8e-6 for link in carrying(links)]
    return Outcome(slow_link(links), rates, median(json.loads(one.stdout)["step"] for one in ended))


def _command(trial: Trial, number: int) -> list[object]:
    late = trial.late if number == FAULTY else 0.0
    own = ["--hosts", trial.hosts, "--number", number, "--late", late, "--pace", PACE]
    return [BIN / "python", JOB, *own, "--bytes", BYTES, "--steps", trial.steps]


def _links(trial: Trial, number: int, ended: Ended) -> list[NodeLink]:
    """From the second reading on, as in a job after its first step."""
    if ended.status:
        sys.exit(str(ended))
    readings = json.loads(ended.stdout)
    tallies = RouteCounterTable()
    for time, routes in readings["readings"][1:]:
        tallies.add(NodeSample(time, connections={name: tuple(row) for name, row in routes.items()}))
    source, target = f"node{number}", f"node{(number - 1) % trial.hosts}"
    return [
        NodeLink(
            source,
            target,
            tally.bytes,
            tally.busy_seconds,
            tally.ended - tally.began,
            tuple(tally.intervals),
            steps=1000 * (tally.ended - tally.began) / readings["step"],
        )
        for tally in tallies.values()
    ]


def _is_right(trial: Trial, outcome: Outcome) -> bool:
    named = None if outcome.slow is None else outcome.slow.nodes
    return named == ((f"node{FAULTY}",) if trial.slow else None)


def _row(trial: Trial, outcomes: Sequence[Outcome], healthy: float) -> str:
    findings = [outcome.slow for outcome in outcomes if outcome.slow is not None]
    # In a healthy lab, the ratio of the fastest to the slowest link.
    factors = [one.factor for one in findings] or [max(each.rates) / min(each.rates) for each in outcomes]
    others = [one.usual * 8e-6 for one in findings] or [rate for each in outcomes for rate in each.rates]
    costs = [1000 * (one.seconds_lost_a_step() or 0.0) for one in findings]
    cells = (
        trial.hosts,
        trial.name,
        len(outcomes),
        sum(_is_right(trial, outcome) for outcome in outcomes),
        _range([one.bandwidth * 8e-6 for one in findings]),
        _range(others),
        _range(factors, 2),
        _range(costs),
        f"{median(outcome.step for outcome in outcomes) - healthy:.0f}" if findings else "-",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _range(figures: Sequence[float], digits: int = 0) -> str:
    if not figures:
        return "-"
    low, high = f"{min(figures):.{digits}f}", f"{max(figures):.{digits}f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    sys.exit(main())
