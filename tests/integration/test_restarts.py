"""Elastic restarts: attempts are kept separate, and a failure that a restart recovers from does not fail the run."""

from __future__ import annotations

import pytest

from tests.helpers.commands import BIN
from tests.helpers.paths import JOBS
from tests.helpers.watched_run import RunWatched

pytestmark = pytest.mark.slow

# torchrun shares its store with the ranks and keeps it over restarts. gloo can then find addresses of the previous
# attempt and fail or hang in init_process_group, without ddpcheck too.
STABLE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
TORCHRUN = (BIN / "torchrun", "--nproc-per-node", "2")


def test_a_restart_that_recovers_from_a_failure(ddpcheck: RunWatched) -> None:
    watched = ddpcheck(*TORCHRUN, "--max-restarts", "1", JOBS / "failing_once.py", **STABLE)
    assert watched.status == 0, str(watched)
    assert watched.report["exit_code"] == 0
    assert (watched.report["world_size"], watched.report["steps"]) == (2, 4)

    first, second = watched.report["attempts"]
    failed, other = first["ranks"][1], first["ranks"][0]
    assert (failed["status"], failed["steps"]) == ("raised", 2), str(watched)
    assert failed["detail"].startswith("RuntimeError: the disk is on fire")
    assert other["status"] in ("raised", "stopped")
    assert [(row["rank"], row["status"], row["steps"]) for row in second["ranks"]] == [
        (0, "finished", 4),
        (1, "finished", 4),
    ]
    sessions = [{watched.records(rank, attempt)[0]["session"] for rank in (0, 1)} for attempt in (0, 1)]
    assert [len(names) for names in sessions] == [1, 1]
    assert sessions[0] != sessions[1]

    assert watched.report["verdict"] == "findings"
    assert watched.codes() == ["DDP602"], str(watched)
    finding = watched.finding("DDP602")
    assert (finding["severity"], finding["attempt"], finding["ranks"]) == ("warning", 0, [1])
    assert (finding["step"], finding["stage"]) == (1, "params")
    assert "the disk is on fire" in finding["cause"]


def test_a_later_job_is_not_a_restart(ddpcheck: RunWatched) -> None:
    """A second job in the same shell does not recover the first."""
    first = f"torchrun --nproc-per-node 2 {JOBS}/failing_once.py"
    second = f"python -m torch.distributed.run --nproc-per-node 2 {JOBS}/by_environment.py"
    watched = ddpcheck("sh", "-c", f"{first}; {second}")
    assert watched.report["exit_code"] == 0, str(watched)
    assert watched.status == 10, str(watched)
    assert watched.codes() == ["DDP602"], str(watched)
    finding = watched.finding("DDP602")
    assert (finding["severity"], finding["attempt"], finding["ranks"]) == ("error", 0, [1])

    failed, healthy = watched.report["attempts"]
    assert [row["rank"] for row in failed["ranks"]] == [0, 1]
    assert [(row["rank"], row["status"], row["steps"]) for row in healthy["ranks"]] == [
        (0, "finished", 3),
        (1, "finished", 3),
    ]
    assert {row["pid"] for row in failed["ranks"]}.isdisjoint(row["pid"] for row in healthy["ranks"])
