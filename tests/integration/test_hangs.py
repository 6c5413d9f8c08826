"""Jobs that hang are stopped and explained; jobs that are only slow are not."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.corpus.header import read_header
from tests.corpus.jobs import Job, Outcome, jobs_of, run_batch
from tests.corpus.verdict import judge
from tests.helpers.fork_server import prepared
from tests.helpers.launchers import torchrun
from tests.helpers.paths import FAULTS, JOBS
from tests.helpers.tracebacks import is_of_ddpcheck
from tests.helpers.watched_run import RunWatched, WatchedRun, run_watched

pytestmark = pytest.mark.slow

# Short, so that the tests are short; the slow jobs of hangs.py sleep five times as long.
OPTIONS = ("--hang-timeout", "3")
SLOW = (
    "slow_first_step",
    "slow_evaluation",
    "sleeping_loader",
    "waits_for_a_process",
    "waits_for_a_thread",
    "stopped",
    "writes_for_long",
    "idle_without_ddp",
)
# By the names of the jobs in this file.
SLOW_JOBS, BY_TORCHRUN = "slow jobs", "torchrun"
CASES = (
    "left_the_group",
    "lock_never_released",
    "native_code_holds_the_interpreter",
    "spins_around_a_collective",
)
# Scripts of the corpus that hang; test_corpus leaves them to this file.
SCRIPTS = (
    FAULTS / "early_stop_on_some_ranks.py",
    FAULTS / "evaluation_on_rank_0_only.py",
    FAULTS / "variants" / "barrier_on_some_ranks.py",
    FAULTS / "variants" / "file_lock_around_barrier.py",
    FAULTS / "variants" / "gather_on_one_rank.py",
    FAULTS / "variants" / "loader_worker_with_a_lock.py",
    FAULTS / "variants" / "wrapped_on_one_rank.py",
    FAULTS / "variants" / "uneven_batches_without_join.py",
)
# Its ranks wait before there is a process group, so none of them reports.
NEVER_JOINED = FAULTS / "variants" / "fewer_processes_than_ranks.py"
MOST_SECONDS_AFTER_THE_TIMEOUT = 20.0
# Jobs that hang use no CPU, so several commands run at the same time.
AT_A_TIME = 3

Start = Callable[[str], Any]


def corpus_jobs() -> list[Job]:
    return [job for script in SCRIPTS for job in jobs_of(read_header(script))]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """What a job left, by its name. Starts the next jobs in the order of this file as well."""

    def run(name: str) -> WatchedRun | Outcome:
        if name in scripts:
            [outcome] = run_batch([scripts[name]])
            return outcome
        folder = tmp_path_factory.mktemp("hang")
        if name == BY_TORCHRUN:
            return run_watched(torchrun(2, SCRIPTS[0]), folder, options=("--hang-timeout", "5"))
        names = SLOW if name == SLOW_JOBS else (name,)
        return run_watched(prepared(JOBS / "hangs.py", *names), folder, options=OPTIONS)

    scripts = {job.name: job for job in [*corpus_jobs(), *jobs_of(read_header(NEVER_JOINED))]}
    order = [*scripts, *CASES, SLOW_JOBS, BY_TORCHRUN]
    started: dict[str, Future[Any]] = {}
    with ThreadPoolExecutor(AT_A_TIME) as pool:

        def get(name: str) -> Any:
            first = order.index(name)
            for each in order[first : first + AT_A_TIME]:
                if each not in started:
                    started[each] = pool.submit(run, each)
            return started[name].result()

        yield get


def test_every_script_of_the_corpus_that_hangs_is_run_here() -> None:
    headers = [read_header(path) for folder in (FAULTS, FAULTS / "variants") for path in folder.glob("*.py")]
    hanging = {header.name for header in headers if header.hangs}
    assert hanging == {script.stem for script in (*SCRIPTS, NEVER_JOINED)}
    # One is ended by the timeout of its process group: nothing shows before that it hangs.
    others = {header.name for header in headers if header.expect == "DDP603"} - hanging
    assert others == {"waits_for_a_file_of_rank_0"}


def stack_of(finding: Mapping[str, Any], rank: int) -> dict[str, Any]:
    [results] = [each for each in finding["evidence"]["standings"] if rank in each["ranks"]]
    return dict(results)


# Where each rank waits: in a barrier, or in DDP's own communication.
WAITS = {
    "early_stop_on_some_ranks": ["ddp", "barrier"],
    "evaluation_on_rank_0_only": ["ddp", "barrier"],
    "barrier_on_some_ranks": ["barrier", "barrier", "ddp"],
}


@pytest.mark.parametrize("job", corpus_jobs(), ids=lambda job: job.name)
def test_a_script_that_hangs(result: Start, job: Job) -> None:
    """Code, cause, stage, step and ranks are those of the script's header."""
    outcome = result(job.name)
    assert judge(outcome).misses == ()
    assert outcome.status == 10
    assert outcome.reported[0] == "stopped"
    [finding] = [f for f in outcome.findings if f["severity"] != "note"]
    # The timeout of the script, and what stacks, samples and their comparison take.
    timeout = float(job.header.options[job.header.options.index("--hang-timeout") + 1])
    assert timeout <= finding["evidence"]["seconds"] <= timeout + MOST_SECONDS_AFTER_THE_TIMEOUT
    for rank in range(job.world_size):
        files = [call.rpartition(":")[0] for call in stack_of(finding, rank)["stack"]]
        assert str(job.header.path) in files
        # Calls that pass through ddpcheck's wrappers do not show them.
        assert not any(is_of_ddpcheck(file) for file in files)
    for rank, wait in enumerate(WAITS.get(job.header.name, ())):
        waits_in = stack_of(finding, rank)["waits_in"]
        assert waits_in is not None
        assert (waits_in == "barrier") == (wait == "barrier")


def test_ranks_that_wait_for_one_that_never_joins(result: Start) -> None:
    [job] = jobs_of(read_header(NEVER_JOINED))
    outcome = result(job.name)
    assert judge(outcome).misses == ()
    assert (outcome.status, outcome.reported) == (10, ())
    [finding] = [f for f in outcome.findings if f["severity"] != "note"]
    assert 3 <= finding["evidence"]["seconds"] <= 3 + MOST_SECONDS_AFTER_THE_TIMEOUT


def hung(result: Start, name: str) -> dict[str, Any]:
    done: WatchedRun = result(name)
    assert done.status == 10, str(done)
    assert done.report["verdict"] == "findings"
    assert done.codes("error", "warning") == ["DDP603"], str(done)
    finding = dict(done.finding("DDP603"))
    assert finding["ranks"] == [1]
    return finding


def test_a_rank_that_destroyed_its_group(result: Start) -> None:
    finding = hung(result, "left_the_group")
    # Rank 1 stopped training after step 3.
    assert (stack_of(finding, 1)["step"], finding["step"]) == (4, 4)
    assert stack_of(finding, 1)["left"]


def test_a_lock_that_is_never_released(result: Start) -> None:
    finding = hung(result, "lock_never_released")
    assert stack_of(finding, 1)["stack"][0].endswith("in lock_never_released")
    assert stack_of(finding, 1)["waits_in"] is None


def test_native_code_that_holds_the_interpreter(result: Start) -> None:
    finding = hung(result, "native_code_holds_the_interpreter")
    assert stack_of(finding, 1)["stack"] == []


def test_ranks_that_spin_around_a_collective(result: Start) -> None:
    """Only the numbers of collectives distinguish a rank that polls from one that computes."""
    finding = hung(result, "spins_around_a_collective")
    collective = finding["evidence"]["collective"]
    assert (collective["kind"], collective["ranks"], collective["group"]) == ("missing", [1], "0")
    assert collective["calls"]["0"] == "all_reduce of 4x5"
    assert "1" not in collective["calls"]
    assert stack_of(finding, 0)["waits_in"].startswith("all_reduce of 4x5")
    assert finding["evidence"]["seconds"] < 3 + 20


def test_slow_jobs_are_not_stopped(result: Start) -> None:
    """All jobs at the same time, in one run."""
    done: WatchedRun = result(SLOW_JOBS)
    assert done.status == 0, str(done)
    assert done.codes("error", "warning") == [], str(done)
    assert len(done.report["attempts"]) == len(SLOW)
    # The launcher did check them: otherwise this test would prove nothing.
    assert len({record["session"] for record in done.node_records("slow")}) >= len(SLOW) - 2
    assert done.node_records("hang", "stop") == []


def test_a_torchrun_job_that_hangs(result: Start) -> None:
    hung(result, BY_TORCHRUN)


def test_hang_timeout_0_starts_no_thread(ddpcheck: RunWatched, tmp_path: Path) -> None:
    job = tmp_path / "job.py"
    job.write_text(
        "import json, sys, threading, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=0, world_size=1)\n"
        "print(json.dumps([thread.name for thread in threading.enumerate()]))\n"
    )
    threads = []
    for options in ((), ("--hang-timeout", "0")):
        out = tmp_path / f"run-{len(threads)}"
        done = ddpcheck(*prepared(job, tmp_path / f"store-{len(threads)}"), options=options, out=out)
        assert done.status == 0, str(done)
        threads.append({name for name in json.loads(done.stdout) if name.startswith("ddpcheck")})
    assert len(threads[0] - threads[1]) == 1
    assert threads[1] < threads[0]
