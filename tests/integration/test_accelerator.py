"""ddpcheck's device code on the simulated accelerator: order of streams, waits, launches, devices, graphs, values.

One command runs all jobs of `tests/jobs/accelerator.py` under ddpcheck, and one runs them without it.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.jobs import FORKER
from tests.helpers.watched_run import WatchedRun, records_in, run_to_end, run_watched

pytestmark = [pytest.mark.slow, pytest.mark.needs("g++")]

SCRIPT = Path(__file__).parents[1] / "jobs" / "accelerator.py"
WAITS = Path(__file__).parents[1] / "jobs" / "accelerator_waits.py"
# The first version of torch whose compiler has a policy for graphs.
HAS_POLICY = tuple(map(int, version("torch").split(".")[:2])) >= (2, 13)
# Cases of the script, and their world sizes.
JOBS = {
    "plain": (1, 2),
    "views": (2,),
    "user_stream": (2,),
    "other_device": (2,),
    "delayed": (3,),
    "accumulated": (2,),
    "mixed": (2,),
    "late": (2,),
    "scattered": (3,),
    "graphed": (2,),
    "compiled": (2,),
    **({"reduced_overhead": (2,)} if HAS_POLICY else {}),
    "by_hand": (2,),
    "sharded": (2,),
    "sharded_flat": (2,),
    # The last one: the report has its checks.
    "captured": (2,),
}
RANKS = [(case, size, rank) for case, sizes in JOBS.items() for size in sizes for rank in range(size)]
LOGGED = [
    ranks
    for ranks in RANKS
    if ranks[0]
    in ("plain", "views", "user_stream", "other_device", "mixed", "by_hand", "sharded", "sharded_flat")
]
WARM_STEPS = 4
# One for the results of each scan, one for the addresses of gradients, one each for loss, scale and batch.
MOST_COPIES = 9
# The step at which rank 1 of `late` gets another learning rate.
FAULT_STEP = 5
FIRST_PARAMETER = "0.weight"


@dataclass(frozen=True)
class Jobs:
    """All jobs with and without ddpcheck."""

    folder: Path
    plain_folder: Path
    run: WatchedRun
    # By case and world size.
    pids: Mapping[tuple[str, int], list[int]]

    def result(self, case: str, size: int, rank: int, watched: bool = True) -> dict[str, Any]:
        folder = self.folder if watched else self.plain_folder
        result: dict[str, Any] = json.loads((folder / f"{case}-{size}-{rank}.json").read_text())
        return result

    def log(self, case: str, size: int, rank: int) -> list[Any]:
        from tests.accelerator import event_log

        return event_log.read(self.folder / f"{case}-{size}-{rank}.jsonl")

    def attempt(self, case: str, size: int) -> dict[str, Any]:
        pids = set(self.pids[case, size])
        found = [each for each in self.run.report["attempts"] if {row["pid"] for row in each["ranks"]} & pids]
        assert len(found) == 1, f"{case}: {self.run}"
        attempt: dict[str, Any] = found[0]
        return attempt

    def findings(self, case: str, size: int) -> list[dict[str, Any]]:
        number = self.attempt(case, size)["number"]
        return [each for each in self.run.report["findings"] if each["attempt"] == number]

    def records(self, case: str, size: int, rank: int) -> list[dict[str, Any]]:
        pid = self.pids[case, size][rank]
        for path in self.run.folder.glob("rank-*.jsonl"):
            records = records_in(path)
            if records[0].get("pid") == pid:
                return records
        raise AssertionError(f"no records of {case}, rank {rank}")


def _plan(folder: Path) -> list[object]:
    """The command that runs all jobs, which leave their results in `folder`."""
    folder.mkdir()
    jobs = [
        {
            "name": f"{case} {size}",
            "script": str(SCRIPT),
            "arguments": [case, str(folder)],
            "ranks": size,
            "seconds": 300,
            "logs": str(folder / f"logs-{case}-{size}"),
        }
        for case, sizes in JOBS.items()
        for size in sizes
    ]
    (folder / "plan.json").write_text(json.dumps(jobs), encoding="utf-8")
    return [sys.executable, FORKER, folder / "plan.json", folder / "results.jsonl"]


def _pids(folder: Path) -> Iterator[tuple[tuple[str, int], list[int]]]:
    for row in records_in(folder / "results.jsonl"):
        case, size = row["name"].split()
        errors = "".join(path.read_text()[-3000:] for path in folder.glob(f"logs-{case}-{size}/*.stderr"))
        assert not any(row["exits"]), f"{row}\n{errors}"
        yield (case, int(size)), row["pids"]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    from tests.accelerator.autoload import environment

    folder = tmp_path_factory.mktemp("accelerator")
    env = environment()
    run_to_end(_plan(folder / "plain"), folder, env)
    dict(_pids(folder / "plain"))
    run = run_watched(_plan(folder / "watched"), folder, env=env)
    return Jobs(folder / "watched", folder / "plain", run, dict(_pids(folder / "watched")))


@pytest.mark.parametrize(("case", "size", "rank"), RANKS)
def test_weights_are_bit_identical_with_and_without_ddpcheck(
    jobs: Jobs, case: str, size: int, rank: int
) -> None:
    assert jobs.result(case, size, rank)["weights"] == jobs.result(case, size, rank, watched=False)["weights"]
    # ddpcheck was there: it launched kernels.
    assert jobs.result(case, size, rank)["launches"] > 0
    assert jobs.result(case, size, rank, watched=False)["launches"] == 0


@pytest.mark.parametrize("case", [case for case in JOBS if case not in ("late", "captured")])
def test_healthy_jobs_have_no_finding(jobs: Jobs, case: str) -> None:
    for size in JOBS[case]:
        assert [each["code"] for each in jobs.findings(case, size)] == []


def test_backwards_run_in_a_thread_of_the_device(jobs: Jobs) -> None:
    """So the races and waits that the tests below look for are also those between two threads of the host."""
    for rank in range(2):
        assert jobs.result("plain", 2, rank)["backward_in_training_thread"] == [False]


@pytest.mark.parametrize(("case", "size", "rank"), LOGGED)
def test_work_on_streams_has_no_race(jobs: Jobs, case: str, size: int, rank: int) -> None:
    from tests.accelerator import event_log

    lines = jobs.log(case, size, rank)
    assert any(line.kind == "record" and line.by_ddpcheck for line in lines)
    assert list(map(str, event_log.races(lines))) == []


@pytest.mark.parametrize(("case", "size", "rank"), [*LOGGED, ("delayed", 3, 1)])
def test_training_loop_never_waits_for_ddpcheck(jobs: Jobs, case: str, size: int, rank: int) -> None:
    from tests.accelerator import event_log

    steps = event_log.steps(jobs.log(case, size, rank))
    assert len(steps) == 8
    assert [event_log.waits(lines) for lines in steps[WARM_STEPS:]] == [[]] * (len(steps) - WARM_STEPS)


@pytest.mark.parametrize(
    ("case", "size", "rank"), [("plain", 2, 0), ("views", 2, 0), ("user_stream", 2, 1), ("mixed", 2, 1)]
)
def test_launches_do_not_grow_with_parameters(jobs: Jobs, case: str, size: int, rank: int) -> None:
    from tests.accelerator import event_log

    buckets = jobs.result(case, size, rank)["buckets"]
    for lines in event_log.steps(jobs.log(case, size, rank))[WARM_STEPS:]:
        names = [line.name for line in event_log.kernels(lines)]
        copies = names.count("memcpy")
        # On a GPU the table kernel is two launches, one for the parts of tensors and one for their sums.
        assert len(names) - copies + names.count("scan_table") <= 10 + 2 * buckets, names
        # `views` and `mixed` have five times as many parameters.
        assert copies <= MOST_COPIES, names


def test_everything_is_on_the_device_of_the_module(jobs: Jobs) -> None:
    for rank in range(2):
        own = [line for line in jobs.log("other_device", 2, rank) if line.by_ddpcheck and line.device >= 0]
        assert {line.device for line in own} == {1}
        # Nothing was allocated on the current device, which the job does not use.
        assert jobs.result("other_device", 2, rank)["memory"][0] == 0
        # The job itself never sets the device: ddpcheck opens no context on device 0, which would take memory there.
        assert jobs.result("other_device", 2, rank)["contexts"] == [1]
        assert jobs.result("other_device", 2, rank, watched=False)["contexts"] == []
        records = jobs.records("other_device", 2, rank)
        assert {each["device"] for each in records if each["kind"] == "device"} == {"sim:1"}
        assert any(each["allocated"] > 0 for each in records if each["kind"] == "memory")


def test_digests_that_arrive_late_give_the_right_verdict_and_values(jobs: Jobs) -> None:
    findings = jobs.findings("late", 2)
    assert [(each["code"], each["step"]) for each in findings] == [("DDP206", FAULT_STEP)]
    dumped = 0
    for rank in range(2):
        values = jobs.result("late", 2, rank)["first_parameter"]
        for record in jobs.records("late", 2, rank):
            if record["kind"] == "capture" and record["stage"] == "params":
                assert record["step"] >= FAULT_STEP
                content = _safetensors(jobs.run.folder / record["file"])
                assert content[FIRST_PARAMETER] == pytest.approx(values[record["step"]], abs=0)
                dumped += 1
    assert dumped >= 2


def test_capture_is_left_alone_and_reported(jobs: Jobs) -> None:
    # The checks in the report are those of the last attempt.
    checks = {check["name"]: check for check in jobs.run.report["checks"]}
    assert jobs.attempt("captured", 2)["number"] == len(jobs.run.report["attempts"]) - 1
    inside = checks["steps inside graphs"]
    assert inside["outcome"] == "not checked"
    assert inside["detail"].startswith(
        "captured in a graph: 1 graphs, 4 replays, 4 steps and 4 backwards replayed"
    )
    assert "outside of graphs only" in checks["parameters after each step"]["detail"]
    graph = [each for each in jobs.records("captured", 2, 0) if each["kind"] == "graph"][-1]
    assert (graph["captures"], graph["steps"], graph["replays"], graph["replayed_steps"]) == (1, 1, 4, 4)
    # Steps that were not compared are no proof.
    assert [each["code"] for each in jobs.findings("captured", 2)] == ["DDP606"]


@pytest.mark.parametrize(
    "case", [case for case in ("graphed", "compiled", "reduced_overhead") if case in JOBS]
)
def test_graphs_of_modules_are_checked_like_other_modules(jobs: Jobs, case: str) -> None:
    """Hooks run outside of these graphs: nothing is lost, and nothing is listed as not checked."""
    for rank in range(2):
        records = jobs.records(case, 2, rank)
        assert not any(each["kind"] in ("graph", "fault") for each in records)
        stages = Counter(each["stage"] for each in records if each["kind"] == "digest")
        assert stages["params"] == 8
        assert sum(each["kind"] == "backward" and bool(each["reduced"]) for each in records) == 8


def test_compiled_graphs_were_captured_and_replayed(jobs: Jobs) -> None:
    """A forward and a backward, after two ordinary steps."""
    for rank in range(2):
        assert jobs.result("compiled", 2, rank)["graphs"] == {"captures": 2, "replays": 2 * (8 - 2)}


@pytest.mark.skipif(not HAS_POLICY, reason="torch 2.13 has a policy for graphs")
def test_torch_s_compiler_captures_and_replays_its_own_kernels(jobs: Jobs) -> None:
    """`mode="reduce-overhead"`: a forward and a backward, after one ordinary step; gradients are in their memory."""
    for rank in range(2):
        graphs = jobs.result("reduced_overhead", 2, rank)["graphs"]
        assert (graphs["captures"], graphs["replays"]) == (2, 2 * (8 - 1))
        # Kernels of the first step, and of the capture: a replay launches none.
        assert graphs["kernels"] > 0
        assert (
            graphs["kernels"] == jobs.result("reduced_overhead", 2, rank, watched=False)["graphs"]["kernels"]
        )


@pytest.fixture(scope="module")
def without_waits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    result = run_to_end([sys.executable, WAITS], tmp_path_factory.mktemp("waits"), {})
    assert result.status == 0, result
    observed: dict[str, dict[str, Any]] = json.loads(result.stdout)
    return observed


def test_work_as_it_is_has_neither_race_nor_wrong_value(without_waits: dict[str, dict[str, Any]]) -> None:
    assert without_waits["none"] == {"races": 0, "wrong": 0, "error": "", "example": ""}


@pytest.mark.parametrize(
    ("wait", "shows_as"),
    [
        ("the side stream waits for the job", "races"),
        ("memory is kept for the side stream", "races"),
        ("the copy is on the side stream", "wrong"),
        ("the event follows the copy", "wrong"),
        ("results are read after the event", "wrong"),
        ("each stream has its table", "races"),
        ("keys are complete", "races"),
        ("the table's device is current", "error"),
    ],
)
def test_each_wait_is_necessary(without_waits: dict[str, dict[str, Any]], wait: str, shows_as: str) -> None:
    assert without_waits[wait][shows_as], without_waits[wait]


def _safetensors(path: Path) -> dict[str, list[float]]:
    """The float32 tensors of a file."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: list(struct.unpack(f"<{(end - begin) // 4}f", data[begin:end]))
        for name, row in header.items()
        if row["dtype"] == "F32"
        for begin, end in [row["data_offsets"]]
    }
