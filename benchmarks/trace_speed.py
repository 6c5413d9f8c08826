"""Reading a real trace against Holistic Trace Analysis, and a trace of 1 GB; exits 1 if a target is missed.

python benchmarks/trace_speed.py [--rounds N] [--hta-python PATH] [--gigabytes X]

Needs the traces that the tests use (../shared/traces, or the folder in DDPCHECK_TRACES). HTA goes into an environment
of its own under the temporary folder, because it does not work with pandas 3.
"""

from __future__ import annotations

import argparse
import gzip
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TRACES = Path(os.environ.get("DDPCHECK_TRACES", ROOT.parent / "shared" / "traces"))
TRACE = TRACES / "resnet50_ddp_a100_rank0of2.json.gz"
LEAST_RATIO = 10.0
MOST_MEMORY = 4.0

# Both answer each line on stdin with the seconds that one analysis took, by the clock and of the processor.
MEASURED = """
import os, sys, time
def used():
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system
print("ready", flush=True)
for line in sys.stdin:
    wall, work = time.perf_counter(), used()
    overlap = once()
    print(time.perf_counter() - wall, used() - work, overlap, flush=True)
"""
OURS = """
import sys
from pathlib import Path
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.reader import load
def once():
    return analyse(load([Path(sys.argv[1])]).traces).ranks[0].shares.overlap_pct
"""
HTA = """
import sys, logging, warnings
warnings.simplefilter("ignore")
logging.disable(logging.WARNING)
from hta.trace_analysis import TraceAnalysis
def once():
    analysis = TraceAnalysis(trace_files={0: sys.argv[1]}, trace_dir="/")
    return analysis.get_comm_comp_overlap(visualize=False)["comp_comm_overlap_pctg"][0]
"""
WHOLE = """
import sys
from pathlib import Path
from ddpcheck.traces.analyse import analyse
from ddpcheck.traces.reader import load
shares = analyse(load([Path(sys.argv[1])]).traces).ranks[0].shares
print(shares.comm_ns, shares.overlap_ns)
"""


class Worker:
    """One of the two, with everything imported, waiting for its turn."""

    def __init__(self, python: str, script: str) -> None:
        self.process = subprocess.Popen(
            [python, "-c", script + MEASURED, str(TRACE)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def analyse(self) -> tuple[float, float, float]:
        assert self.process.stdin
        print("go", file=self.process.stdin, flush=True)
        wall, work, overlap = map(float, self._line().split())
        return wall, work, overlap

    def _line(self) -> str:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("a worker ended")
        return line

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()


def hta_python() -> str | None:
    """An interpreter that can import HTA, made where there is none."""
    place = Path(tempfile.gettempdir()) / "ddpcheck-bench-hta"
    python = place / "bin" / "python"
    if not python.exists():
        venv.create(place, with_pip=True)
        wanted = ["HolisticTraceAnalysis", "pandas<3"]
        done = subprocess.run(
            [python, "-m", "pip", "install", "--quiet", *wanted], check=False, capture_output=True
        )
        if done.returncode:
            shutil.rmtree(place)
            return None
    return str(python)


def against_hta(python: str, rounds: int) -> float:
    ours, theirs = Worker(sys.executable, OURS), Worker(python, HTA)
    ours.analyse()
    theirs.analyse()
    pairs = [(ours.analyse(), theirs.analyse()) for _ in range(rounds)]
    ours.end()
    theirs.end()
    mine, others = (statistics.median(each[0] for each in column) for column in zip(*pairs, strict=True))
    wall = statistics.median(other[0] / mine[0] for mine, other in pairs)
    work = statistics.median(other[1] / mine[1] for mine, other in pairs)
    print(
        f"{TRACE.name}: ddpcheck {mine:.2f} s, HTA {others:.2f} s: "
        f"{wall:.1f} times as fast (processor time {work:.1f})"
    )
    return wall


def repeated(out: Path, size: int) -> None:
    """The real trace over and over, each time later, with ids and steps of its own, until it has `size` bytes."""
    text = gzip.decompress(TRACE.read_bytes())
    begin = text.index(b"[", text.index(b'"traceEvents"')) + 1
    end = text.rindex(b"]", 0, text.index(b'"traceName"', begin) if b'"traceName"' in text[begin:] else None)
    # Metadata follows the events.
    end = text.rindex(b"}", 0, text.index(b'"INFO"', begin)) + 1 if b'"INFO"' in text[begin:] else end
    pieces = re.split(rb'("ts": |"correlation": |ProfilerStep#)(\d+)', text[begin:end])
    tail = text[text.index(b"]", end) :]
    shifts = {b'"ts": ': 1_000_000, b'"correlation": ': 10_000_000, b"ProfilerStep#": 3}
    with out.open("wb") as file:
        file.write(text[:begin])
        copy = 0
        while True:
            written = list(pieces)
            for index in range(1, len(pieces), 3):
                written[index + 1] = b"%d" % (int(pieces[index + 1]) + copy * shifts[pieces[index]])
            file.write(b"".join(written))
            copy += 1
            if file.tell() >= size:
                break
            file.write(b",")
        file.write(tail)


def large(gigabytes: float) -> float:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.json"
        repeated(path, int(gigabytes * 1e9))
        size = path.stat().st_size
        began = os.times().elapsed
        process = subprocess.Popen([sys.executable, "-c", WHOLE, str(path)])
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        took = os.times().elapsed - began
    if process.returncode:
        sys.exit("the large trace could not be analysed")
    ratio = usage.ru_maxrss * 1024 / size
    print(
        f"{size / 1e9:.2f} GB: {took:.1f} s ({usage.ru_utime + usage.ru_stime:.1f} s of the processor), "
        f"{usage.ru_maxrss / 1e6:.2f} GB of memory, {ratio:.2f} times the file"
    )
    return ratio


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--hta-python", help="an interpreter that has HTA, instead of a new one")
    parser.add_argument("--gigabytes", type=float, default=1.0)
    chosen = parser.parse_args()
    if not TRACE.exists():
        print(f"skipped: there is no {TRACE}")
        return
    missed = []
    python = chosen.hta_python or hta_python()
    if python is None:
        print("skipped: Holistic Trace Analysis could not be installed here")
    elif against_hta(python, chosen.rounds) < LEAST_RATIO:
        missed.append(f"less than {LEAST_RATIO:.0f} times as fast as HTA")
    if large(chosen.gigabytes) > MOST_MEMORY:
        missed.append(f"more than {MOST_MEMORY:.0f} times the file in memory")
    if missed:
        sys.exit("trace speed: " + ", ".join(missed))


if __name__ == "__main__":
    main()
