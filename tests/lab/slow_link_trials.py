"""Training jobs in labs with a slow link, a host that computes slowly, or neither, and the findings about them.

    python -m tests.lab.slow_link_trials FOLDER                  all trials, about 25 minutes
    python -m tests.lab.slow_link_trials FOLDER --only '4x1 slow50*' --times 1
    python -m tests.lab.slow_link_trials FOLDER --times 0        only analyse the runs in FOLDER again

Prints one line per trial, then a table. Exits with 1 if a finding is wrong or missing. Keeps the run folders. Needs
root.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from ddpcheck.analysis.finding import Finding
from ddpcheck.analysis.report import Report
from ddpcheck.analysis.report_builder import analyse_run
from tests.helpers.commands import BIN, environment
from tests.helpers.paths import JOBS
from tests.lab.host import Host
from tests.lab.lab import Lab, make_lab

WATCHED = ("DDP402", "DDP403")
# Mbit/s of every normal link: so low that the CPU does not matter.
USUAL = 200.0
FAULTY = 2


@dataclass(frozen=True)
class Trial:
    """The fault of one job: Mbit/s of the faulty host's link, or seconds by which that host is late."""

    hosts: int
    per_node: int = 1
    slow: float = 0.0
    way: str = "both"
    late: float = 0.0
    # Mbit/s of every other link.
    usual: float = USUAL
    # Whether the report has to note that the links limit the job.
    bound: bool = False
    # How often to run it.
    times: int = 3
    width: int = 512
    pace: float = 0.03
    seconds: float = 10.0

    @property
    def name(self) -> str:
        fault = f"slow{self.slow:g}{'' if self.way == 'both' else ' ' + self.way}" if self.slow else "healthy"
        rate = "" if self.usual == USUAL else f" at{self.usual:g}"
        return f"{self.hosts}x{self.per_node} {f'late{1000 * self.late:g}' if self.late else fault}{rate}"

    @property
    def faulty(self) -> int:
        return min(FAULTY, self.hosts - 1)

    @property
    def steps(self) -> int:
        """As many steps as take about `seconds`."""
        ranks = self.hosts * self.per_node
        megabits = 4 * self.width**2 * 2 * (ranks - 1) / ranks * 8e-6
        return max(30, round(self.seconds / (megabits / (self.slow or self.usual) + self.pace + self.late)))

    @property
    def should(self) -> list[str]:
        """The expected codes. The link of two hosts has no other to be compared with."""
        return ["DDP402"] if self.late else ["DDP403"] if self.slow and self.hosts > 2 else []

    @property
    def direction(self) -> list[str] | None:
        """The ends that the note has to name, if one direction of the link of two hosts is slow."""
        ends = [f"node{self.faulty}", f"node{1 - self.faulty}"]
        return {"sending": ends, "receiving": ends[::-1]}.get(self.way) if self.hosts == 2 else None

    def limit(self, lab: Lab) -> None:
        for host in lab.hosts:
            host.limit_link(self.usual)
        faulty = lab[self.faulty]
        if self.slow and self.way in ("both", "sending"):
            faulty.limit_sending(self.slow)
        if self.slow and self.way in ("both", "receiving"):
            faulty.limit_receiving(self.slow)


TRIALS = (
    *(Trial(hosts, times=10) for hosts in (3, 4)),
    *(Trial(hosts, slow=USUAL / factor) for hosts in (3, 4) for factor in (2, 4, 10)),
    *(Trial(hosts, late=0.1) for hosts in (3, 4)),
    Trial(4, slow=50.0, way="sending", times=2),
    Trial(4, slow=50.0, way="receiving", times=2),
    Trial(3, per_node=2, slow=50.0, times=2),
    Trial(3, per_node=2, times=2),
    Trial(2, slow=50.0, times=2, bound=True),
    Trial(2, times=2, bound=True),
    Trial(2, slow=50.0, way="sending", times=2, bound=True),
    Trial(2, slow=50.0, way="receiving", times=2, bound=True),
    Trial(2, late=0.1, times=2),
    Trial(2, usual=1000.0, width=2048, times=2, bound=True),
    Trial(2, usual=2500.0, width=2048, times=2, bound=True),
    # Here the processors that the hosts share may be the limit.
    Trial(2, usual=10_000.0, width=2048, times=2),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="*")
    parser.add_argument("--times", type=int, help="instead of each trial's own number")
    options = parser.parse_args()
    for trial in TRIALS:
        if fnmatch.fnmatch(trial.name, options.only):
            for _ in range(trial.times if options.times is None else options.times):
                _run(trial, options.folder.absolute())
    return _print_table(options.folder)


def _run(trial: Trial, kept: Path) -> None:
    number = len(list(kept.glob(f"{trial.name}-*"))) if kept.exists() else 0
    folder = kept / f"{trial.name}-{number}"
    with make_lab(trial.hosts, folder) as lab:
        trial.limit(lab)
        _train(trial, lab, folder, 29500 + number)
    (folder / "trial.json").write_text(json.dumps(asdict(trial)))
    report = analyse_run(folder / "run")
    print(f"{time.strftime('%H:%M:%S')} {trial.name}: {_line(trial, report)}", flush=True)


def _train(trial: Trial, lab: Lab, folder: Path, port: int) -> None:
    def launch(number: int, host: Host) -> list[object]:
        job = [BIN / "python", JOBS / "nodes.py", "--nnodes", trial.hosts, "--node-rank", number]
        job += ["--per-node", trial.per_node, "--width", trial.width, "--steps", trial.steps]
        job += ["--pace", trial.pace, "--late-node", trial.faulty, "--late", trial.late]
        watch = ["--quiet", "--out", folder / "run", "--run-id", "trial"]
        return [BIN / "ddpcheck", "run", *watch, "--", *job]

    def env(number: int, host: Host) -> dict[str, str]:
        return environment(MASTER_ADDR=lab[0].name, MASTER_PORT=str(port))

    ended = lab.run_all(launch, env=env, seconds=300)
    if any(one.status for one in ended):
        sys.exit("\n".join(map(str, ended)))


def _found(report: Report) -> list[Finding]:
    return [one for one in report.findings if one.code in WATCHED and one.severity.value != "note"]


def _bound(report: Report) -> list[Finding]:
    """The note that the links limit the job."""
    notes = [one for one in report.findings if one.code == "DDP403" and one.severity.value == "note"]
    return [one for one in notes if "expected_ms" in one.evidence]


def _is_right(trial: Trial, report: Report) -> bool:
    results = _found(report)
    if trial.bound and not _bound(report):
        return False
    if trial.direction is not None and [one.evidence["nodes"] for one in _bound(report)] != [trial.direction]:
        return False
    if [one.code for one in results] != trial.should:
        return False
    if trial.should == ["DDP402"]:
        return results[0].ranks == (trial.faulty,)
    # With a limit in one direction, both ends may be reported.
    most = 1 if trial.way == "both" else 2
    named = [one.evidence["nodes"] for one in results]
    return all(f"node{trial.faulty}" in nodes and len(nodes) <= most for nodes in named)


def _line(trial: Trial, report: Report) -> str:
    output = "; ".join(f"{one.code} {one.message}" for one in _found(report)) or "nothing"
    output += "".join(f"; {one.message}" for one in _bound(report))
    return f"step {_step(report):.0f} ms; {output}{'' if _is_right(trial, report) else '  WRONG'}"


def _step(report: Report) -> float:
    return report.time[0].step_us / 1000 if report.time else 0.0


def _print_table(folder: Path) -> int:
    """Print a row for each kind of trial; returns 1 if one was wrong."""
    done: dict[Trial, list[Report]] = {}
    for path in sorted(folder.glob("*/trial.json")):
        trial = Trial(**json.loads(path.read_text()))
        done.setdefault(trial, []).append(analyse_run(path.parent / "run"))
    print(
        "| hosts x ranks | fault | trials | right | throughput, Mbit/s | of others | cost, ms per step | measured |"
    )
    print("|---|---|---:|---:|---|---|---|---:|")
    for trial, reports in done.items():
        healthy = [
            _step(report)
            for other, reports in done.items()
            for report in reports
            if not other.slow
            and not other.late
            and (other.hosts, other.per_node, other.usual) == (trial.hosts, trial.per_node, trial.usual)
        ]
        print(_row(trial, reports, healthy))
    return int(not all(_is_right(trial, report) for trial, reports in done.items() for report in reports))


def _row(trial: Trial, reports: Sequence[Report], healthy: Sequence[float]) -> str:
    right = sum(_is_right(trial, report) for report in reports)
    fault = trial.name.partition(" ")[2]
    figures = [_figures(report) for report in reports]
    own, others, cost = (
        _range([one[column] for one in figures if one[column] is not None]) for column in range(3)
    )
    more = median(map(_step, reports)) - median(healthy) if healthy and (trial.slow or trial.late) else None
    measured = "-" if more is None else f"{more:.0f}"
    cells = (f"{trial.hosts} x {trial.per_node}", fault, len(reports), right, own, others, cost, measured)
    return f"| {' | '.join(map(str, cells))} |"


def _figures(report: Report) -> tuple[float | None, ...]:
    """Throughput of the slow link and of the others, and the cost; for a healthy job the throughput of all links."""
    slow: dict[str, Any] | None = report.links.get("slow")
    if slow is not None:
        cost = slow["cost_us"]
        return slow["bandwidth"] * 8e-6, slow["usual"] * 8e-6, None if cost is None else cost / 1000
    late = next((table.straggler for table in report.time if table.straggler is not None), None)
    rates = [link["bandwidth"] * 8e-6 for link in report.links.get("links", ())]
    return None, median(rates) if rates else None, late.cost_us / 1000 if late is not None else None


def _range(figures: Sequence[float | None]) -> str:
    known = sorted(figure for figure in figures if figure is not None)
    if not known:
        return "-"
    low, high = f"{known[0]:.0f}", f"{known[-1]:.0f}"
    return low if low == high else f"{low} to {high}"


if __name__ == "__main__":
    sys.exit(main())
