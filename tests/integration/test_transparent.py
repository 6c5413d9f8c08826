"""A command must behave the same under ddpcheck: signals, terminal, environment, output and exit status."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ddpcheck.config import Config
from ddpcheck.launcher.process.command import command_environment
from ddpcheck.launcher.process.process_table import read_process
from tests.helpers.paths import ROOT

# Supervises a command as `ddpcheck run` does, without the report.
DRIVER = """
import os, sys
sys.path.insert(0, {root!r})
from ddpcheck.config import Config
from ddpcheck.errors import CommandNotStarted
from ddpcheck.launcher.process.command import command_environment
from ddpcheck.records.node_log import NodeLog
from ddpcheck.launcher.process.command import exit_like
from ddpcheck.launcher.process.supervise import StopRequest, supervise
from ddpcheck.launcher.process import supervise as supervision
if os.environ.get("TEST_HURRY"):
    supervision.STOP_SECONDS = supervision.GRACE_SECONDS = supervision.TERM_SECONDS = 0.5
run_dir, stop, *command = sys.argv[1:]
def on_tick():
    if stop == "raise":
        raise RuntimeError("tick")
    return StopRequest("test") if stop != "-" and os.path.exists(stop) else None
log = NodeLog(run_dir, host="here")
try:
    environ = command_environment(Config(run_dir=run_dir, run_id="test"))
    status = supervise(command, environ, on_tick=on_tick, node_log=log)
except CommandNotStarted as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_status)
log.write("driver", interrupted=status.interrupted, stop_reason=status.stop_reason)
exit_like(status)
"""


def wrapped(run_dir: Path, command: Sequence[str], stop: str = "-") -> list[str]:
    return [sys.executable, "-c", DRIVER.format(root=str(ROOT)), str(run_dir), stop, *command]


def script(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def log_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "node-here.jsonl").read_text().splitlines()]


def kinds(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in log_of(run_dir) if record["kind"] == kind]


def wait_for(condition: Callable[[], Any], seconds: float = 120.0) -> Any:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        result = condition()
        if result:
            return result
        time.sleep(0.01)
    raise AssertionError("the condition did not become true")


def both(tmp_path: Path, command: Sequence[str], **options: Any) -> list[subprocess.CompletedProcess[bytes]]:
    return [
        subprocess.run(argv, capture_output=True, timeout=300, **options)
        for argv in (list(command), wrapped(tmp_path, command))
    ]


# Writes the name of each signal it receives to a file; exits on SIGUSR2.
LISTENER = """
import os, signal, sys, time
path, ignored = sys.argv[1], sys.argv[2].split(",")
out = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def receive(number, frame):
    os.write(out, (signal.Signals(number).name + "\\n").encode())
    if number == signal.SIGUSR2:
        sys.exit(0)
for name in "INT TERM HUP QUIT USR1 USR2 WINCH CONT ALRM".split():
    signal.signal(getattr(signal, "SIG" + name), receive)
os.write(out, b"ready\\n")
while True:
    time.sleep(0.05)
"""


class Listener:
    """A process that records the signals it receives."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "received"
        self.command = [sys.executable, "-c", LISTENER, str(self.path), ""]

    def received(self) -> list[str]:
        return self.path.read_text().split()[1:] if self.path.exists() else []

    def wait_ready(self) -> None:
        wait_for(lambda: self.path.exists() and "ready" in self.path.read_text())


@pytest.mark.parametrize(
    "code",
    [
        "print('ä' * 70000); import sys; sys.stderr.write('err')",
        "import sys; sys.exit(1)",
        "import sys; sys.exit(3)",
        "raise ValueError('x')",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGINT); import time; time.sleep(5)",
        "import sys; sys.stdout.write(sys.stdin.read().upper())",
        "import os; os.close(1); os.close(2)",
    ],
)
def test_output_and_status(tmp_path: Path, code: str) -> None:
    plain, watched = both(tmp_path, script(code), input=b"one\ntwo \xc3\xa4\n" * 5000)
    assert watched.stdout == plain.stdout
    assert watched.stderr == plain.stderr
    assert watched.returncode == plain.returncode


def test_shell_sees_the_same_status(tmp_path: Path) -> None:
    for command in ("exit 7", "kill -9 $$", "kill -15 $$"):
        statuses = [
            subprocess.run(
                ["sh", "-c", '"$@"; echo $?', "sh", *argv], capture_output=True, text=True, timeout=300
            ).stdout
            for argv in (["sh", "-c", command], wrapped(tmp_path, ["sh", "-c", command]))
        ]
        assert statuses[0] == statuses[1]


# Prints everything a process inherits, which must be the same with and without ddpcheck.
INHERITED = """
import os, sys
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(*(status[key].strip() for key in ("SigBlk", "SigIgn", "Umask", "NoNewPrivs")))
print(os.getcwd(), os.getpgid(0) == os.getpgid(os.getppid()), os.getsid(0) == os.getsid(os.getppid()))
print([oct(os.fstat(n).st_mode) for n in (0, 1, 2)], sorted(os.listdir("/proc/self/fd")))
print(sys.path, sys.argv, sys.flags, [type(f).__name__ for f in sys.meta_path if "Ddp" not in str(type(f))])
print(sorted((k, v) for k, v in os.environ.items() if k not in ("PYTHONPATH", "DDPCHECK_CONFIG", "_")))
print("sitecustomize" in sys.modules, "torch" in sys.modules)
"""


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP,), (signal.SIGINT, signal.SIGQUIT)])
def test_inherits_everything(tmp_path: Path, ignored: Sequence[signal.Signals]) -> None:
    read_end, write_end = os.pipe()
    before = [signal.signal(number, signal.SIG_IGN) for number in ignored]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        # A shell reads SigIgn first, because Python changes it.
        shell = ["sh", "-c", 'grep -E "Sig(Blk|Ign)" /proc/self/status; "$@"', "sh", *script(INHERITED)]
        plain, watched = both(tmp_path, shell, cwd=tmp_path, pass_fds=[read_end], umask=0o027)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in zip(ignored, before, strict=True):
            signal.signal(number, handler)
        os.close(read_end)
        os.close(write_end)
    assert plain.returncode == 0, plain.stderr
    assert watched.stdout.decode().splitlines() == plain.stdout.decode().splitlines()


def test_direct_signals_are_forwarded_once(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    process = subprocess.Popen(wrapped(tmp_path, listener.command))
    listener.wait_ready()
    names = ["TERM", "HUP", "USR1", "WINCH", "QUIT", "CONT", "ALRM", "INT", "USR2"]
    for count, name in enumerate(names, 1):
        process.send_signal(getattr(signal, f"SIG{name}"))
        wait_for(lambda count=count: len(listener.received()) >= count)
    assert process.wait(120) == 0
    assert listener.received() == [f"SIG{name}" for name in names]
    assert all(record["forwarded"] for record in kinds(tmp_path, "signal"))


def test_group_signals_are_not_repeated(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    process = subprocess.Popen(wrapped(tmp_path, listener.command), start_new_session=True)
    listener.wait_ready()
    for count, name in enumerate(["TERM", "HUP", "USR1", "WINCH", "INT"], 1):
        os.killpg(process.pid, getattr(signal, f"SIG{name}"))
        wait_for(lambda count=count: len(kinds(tmp_path, "signal")) >= count)
    time.sleep(0.2)
    assert listener.received() == ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGWINCH", "SIGINT"]
    process.send_signal(signal.SIGUSR2)
    assert process.wait(120) == 0
    assert [record["forwarded"] for record in kinds(tmp_path, "signal")] == [False] * 5 + [True]


class Terminal:
    """A command as the foreground job of its own terminal."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.pid, self.master = pty.fork()
        if self.pid == 0:
            os.execv(argv[0], list(argv))
        self.shown = b""

    def press(self, key: bytes) -> None:
        os.write(self.master, key)

    def read_until(self, text: bytes, seconds: float = 120.0) -> None:
        wait_for(lambda: self._read() and text in self.shown, seconds)

    def status(self) -> int:
        status = wait_for(self._ended)
        os.close(self.master)
        return os.waitstatus_to_exitcode(status[1])

    def _ended(self) -> tuple[int, int] | None:
        self._read()
        result = os.waitpid(self.pid, os.WNOHANG)
        return result if result[0] else None

    def _read(self) -> bool:
        if select.select([self.master], [], [], 0)[0]:
            try:
                self.shown += os.read(self.master, 65536)
            except OSError:
                return False
        return True


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
class TestTerminal:
    """With a real pseudo-terminal, as at a prompt."""

    def test_ctrl_c_arrives_once_and_status_is_the_commands(self, tmp_path: Path) -> None:
        listener = Listener(tmp_path)
        terminal = Terminal(wrapped(tmp_path, listener.command))
        listener.wait_ready()
        terminal.press(b"\x03")
        wait_for(lambda: kinds(tmp_path, "signal"))
        time.sleep(0.2)
        assert listener.received() == ["SIGINT"]
        os.kill(terminal.pid, signal.SIGUSR2)
        assert terminal.status() == 0
        assert kinds(tmp_path, "driver")[0]["interrupted"]

    def test_ctrl_c_ends_python_as_without(self, tmp_path: Path) -> None:
        code = "import sys, time\nprint('tty', sys.stdin.isatty(), sys.stdout.isatty())\ntime.sleep(30)"
        ends = []
        for argv in (script(code), wrapped(tmp_path, script(code))):
            terminal = Terminal(argv)
            terminal.read_until(b"tty True True")
            time.sleep(0.1)
            terminal.press(b"\x03")
            ends.append((terminal.status(), terminal.shown))
        assert ends[0] == ends[1]
        assert ends[1][0] == -signal.SIGINT

    def test_second_ctrl_c_kills(self, tmp_path: Path) -> None:
        deaf = (
            "import os, signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\n"
            "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
            "if os.fork() == 0: os.setsid()\nprint(f'<{os.getpid()}>', flush=True)\ntime.sleep(60)"
        )
        terminal = Terminal(wrapped(tmp_path, script(deaf)))
        wait_for(lambda: terminal._read() and terminal.shown.count(b">") == 2)
        pids = [int(part.split(b">")[0]) for part in terminal.shown.split(b"<")[1:]]
        terminal.press(b"\x03")
        wait_for(lambda: kinds(tmp_path, "signal"))
        time.sleep(0.4)
        assert all(is_alive(pid) for pid in pids)
        terminal.press(b"\x03")
        assert terminal.status() == -signal.SIGKILL
        assert not any(is_alive(pid) for pid in pids)

    def test_ctrl_z_stops_and_continues(self, tmp_path: Path) -> None:
        # Under a shell with job control: the kernel does not stop a process group that no shell could continue.
        listener = Listener(tmp_path)
        terminal = Terminal(["/bin/bash", "--norc", "--noprofile", "-i"])
        run = tmp_path / "run.sh"
        quoted = " ".join(f"'{part}'" for part in wrapped(tmp_path, listener.command)[:1])
        driver = tmp_path / "driver.py"
        driver.write_text(DRIVER.format(root=str(ROOT)))
        listening = tmp_path / "listener.py"
        listening.write_text(LISTENER)
        run.write_text(
            f"exec {quoted} {driver} {tmp_path} - {sys.executable} {listening} {listener.path} x\n"
        )
        terminal.press(f"bash {run}\n".encode())
        listener.wait_ready()
        pid = kinds(tmp_path, "node")[0]["command_pid"]
        wrapper = kinds(tmp_path, "node")[0]["pid"]
        terminal.press(b"\x1a")
        terminal.read_until(b"Stopped")
        wait_for(lambda: state(pid) == "T" and state(wrapper) == "T")
        terminal.press(b"fg\n")
        wait_for(lambda: listener.received() == ["SIGCONT"])
        wait_for(lambda: state(wrapper) != "T")
        # Stopping ddpcheck alone stops the command too.
        os.kill(wrapper, signal.SIGTSTP)
        wait_for(lambda: state(pid) == "T" and state(wrapper) == "T")
        os.kill(wrapper, signal.SIGCONT)
        wait_for(lambda: listener.received() == ["SIGCONT", "SIGCONT"])
        terminal.press(b"\nfg\n")
        os.kill(pid, signal.SIGUSR2)
        wait_for(lambda: kinds(tmp_path, "command_exit"))
        terminal.press(b"\nexit\nexit\n")
        terminal.status()


def state(pid: int) -> str:
    process = read_process(pid)
    return "" if process is None else process.state


def is_alive(pid: int) -> bool:
    return state(pid) not in {"", "Z"}


def test_no_process_outlives_the_run(tmp_path: Path) -> None:
    code = (
        "import os, subprocess, sys\n"
        "kid = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "print(*(subprocess.Popen(kid, start_new_session=s).pid for s in (0, 1)), flush=True)\n"
        "os._exit(4)"
    )
    done = subprocess.run(
        wrapped(tmp_path, script(code)),
        stdout=subprocess.PIPE,
        timeout=300,
        env={**os.environ, "TEST_HURRY": "1"},
    )
    assert done.returncode == 4
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert {entry["pid"] for entry in kinds(tmp_path, "leftover")[0]["processes"]} == set(pids)


def test_orphans_are_reaped_while_the_command_runs(tmp_path: Path) -> None:
    code = (
        "import os, time\n"
        "for _ in range(5):\n"
        "    if os.fork() == 0:\n"
        "        if os.fork() == 0: os._exit(9)\n"
        "        os._exit(0)\n"
        "    os.wait()\n"
        "parent = os.getppid()\n"
        "def zombies():\n"
        "    found = 0\n"
        "    for pid in filter(str.isdigit, os.listdir('/proc')):\n"
        "        try:\n"
        "            with open(f'/proc/{pid}/stat') as file: row = file.read().rpartition(')')[2].split()\n"
        "        except OSError:\n"
        "            continue\n"
        "        found += row[0] == 'Z' and row[1] == str(parent)\n"
        "    return found\n"
        "end = time.monotonic() + 10\n"
        "time.sleep(1)\n"
        "while zombies() and time.monotonic() < end: time.sleep(0.1)\n"
        "os._exit(6 if not zombies() else 1)"
    )
    assert subprocess.run(wrapped(tmp_path, script(code)), timeout=300).returncode == 6


def test_stop_request_ends_the_job(tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    listener = Listener(tmp_path)
    process = subprocess.Popen(
        wrapped(tmp_path, ["sh", "-c", '"$@" & wait', "sh", *listener.command], stop=str(flag)),
        env={**os.environ, "TEST_HURRY": "1"},
    )
    listener.wait_ready()
    flag.touch()
    process.wait(120)
    assert process.returncode == -signal.SIGTERM
    assert kinds(tmp_path, "driver")[0]["stop_reason"] == "test"
    assert "SIGTERM" in listener.received()
    assert kinds(tmp_path, "leftover")


def test_stopped_job_that_will_not_end_is_killed(tmp_path: Path) -> None:
    flag = tmp_path / "stop"
    listener = Listener(tmp_path)
    process = subprocess.Popen(
        wrapped(tmp_path, listener.command, stop=str(flag)), env={**os.environ, "TEST_HURRY": "1"}
    )
    listener.wait_ready()
    flag.touch()
    assert process.wait(120) == -signal.SIGKILL
    assert listener.received() == ["SIGTERM", "SIGCONT"]
    assert kinds(tmp_path, "stop")[0]["reason"] == "test"


def test_failing_tick_is_noted_once(tmp_path: Path) -> None:
    done = subprocess.run(wrapped(tmp_path, ["sleep", "0.5"], stop="raise"), timeout=300, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert len(kinds(tmp_path, "fault")) == 1


def test_command_that_cannot_start(tmp_path: Path) -> None:
    plain = tmp_path / "plain.txt"
    plain.write_text("hello")
    bad = tmp_path / "bad"
    bad.write_text("#!/no/such/interpreter\n")
    bad.chmod(0o755)
    headless = tmp_path / "headless"
    headless.write_text("echo started $1\n")
    headless.chmod(0o755)
    for command, status in (("no-such-command", 127), (str(plain), 126), ("/", 126), (str(bad), 126)):
        done = subprocess.run(wrapped(tmp_path, [command]), capture_output=True, text=True, timeout=300)
        assert done.returncode == status
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert command in done.stderr
    done = subprocess.run(
        wrapped(tmp_path, [str(headless), "x"]), capture_output=True, text=True, timeout=300
    )
    assert done.stdout == "started x\n"


def shown(stderr: str) -> str:
    """The last line of a traceback: its frames include the injected file."""
    return stderr.splitlines()[-1] if "Traceback" in stderr else stderr


class TestSitecustomize:
    """The `sitecustomize` that `ddpcheck run` injects before the user's own."""

    def environ(self, run_dir: Path, python_path: str = "") -> dict[str, str]:
        plain = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH"}}
        if python_path:
            plain["PYTHONPATH"] = python_path
        return command_environment(Config(run_dir=str(run_dir), run_id="test"), plain)

    def compare(self, tmp_path: Path, own: str | None, code: str, *flags: str) -> None:
        folder = tmp_path / "own"
        folder.mkdir()
        if own is not None:
            (folder / "sitecustomize.py").write_text(own)
        results = []
        for environ in (
            {**os.environ, "PYTHONPATH": str(folder)},
            self.environ(tmp_path, str(folder)),
        ):
            argv = [sys.executable, *flags, "-c", code]
            results.append(subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=300))
        plain, watched = [(done.returncode, done.stdout, shown(done.stderr)) for done in results]
        assert watched == plain

    @pytest.mark.parametrize(
        "own",
        [
            "import sys; sys.mark = __name__, __file__, __spec__.name, sys.modules[__name__].__file__",
            "raise ValueError('broken')",
            "import no_such_module",
            "raise ImportError('odd')",
            "raise SystemExit(5)",
            "import sys; sys.modules.pop('sitecustomize')",
            "def f(:",
            None,
        ],
    )
    def test_the_shadowed_sitecustomize_runs_as_without(self, tmp_path: Path, own: str | None) -> None:
        code = (
            "import sys; print(getattr(sys, 'mark', None), sys.path, 'sitecustomize' in sys.modules)\n"
            "m = sys.modules.get('sitecustomize'); print(m, m and m.__dict__.keys())"
        )
        self.compare(tmp_path, own, code)

    @pytest.mark.parametrize("flag", ["-S", "-I", "-E", "-s", "-O", "-B"])
    def test_flags(self, tmp_path: Path, flag: str) -> None:
        self.compare(tmp_path, "print('mine')", "import sys; print('ran', sys.flags)", flag)

    def test_children_are_reached(self, tmp_path: Path) -> None:
        code = (
            "import subprocess, sys\n"
            'seen = \'import sys; print("ddpcheck.injection" in sys.modules, "torch" in sys.modules)\'\n'
            "subprocess.run([sys.executable, '-c', seen])\n"
        )
        done = subprocess.run(
            script(code), env=self.environ(tmp_path), capture_output=True, text=True, timeout=300
        )
        assert done.stdout == "True False\n"

    def test_without_configuration_nothing_is_loaded(self, tmp_path: Path) -> None:
        environ = self.environ(tmp_path)
        del environ["DDPCHECK_CONFIG"]
        code = "import sys; print([m for m in sys.modules if m.split('.')[0] == 'ddpcheck'])"
        done = subprocess.run(script(code), env=environ, capture_output=True, text=True, timeout=300)
        assert done.stdout == "[]\n"
