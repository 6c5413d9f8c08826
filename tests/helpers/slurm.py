"""A Slurm cluster of two nodes on this machine, from the installed packages, with daemons and files of its own."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.corpus.free_port import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "sinfo")
_SEARCH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"])
_START_SECONDS = 60.0

_CONFIGURATION = """\
ClusterName=ddpcheck
SlurmctldHost={host}
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that is requeued starts again when its credential has expired.
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
KillWait=10
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=2 RealMemory=500
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=2 RealMemory=500
PartitionName=all Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
"""


def why_not() -> str:
    """Why no cluster can be started here; empty if one can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=_SEARCH) is None]
    if missing:
        return (
            f"Slurm is not installed: no {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)"
        )
    return "" if os.getuid() == 0 else "Slurm's daemons need root"


@contextmanager
def slurm_cluster() -> Iterator[dict[str, str]]:
    """Starts the daemons. Yields the variables that srun, sbatch and scancel need."""
    # A short path: that of munge's socket is limited.
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    folder.chmod(0o755)
    try:
        yield _start(folder)
    finally:
        _stop(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _start(folder: Path) -> dict[str, str]:
    for name in ("state", "munge"):
        (folder / name).mkdir(mode=0o755)
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(1024))
    munge = folder / "munge"
    files = [f"--{name}={munge / part}" for name, part in _MUNGE_FILES.items()]
    _run("munged", f"--key-file={key}", *files, "--force")
    host = os.uname().nodename.partition(".")[0]
    configuration = folder / "slurm.conf"
    ports = [free_port() for _ in range(3)]
    configuration.write_text(_CONFIGURATION.format(host=host, folder=folder, ports=ports))
    _run("slurmctld", "-f", configuration)
    for node in ("n1", "n2"):
        _run("slurmd", "-N", node, "-f", configuration)
    environ = {"SLURM_CONF": str(configuration)}
    _wait_for_nodes(environ)
    return environ


_MUNGE_FILES = {"socket": "socket", "pid-file": "munged.pid", "log-file": "log", "seed-file": "seed"}


def _run(name: str, *arguments: object) -> None:
    program = shutil.which(name, path=_SEARCH)
    subprocess.run([str(program), *map(str, arguments)], check=True, capture_output=True)


def _wait_for_nodes(environ: dict[str, str]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    command = ["sinfo", "--noheader", "--format=%D %t"]
    while time.monotonic() < deadline:
        done = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True)
        if done.stdout.strip() == "2 idle":
            return
        time.sleep(0.2)
    raise RuntimeError(f"the nodes of Slurm are not ready: {done.stdout}{done.stderr}")


def _stop(folder: Path) -> None:
    for path in [*folder.glob("slurm*.pid"), folder / "munge" / "munged.pid"]:
        with suppress(OSError, ValueError):
            os.kill(int(path.read_text()), signal.SIGTERM)
    # They write to the folder until they have ended.
    deadline = time.monotonic() + _START_SECONDS
    while any(folder.glob("slurm*.pid")) and time.monotonic() < deadline:
        time.sleep(0.1)
