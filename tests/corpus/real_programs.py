"""Programs by other authors, each run without and with ddpcheck: whether their behaviour differs, and the findings.

    python tests/corpus/real_programs.py [--only NAME] [--json FILE]

Accelerate's own test scripts, Lightning's demos, the Trainer of transformers, and torch's own distributed tests.
A program passes if its exit status and its output are equal in both runs, and if the findings are exactly the correct
ones. The output of each rank is compared line by line, except for times, speeds, addresses and temporary folders; where
ranks share one output, the order of lines does not matter. A test of torch passes if it passes in both runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

if __package__ in (None, ""):  # started as a file
    sys.path[0] = str(Path(__file__).parents[2])

from tests.corpus import accelerate_scripts, side_by_side
from tests.helpers.commands import BIN
from tests.helpers.fork_server import prepared

HERE = Path(__file__).parent
JOBS = HERE.parent / "jobs"
PYTHON = sys.executable
# Ranks that print at the same time would mix their lines, so standard output (1) goes to files.
TORCHRUN = (
    *(BIN / "torchrun", "--standalone", "--nproc-per-node", "2"),
    *("--redirects", "1", "--log-dir", side_by_side.LOGS),
)

Reporter = Callable[[str], None]


@dataclass(frozen=True)
class Result:
    """The result of a program or of a set of tests."""

    name: str
    passed: int
    total: int
    note: str


@dataclass(frozen=True)
class Program:
    """A command and the correct findings about it."""

    name: str
    command: Sequence[object]
    env: Mapping[str, str] = field(default_factory=dict)
    findings: tuple[str, ...] = ()
    why: str = ""

    def run(self) -> Result:
        return self.judge(side_by_side.run_both(self.command, **self.env))

    def judge(self, pair: side_by_side.Pair) -> Result:
        wrong = pair.differences()
        if pair.plain.status:
            wrong.append(f"fails without ddpcheck too: {pair.plain.stderr[-400:]}")
        codes = pair.codes()
        if codes != sorted(self.findings):
            wrong.append(f"findings {codes or 'none'} instead of {list(self.findings) or 'none'}")
        result_text = f"{', '.join(codes)}: {self.why}" if codes else "nothing found"
        return Result(self.name, int(not wrong), 1, "; ".join(wrong) or result_text)


# Correct findings about torch's tests, by code. No other finding is accepted.
TRUE_OF_TESTS: dict[str, tuple[str, ...]] = {
    # Draw the same inputs on all ranks, after torch's test case has seeded all ranks alike.
    "DDP301": (
        "test_DistributedDataParallel_with_amp_and_grad_is_view",
        "test_ddp_bucket_cap_mb_list",
        "test_ddp_control_flow_different_across_ranks",
        "test_ddp_control_flow_same_across_ranks",
        "test_ddp_new_tensor_in_fwd",
        "test_ddp_new_tensor_in_fwd_static_graph",
        "test_ddp_remove_autograd_hooks",
        "test_ddp_sink_noclone",
        "test_ddp_static_graph_nested_types",
        "test_ddp_unused_params_rebuild_buckets_exception",
        "test_detect_ddp_is_actually_static",
        "test_invalid_static_graph",
    ),
    # Use ones as input on every rank, or no input, and so compute the same gradients.
    "DDP304": (
        "test_ddp_comm_hook_logging",
        "test_ddp_create_graph",
        "test_ddp_grad_div_uneven_inputs",
        "test_static_graph_multi_forward",
    ),
    # Builds another model on rank 1 on purpose.
    "DDP103": ("test_ddp_model_diff_num_params_across_ranks",),
}


def _accelerate() -> Iterator[Program]:
    folder = accelerate_scripts.folder()
    for script in accelerate_scripts.RUN:
        findings, why = accelerate_scripts.TRUE.get(script, ((), ""))
        yield Program(
            f"accelerate {script}",
            (*TORCHRUN, folder / script),
            accelerate_scripts.ENVIRONMENT,
            findings,
            why,
        )


def _others() -> Iterator[Program]:
    for name in ("BoringModel", "ManualOptimBoringModel"):
        yield Program(f"lightning {name}", (PYTHON, JOBS / "lightning_demos.py", name))
    trainer = (*TORCHRUN, JOBS / "tiny_trainer.py", "--dropout")
    yield Program("transformers Trainer", (*trainer, 0.0))
    yield Program(
        "transformers Trainer with dropout",
        (*trainer, 0.1),
        findings=("DDP306",),
        why="the Trainer seeds all ranks alike, so they draw the same masks",
    )


def script_of(program: Program) -> tuple[Path, list[str]]:
    """The script that a program's launcher starts, and its arguments."""
    words = [str(word) for word in program.command]
    [at] = [number for number, word in enumerate(words) if word.endswith(".py")]
    return Path(words[at]), words[at + 1 :]


def programs() -> list[Program]:
    return [*_accelerate(), *_others()]


def torch_tests(
    name: str, world_size: int = 2, lend: bool = False, only: Sequence[str] | None = None
) -> Result:
    """Torch's own tests; with `lend`, those that ask for GPUs, on the CPU."""
    options = ["--world-size", str(world_size), *(["--lend-processor"] if lend else [])]
    plain = _run_tests([*options, *(["--only", ",".join(only)] if only else [])])[0]
    passing = [test for test, result in plain.items() if result["outcome"] == "passed"]
    watched, report = _run_tests([*options, "--only", ",".join(passing)], watch=True)
    broken = [test for test in passing if watched.get(test, {}).get("outcome") != "passed"]
    raised = _raised(watched, report)
    untrue = sorted({f"{code} in {test}" for code, test in raised if not _is_true(code, test)})
    counts = Counter(result["outcome"] for result in plain.values())
    tally = Counter(code for code, _ in raised)
    note = (
        f"{world_size} ranks; without ddpcheck {counts['passed']} passed, {counts['failed']} failed, "
        f"{counts['skipped']} skipped; with it {len(passing) - len(broken)} of those that had passed; "
        f"raised: {', '.join(f'{code} {count}' for code, count in sorted(tally.items())) or 'nothing'}"
    )
    wrong = [f"only without ddpcheck: {', '.join(broken)}"] * bool(broken) + untrue
    lost = {*broken, *(test for code, test in raised if not _is_true(code, test))}
    return Result(name, len(passing) - len(lost), len(passing), "; ".join([note, *wrong]))


def _run_tests(options: Sequence[str], watch: bool = False) -> tuple[dict[str, Any], Mapping[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        results, run = Path(folder) / "results.json", Path(folder) / "run"
        command: list[object] = [*prepared(HERE / "torch_tests.py", "--out", results, *options)]
        if watch:
            command = [BIN / "ddpcheck", "run", "--fail-on", "never", "--out", run, "--", *command]
        done = side_by_side.run(command, folder, {}, most_seconds=900.0)
        if done.status or not results.is_file():
            raise RuntimeError(f"torch_tests.py did not end well: {done.status}\n{done.stderr[-2000:]}")
        report = json.loads((run / "report.json").read_text()) if watch else {}
        return json.loads(results.read_text()), report


def _raised(results: Mapping[str, Any], report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Findings above a note, each with its test."""
    tests = {pid: test for test, result in results.items() for pid in result["ranks"]}
    attempts = {
        attempt["number"]: tests.get(attempt["ranks"][0]["pid"], "") for attempt in report["attempts"]
    }
    return [
        (finding["code"], attempts.get(finding["attempt"], ""))
        for finding in report["findings"]
        if finding["severity"] != "note"
    ]


def _is_true(code: str, test: str) -> bool:
    return test in TRUE_OF_TESTS.get(code, ())


def _tasks() -> Iterator[tuple[str, Callable[[], Result]]]:
    for program in programs():
        yield program.name, program.run
    yield "torch tests", lambda: torch_tests("torch tests")
    yield "torch tests for GPUs", lambda: torch_tests("torch tests for GPUs", lend=True)


def run_all(report: Reporter, only: str = "") -> list[Result]:
    """Run everything, or what has `only` in its name, and report each result."""
    results = []
    for name, task in _tasks():
        if only not in name:
            continue
        results.append(task())
        report(f"{results[-1].passed}/{results[-1].total} {name}: {results[-1].note}")
    if not only or only in "accelerate":
        results.append(_unlisted())
    return results


def _unlisted() -> Result:
    """A new accelerate may have more scripts: each must be run or listed with a reason."""
    unlisted = accelerate_scripts.unlisted()
    left_out = "; ".join(f"{script} {why}" for script, why in accelerate_scripts.NOT_RUN.items())
    note = f"in no list: {', '.join(unlisted)}" if unlisted else f"not run: {left_out}"
    return Result("accelerate scripts left out", int(not unlisted), 1, note)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="only what has this in its name")
    parser.add_argument("--json", type=Path, help="write the results here too")
    options = parser.parse_args()
    results = run_all(lambda line: print(line, flush=True), options.only)
    if options.json:
        options.json.write_text(json.dumps([asdict(result) for result in results], indent=1))
    sys.exit(0 if results and all(result.passed == result.total for result in results) else 1)


if __name__ == "__main__":
    main()
