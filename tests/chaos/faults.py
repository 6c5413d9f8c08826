"""What may happen to a job and to ddpcheck: each fault prepares a scene, and strikes at a random moment of training."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from tests.chaos.faulty_io import missing as missing_library
from tests.chaos.scene import STEPS, WORLD_SIZE, Scene
from tests.lab.lab import missing as missing_lab

MEMORY_GROUPS = Path("/sys/fs/cgroup/memory")
# What a rank may use beyond what it used before the limit.
MEMORY_BYTES = 32 << 20
# How long a paused process is paused. The hang detector waits for much longer.
PAUSE_SECONDS = (0.5, 4.0)


class Effect(Enum):
    """What the fault does to the job without ddpcheck."""

    # The job must end with status 0 and the weights of a job without ddpcheck.
    NONE = "none"
    # The job cannot finish, and has to end all the same.
    ENDS_JOB = "ends the job"


@dataclass(frozen=True)
class Fault:
    """`prepare` runs before the start, `strike` while the job trains."""

    name: str
    what: str
    effect: Effect
    strike: Callable[[Scene], None]
    prepare: Callable[[Scene], None] = lambda scene: None
    # Whether records that were written before remain readable.
    keeps_records: bool = True
    # Whether ddpcheck writes report.json; otherwise it says in one sentence why not.
    reports: bool = True
    # Codes of which each report must contain one, and codes that it may contain besides; none above a note else.
    codes: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    # With what `ddpcheck run` may exit.
    statuses: frozenset[int] = frozenset({0})
    # The job runs on two nodes of a lab.
    on_nodes: bool = False
    missing: Callable[[], str] = lambda: ""


def _needs_root() -> str:
    return "" if os.geteuid() == 0 else "needs root"


def _needs_memory_groups() -> str:
    return "" if os.access(MEMORY_GROUPS, os.W_OK) else "needs control groups for memory (version 1)"


def _moment(scene: Scene) -> None:
    """A random step of the job, late enough that something was recorded."""
    scene.wait_for_step(scene.chance.randrange(10, STEPS - 40))
    time.sleep(scene.chance.uniform(0.0, 0.05))
    scene.copy_folders()


def _nothing(scene: Scene) -> None:
    _moment(scene)


# Processes


def _any_rank(scene: Scene) -> int:
    return scene.rank_pid(scene.chance.randrange(WORLD_SIZE))


def _kill_rank(scene: Scene) -> None:
    _moment(scene)
    os.kill(_any_rank(scene), signal.SIGKILL)


def _kill_all_ranks(scene: Scene) -> None:
    """As at the end of a node's time in a queue."""
    _moment(scene)
    for rank in range(WORLD_SIZE):
        os.kill(scene.rank_pid(rank), signal.SIGKILL)


def _pause(scene: Scene, pids: list[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(scene.chance.uniform(*PAUSE_SECONDS))
    for pid in pids:
        os.kill(pid, signal.SIGCONT)


def _pause_rank(scene: Scene) -> None:
    _moment(scene)
    _pause(scene, [_any_rank(scene)])


def _pause_launcher(scene: Scene) -> None:
    _moment(scene)
    _pause(scene, [scene.launches[0].pid])


def _stop_rank(scene: Scene) -> None:
    _moment(scene)
    os.kill(_any_rank(scene), signal.SIGSTOP)


def _short_hang_timeout(scene: Scene) -> None:
    scene.options += ["--hang-timeout", "5"]


def _kill_launcher(scene: Scene) -> None:
    _moment(scene)
    os.kill(scene.launches[0].pid, signal.SIGKILL)


def _terminate_launcher(scene: Scene) -> None:
    _moment(scene)
    os.kill(scene.launches[0].pid, signal.SIGTERM)


def _limit_memory(scene: Scene) -> None:
    """A rank whose memory grows, in a control group of its own: the kernel kills it."""
    _moment(scene)
    rank = scene.chance.randrange(WORLD_SIZE)
    group = MEMORY_GROUPS / f"chaos-{os.getpid()}-{scene.folder.name}"
    group.mkdir()
    scene.cleanups.callback(_remove_group, group)
    (group / "memory.limit_in_bytes").write_text(str(MEMORY_BYTES))
    (group / "cgroup.procs").write_text(str(scene.rank_pid(rank)))
    (scene.state / f"leak-{rank}").touch()


def _remove_group(group: Path) -> None:
    # The kernel needs a moment after its last process.
    for _ in range(50):
        try:
            group.rmdir()
            return
        except OSError:
            time.sleep(0.1)


# The run folder and its disk


def _small_disk(scene: Scene) -> None:
    _mount(scene, f"size={scene.chance.choice((16, 20, 24))}k")


def _own_disk(scene: Scene) -> None:
    _mount(scene, "size=16m")


def _mount(scene: Scene, option: str) -> None:
    disk = scene.run_dir.parent
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"{option},mode=700", "tmpfs", str(disk)], check=True)
    scene.cleanups.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)


def _fill_disk(scene: Scene) -> None:
    """Another program fills the disk."""
    _moment(scene)
    with open(scene.run_dir.parent / "filler", "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


def _limit_file_sizes(scene: Scene) -> None:
    _moment(scene)
    for rank in range(WORLD_SIZE):
        sizes = [path.stat().st_size for path in scene.run_dir.glob(f"rank-{rank:05d}*")]
        limit = max(sizes, default=0) + 200
        resource.prlimit(scene.rank_pid(rank), resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def _with_quota(scene: Scene) -> None:
    scene.env |= {
        "CHAOS_FOLDER": str(scene.run_dir.parent),
        "CHAOS_QUOTA_FILE": str(scene.folder / "exceeded"),
    }


def _exceed_quota(scene: Scene) -> None:
    _moment(scene)
    (scene.folder / "exceeded").touch()


def _make_read_only(scene: Scene) -> None:
    _moment(scene)
    disk = scene.run_dir.parent
    # A file that is open for writing keeps a file system writable; a bind mount changes the path only.
    subprocess.run(["mount", "--bind", str(disk), str(disk)], check=True)
    scene.cleanups.callback(subprocess.run, ["umount", "--lazy", str(disk)], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", str(disk)], check=True)


def _remove_folder(scene: Scene) -> None:
    _moment(scene)
    # Files may appear while it is removed.
    shutil.rmtree(scene.run_dir, ignore_errors=True)
    shutil.rmtree(scene.run_dir, ignore_errors=True)


def _replace_folder(scene: Scene) -> None:
    _moment(scene)
    scene.run_dir.rename(scene.run_dir.with_name("moved"))
    scene.run_dir.write_text("a file in place of the run folder\n")


def _late_writes(scene: Scene) -> None:
    scene.env |= {"CHAOS_FOLDER": str(scene.run_dir.parent), "CHAOS_WRITE_MS": "200"}


# The clock


def _steppable_clock(scene: Scene) -> None:
    scene.env |= {
        "CHAOS_CLOCK_FILE": str(scene.folder / "stepped"),
        "CHAOS_CLOCK_SECONDS": str(scene.chance.choice((-5, 5))),
    }


def _step_clock(scene: Scene) -> None:
    _moment(scene)
    (scene.folder / "stepped").touch()


# Nodes


def _shared_or_own_folders(scene: Scene) -> None:
    scene.shared_folder = scene.chance.random() < 0.5


def _kill_node(scene: Scene) -> None:
    """The node that does not hold the store."""
    _moment(scene)
    _kill_all_of(scene, 1)


def _kill_store_host(scene: Scene) -> None:
    _moment(scene)
    _kill_all_of(scene, 0)


def _kill_all_of(scene: Scene, node: int) -> None:
    scene.launches[node].gone = True
    for pid in scene.of_node(node):
        os.kill(pid, signal.SIGKILL)


def _pause_node(scene: Scene) -> None:
    _moment(scene)
    _pause(scene, scene.of_node(scene.chance.randrange(WORLD_SIZE)))


def _cut_store_host_off(scene: Scene) -> None:
    _moment(scene)
    assert scene.lab is not None
    command = ["ip", "-n", scene.lab[0].namespace, "link", "set", "eth0", "down"]
    subprocess.run(command, check=True)


DIED = frozenset({"DDP602"})
# Records are missing; therefore not everything was compared.
LOST = frozenset({"DDP605", "DDP606"})
# The job ended with its own status, or ddpcheck did not see everything.
INCOMPLETE = frozenset({10})
# A rank that waits for one that is paused.
WAITED = frozenset({"DDP402"})

FAULTS = (
    Fault("none", "no fault", Effect.NONE, _nothing),
    Fault(
        "rank-killed",
        "SIGKILL of a rank",
        Effect.ENDS_JOB,
        _kill_rank,
        codes=DIED,
        statuses=frozenset({1}),
    ),
    Fault(
        "ranks-killed",
        "SIGKILL of all ranks",
        Effect.ENDS_JOB,
        _kill_all_ranks,
        codes=DIED,
        statuses=frozenset({1}),
    ),
    Fault("rank-paused", "SIGSTOP of a rank for up to 4 s", Effect.NONE, _pause_rank, also=WAITED),
    Fault(
        "rank-stopped",
        "SIGSTOP of a rank for good",
        Effect.ENDS_JOB,
        _stop_rank,
        _short_hang_timeout,
        # A stopped process may be continued, so ddpcheck leaves it alone; the job's own time limit ends it.
        codes=frozenset({"DDP602", "DDP603"}),
        also=frozenset({"DDP602", "DDP603"}),
        statuses=frozenset({1, 10}),
    ),
    Fault("launcher-paused", "SIGSTOP of the launcher for up to 4 s", Effect.NONE, _pause_launcher),
    Fault(
        "launcher-killed",
        "SIGKILL of the launcher",
        Effect.NONE,
        _kill_launcher,
        reports=False,
        statuses=frozenset({-signal.SIGKILL}),
    ),
    Fault(
        "launcher-terminated",
        "SIGTERM of the launcher",
        Effect.ENDS_JOB,
        _terminate_launcher,
        also=DIED,
        # The helper of the tests that stands for the job ends with 1 if the job was killed before it could say how.
        statuses=frozenset({-signal.SIGTERM, 1}),
    ),
    Fault(
        "memory-limit",
        "memory limit of a control group, reached by a rank",
        Effect.ENDS_JOB,
        _limit_memory,
        codes=DIED,
        also=frozenset({"DDP501"}),
        statuses=frozenset({1}),
        missing=_needs_memory_groups,
    ),
    Fault(
        "small-disk",
        "disk of 16 to 24 KiB",
        Effect.NONE,
        _nothing,
        _small_disk,
        reports=False,
        codes=LOST,
        also=LOST,
        statuses=INCOMPLETE,
        missing=_needs_root,
    ),
    Fault(
        "disk-filled",
        "disk filled by another program",
        Effect.NONE,
        _fill_disk,
        _own_disk,
        reports=False,
        codes=LOST,
        also=LOST,
        statuses=INCOMPLETE,
        missing=_needs_root,
    ),
    Fault(
        "quota",
        "quota exceeded (EDQUOT)",
        Effect.NONE,
        _exceed_quota,
        _with_quota,
        reports=False,
        codes=LOST,
        also=LOST,
        statuses=INCOMPLETE,
        missing=missing_library,
    ),
    Fault(
        "file-size-limit",
        "files of the ranks cannot grow (EFBIG)",
        Effect.NONE,
        _limit_file_sizes,
        codes=LOST,
        also=LOST,
        statuses=INCOMPLETE,
    ),
    Fault(
        "read-only",
        "run folder becomes read-only",
        Effect.NONE,
        _make_read_only,
        _own_disk,
        reports=False,
        also=LOST,
        statuses=frozenset({0, 10}),
        missing=_needs_root,
    ),
    Fault(
        "folder-removed",
        "run folder removed",
        Effect.NONE,
        _remove_folder,
        keeps_records=False,
        reports=False,
        also=DIED | LOST | {"DDP601"},
        statuses=frozenset({1, 10}),
    ),
    Fault(
        "folder-replaced",
        "run folder moved away, a file in its place",
        Effect.NONE,
        _replace_folder,
        keeps_records=False,
        reports=False,
        statuses=frozenset({1}),
    ),
    Fault(
        "late-writes",
        "each write takes 200 ms",
        Effect.NONE,
        _nothing,
        _late_writes,
        missing=missing_library,
    ),
    Fault(
        "clock-stepped",
        "wall clock stepped by 5 s, forwards or back",
        Effect.NONE,
        _step_clock,
        _steppable_clock,
        missing=missing_library,
    ),
    Fault(
        "node-killed",
        "SIGKILL of a whole node",
        Effect.ENDS_JOB,
        _kill_node,
        _shared_or_own_folders,
        codes=DIED,
        also=frozenset({"DDP601", "DDP606"}),
        statuses=frozenset({1}),
        on_nodes=True,
        missing=missing_lab,
    ),
    Fault(
        "store-host-killed",
        "SIGKILL of the node that holds the job's store",
        Effect.ENDS_JOB,
        _kill_store_host,
        _shared_or_own_folders,
        codes=DIED,
        also=frozenset({"DDP601", "DDP606"}),
        statuses=frozenset({1}),
        on_nodes=True,
        missing=missing_lab,
    ),
    Fault(
        "store-host-cut-off",
        "network of the store's node down",
        Effect.ENDS_JOB,
        _cut_store_host_off,
        _shared_or_own_folders,
        codes=DIED,
        also=frozenset({"DDP601", "DDP606"}),
        statuses=frozenset({1}),
        on_nodes=True,
        missing=missing_lab,
    ),
    Fault(
        "node-paused",
        "SIGSTOP of a whole node for up to 4 s",
        Effect.NONE,
        _pause_node,
        _shared_or_own_folders,
        also=WAITED,
        on_nodes=True,
        missing=missing_lab,
    ),
)
