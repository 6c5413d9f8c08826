"""Starts one `python script` per rank, as a shell script or a scheduler does, with RANK and WORLD_SIZE set.

python by_environment.py RANKS SCRIPT [ARGUMENTS]
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading

from free_port import free_port


def start(rank: int, ranks: int, port: int, command: list[str]) -> subprocess.Popen[bytes]:
    variables = {"RANK": rank, "WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    environment = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    return subprocess.Popen([sys.executable, *command], env=environment, stderr=subprocess.PIPE)


def forward_stderr(process: subprocess.Popen[bytes]) -> threading.Thread:
    """Copy stderr from a pipe: a rank with a limit on file sizes could not write to a file."""
    assert process.stderr is not None
    thread = threading.Thread(target=shutil.copyfileobj, args=(process.stderr, sys.stderr.buffer))
    thread.start()
    return thread


def main() -> None:
    ranks, command, port = int(sys.argv[1]), sys.argv[2:], free_port()
    started = [start(rank, ranks, port, command) for rank in range(ranks)]
    threads = [forward_stderr(process) for process in started]
    status = max(abs(process.wait()) for process in started)
    for thread in threads:
        thread.join()
    sys.exit(status)


if __name__ == "__main__":
    main()
