"""What remains of a job after its command has ended."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.helpers.paths import ROOT

# The terminator ends all descendants of its process, so it has a process of its own. The first thread of the child
# ends while another one runs: the child is a zombie that cannot be reaped.
HALF_ENDED = """
import ctypes, json, os, platform, threading, time
from ddpcheck.launcher.process.process_table import read_process
from ddpcheck.launcher.process.supervise import OrphanTerminator, ZombieReaper

class Log:
    def write(self, kind, **fields):
        written.append((kind, fields["action"]))

written = []
child = os.fork()
if child == 0:
    threading.Thread(target=time.sleep, args=(60,)).start()
    ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)
while not read_process(child).is_gone:
    time.sleep(0.01)
terminator = OrphanTerminator([], ZombieReaper([]), Log(), grace=0.0)
at_once = terminator.advance()
terminator.kill_now()
while not terminator.advance():
    time.sleep(0.01)
print(json.dumps([at_once, read_process(child) is None, written]))
"""


def test_a_process_whose_first_thread_has_ended_is_not_left_running() -> None:
    done = subprocess.run(
        [sys.executable, "-c", HALF_ENDED], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    at_once, gone, written = json.loads(done.stdout)
    assert (at_once, gone, written) == (False, True, [])
