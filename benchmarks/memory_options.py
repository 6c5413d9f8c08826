"""Compares the savings that DDP502 predicts with the memory saved when the option is turned on.

python benchmarks/memory_options.py [--megabytes 200] [--keep]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import Record

# By default glibc keeps freed blocks of up to 32 MiB for itself, DDP's first buckets among them: what an option
# saves is then partly hidden. This way every large block that is freed goes back to the system.
GIVE_BACK = {"MALLOC_MMAP_THRESHOLD_": "1048576"}
JOB = Path(__file__).with_name("memory_options_job.py")
# What the prediction may be off by: allocators keep a little of everything.
TOLERANCE = 0.1
# Steps after the first few, when buckets were rebuilt and the state is there.
SETTLED = 6


def run(option: str, megabytes: int, folder: Path, keep: bool) -> tuple[dict[str, Any], list[MemoryRecord]]:
    """The report of a job, and what its first rank said of its memory."""
    out = folder / option
    command = ["ddpcheck", "run", "--out", out, "--", sys.executable, JOB]
    command += ["--option", option, "--megabytes", megabytes, "--store", f"file://{folder}/store-{option}"]
    environment = dict(os.environ) if keep else {**os.environ, **GIVE_BACK}
    words = [str(word) for word in command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=600)
    if done.returncode:
        sys.exit(done.stderr)
    file = RecordFile(out / "rank-00000.jsonl")
    records: list[Record] = []
    while found := file.read():
        records += found
    return json.loads((out / "report.json").read_text()), [
        record for record in records if isinstance(record, MemoryRecord) and record.step >= SETTLED
    ]


def predicted(report: dict[str, Any], option: str) -> int:
    savings = [
        saving
        for finding in report["findings"]
        if finding["code"] == "DDP502"
        for saving in finding["evidence"]["savings"]
    ]
    return sum(saving["bytes"] for saving in savings if saving["option"] == option)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--keep", action="store_true", help="let the allocator keep what is freed, as usual")
    options = parser.parse_args()
    kinds = ("none", "views", "keep", "zero")
    with tempfile.TemporaryDirectory() as name:
        jobs = {each: run(each, options.megabytes, Path(name), options.keep) for each in kinds}
    after = {each: median(record.host for record in records) for each, (_, records) in jobs.items()}
    high = {each: median(record.high for record in records) for each, (_, records) in jobs.items()}
    cases = [
        ("gradient_as_bucket_view=True", jobs["none"][0], after["none"] - after["views"]),
        ("set_to_none=True", jobs["keep"][0], high["keep"] - high["none"]),
        ("ZeroRedundancyOptimizer", jobs["none"][0], after["none"] - after["zero"]),
    ]
    wrong = []
    print(f"{'option':30} {'predicted':>12} {'measured':>12}")
    for option, report, measured in cases:
        told = predicted(report, option)
        print(f"{option:30} {told / 1e6:9.1f} MB {measured / 1e6:9.1f} MB")
        if abs(measured - told) > TOLERANCE * told:
            wrong.append(option)
    if wrong:
        sys.exit(f"off by more than {TOLERANCE:.0%}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
