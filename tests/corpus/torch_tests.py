"""Runs the distributed tests that torch ships in its package, with gloo, on ranks forked from this process.

    python torch_tests.py --out results.json [--world-size 3] [--only test_a,test_b] [--lend-processor]

`results.json` holds, for each test, its outcome, its messages, and the process ids of its ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import unittest
from pathlib import Path
from typing import Any

TEST_SECONDS = 180


def settings(world_size: int) -> dict[str, str]:
    """Variables that torch's test module reads, some of them when it is imported."""
    return {
        "BACKEND": "gloo",
        "WORLD_SIZE": str(world_size),
        # Each test sets its own; until then any file will do.
        "INIT_METHOD": "file:///dev/null",
        "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_SECONDS),
    }


def forked_case() -> type[unittest.TestCase]:
    """Torch's test case with forked ranks: spawned ranks would import torch for each test."""
    import torch
    from torch.testing._internal import common_distributed
    from torch.testing._internal.distributed import distributed_test
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    # Some are 500 seconds, but tests that pass on a CPU take only a few.
    common_distributed.TIMEOUT_OVERRIDE.clear()

    class Forked(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            # Each test has a store file of its own, which spawned ranks would read on import.
            distributed_test.INIT_METHOD = os.environ["INIT_METHOD"]
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    return Forked


def names_of(case: type[unittest.TestCase]) -> list[str]:
    return sorted(unittest.defaultTestLoader.getTestCaseNames(case))


def run_test(case: type[unittest.TestCase], name: str) -> dict[str, Any]:
    test: Any = case(name)
    outcome = unittest.TestResult()
    began = time.monotonic()
    ranks: list[int] = []
    start = test._start_processes

    def start_and_note(process: Any) -> None:
        start(process)
        ranks.extend(rank.pid for rank in test.processes)

    test._start_processes = start_and_note
    test.run(outcome)
    wrong = [*outcome.errors, *outcome.failures]
    reason = wrong[0][1] if wrong else outcome.skipped[0][1] if outcome.skipped else ""
    return {
        "outcome": "failed" if wrong else "skipped" if outcome.skipped else "passed",
        "reason": reason,
        "ranks": ranks,
        "seconds": round(time.monotonic() - began, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, default=2)
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument(
        "--lend-processor", action="store_true", help="run tests that ask for GPUs, on the CPU"
    )
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    os.environ.update(settings(options.world_size))
    sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
    import forking

    if options.lend_processor:
        import processor_for_gpus

        processor_for_gpus.drop_conditions(options.world_size)
        case = forked_case()
        processor_for_gpus.lend(options.world_size)
        names = sorted(processor_for_gpus.ASKING.intersection(names_of(case)))
    else:
        case = forked_case()
        names = names_of(case)
    if options.only:
        names = options.only.split(",")
    forking.prepare()
    results = {}
    for name in names:
        results[name] = run_test(case, name)
        print(name, results[name]["outcome"], results[name]["seconds"], flush=True)
        # After each test: a crash must not lose earlier results.
        options.out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
    sys.exit(0)
