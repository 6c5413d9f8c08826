"""One host of a lab: runs commands under its own name, with its own network and its own folder."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.helpers.fork_server import prefix
from tests.lab.network import limit

# Sets the host name, then runs the command.
_NAMED = 'hostname "$0" && exec "$@"'


@dataclass
class Host:
    """A network namespace with a name."""

    name: str
    address: str
    folder: Path
    namespace: str
    switch: str
    port: str
    _started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, command: Sequence[object], env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        """Start a command on this host, in its folder, with pipes for its output."""
        environ = dict(os.environ if env is None else env)
        environ.setdefault("GLOO_SOCKET_IFNAME", "eth0")
        process = subprocess.Popen(
            [*self._prefix(), *map(str, (*prefix(command), *command))],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._started.append(process)
        return process

    def run(self, command: Sequence[object], seconds: float = 180.0) -> subprocess.CompletedProcess[str]:
        """Run a command on this host to its end."""
        process = self.start(command)
        try:
            stdout, stderr = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    def limit_sending(self, megabits: float | None) -> None:
        """Limit what this host sends; None: no limit."""
        limit(self.namespace, "eth0", megabits)

    def limit_receiving(self, megabits: float | None) -> None:
        """Limit what this host receives."""
        limit(self.switch, self.port, megabits)

    def limit_link(self, megabits: float | None) -> None:
        """Limit the host's link in both directions."""
        self.limit_sending(megabits)
        self.limit_receiving(megabits)

    def forget_processes(self) -> None:
        """After the namespace is removed: close the pipes and wait for killed processes."""
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()

    def _prefix(self) -> list[str]:
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", _NAMED, self.name]
