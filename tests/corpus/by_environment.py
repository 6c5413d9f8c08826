"""Starts one `python script` a rank, as a shell script or a scheduler does: who it is, each is told by variables.

python by_environment.py RANKS SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import subprocess
import sys

from free_port import free_port


def start(rank: int, ranks: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
    told = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in told.items()}}
    return subprocess.Popen([sys.executable, *command], env=environment)


def main() -> None:
    ranks, command, port = int(sys.argv[1]), sys.argv[2:], free_port()
    started = [start(rank, ranks, port, command) for rank in range(ranks)]
    sys.exit(max(abs(process.wait()) for process in started))


if __name__ == "__main__":
    main()
