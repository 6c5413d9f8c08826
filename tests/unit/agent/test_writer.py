"""The writer keeps all records in order and never blocks training."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from ddpcheck.agent import writer as writer_module
from ddpcheck.agent.writer import RecordWriter
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import EndRecord, FaultRecord
from ddpcheck.records.reader import RecordFile
from ddpcheck.records.registry import RECENT_SUFFIX, Record, to_line

END = EndRecord("exit", 1.0)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "rank-00000.jsonl"


def records_in(path: Path) -> list[Record]:
    file = RecordFile(path)
    records: list[Record] = []
    while more := file.read():
        records += more
    assert file.bad == 0
    assert not file.torn
    return records


def test_all_records_are_in_order_after_close(path: Path) -> None:
    writer = RecordWriter(path)
    for step in range(4000):
        writer.write(JoinRecord(0, step))
    writer.close(END)
    assert records_in(path) == [*(JoinRecord(0, step) for step in range(4000)), END]
    assert not writer.failed
    assert writer.dropped == 0


def test_lines_of_several_threads_are_not_mixed(path: Path) -> None:
    writer = RecordWriter(path)

    def write(module: int) -> None:
        for step in range(500):
            writer.write(JoinRecord(module, step))

    threads = [threading.Thread(target=write, args=(module,)) for module in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close(END)
    joins = [record for record in records_in(path) if isinstance(record, JoinRecord)]
    assert len(joins) == 2000
    for module in range(4):
        assert [record.step for record in joins if record.module == module] == list(range(500))


def test_records_may_be_written_by_finalizers_in_the_thread_of_the_writer(path: Path) -> None:
    """Python runs finalizers in any thread and between any two calls, also while that thread waits for records."""
    writers: list[RecordWriter] = []
    written = 0

    def interrupt(frame: FrameType, event: str, argument: object) -> None:
        nonlocal written
        if writers and written < 500:
            writers[0].write(JoinRecord(1, written))
            written += 1

    threading.setprofile(interrupt)
    try:
        writers.append(RecordWriter(path))
    finally:
        threading.setprofile(None)

    def train() -> None:
        for step in range(200):
            writers[0].write(JoinRecord(0, step))
            time.sleep(0.001)
        writers[0].flush(seconds=10)
        writers[0].close(END)

    training = threading.Thread(target=train, daemon=True)
    training.start()
    training.join(60)
    assert not training.is_alive()
    joins = [record for record in records_in(path) if isinstance(record, JoinRecord)]
    assert [record.step for record in joins if record.module == 0] == list(range(200))
    assert [record.step for record in joins if record.module == 1] == list(range(written))
    assert written


def test_flushed_records_are_in_the_open_file(path: Path) -> None:
    writer = RecordWriter(path)
    writer.write(JoinRecord(0, 0))
    writer.flush(seconds=10)
    assert records_in(path) == [JoinRecord(0, 0)]
    writer.close(END)


def test_records_are_written_without_a_flush(path: Path) -> None:
    writer = RecordWriter(path)
    written: list[Record] = []
    deadline = time.monotonic() + 30
    for step in range(3):
        # The second record comes while the writer pauses, the third after that.
        writer.write(JoinRecord(0, step))
        while len(written) <= step and time.monotonic() < deadline:
            written = records_in(path)
    assert written == [JoinRecord(0, step) for step in range(3)]
    writer.close(END)


def test_record_that_cannot_be_encoded_is_reported(path: Path) -> None:
    writer = RecordWriter(path)
    writer.write(JoinRecord(0, object()))  # type: ignore[arg-type]
    writer.write(JoinRecord(0, 1))
    writer.close(END)
    fault, *rest = records_in(path)
    assert isinstance(fault, FaultRecord)
    assert (fault.probe, fault.entry, rest) == ("writer", JoinRecord.kind, [JoinRecord(0, 1), END])


def test_existing_file_is_not_overwritten(path: Path) -> None:
    path.write_text("mine")
    with pytest.raises(FileExistsError):
        RecordWriter(path)
    assert path.read_text() == "mine"


def test_file_is_private(path: Path) -> None:
    before = os.umask(0)
    try:
        writer = RecordWriter(path)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o600
    writer.close(END)


def test_descriptor_is_not_inherited(path: Path) -> None:
    writer = RecordWriter(path)
    assert not os.get_inheritable(writer._parts._fd)
    writer.close(END)


def test_write_error_stops_the_writer(path: Path) -> None:
    """Beyond the file size limit every write fails, as on a full disk."""
    program = f"""
import resource, signal, sys
from pathlib import Path
from ddpcheck.agent.writer import RecordWriter
from ddpcheck.records.kinds.modules import JoinRecord
from ddpcheck.records.kinds.rank import EndRecord

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
writer = RecordWriter(Path({str(path)!r}))
for step in range(1000):
    writer.write(JoinRecord(0, step))
writer.flush(10)
for step in range(1000):
    writer.write(JoinRecord(1, step))
writer.close(EndRecord("exit", 1.0))
print(writer.failed)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert done.stderr == ""
    assert done.stdout.strip() == f"File too large ({path})"
    file = RecordFile(path)
    read = file.read()
    assert read == [JoinRecord(0, step) for step in range(len(read))]
    assert read
    assert path.stat().st_size == 1000
    assert file.bad == 0


STEP = MemoryRecord(0, host=1)


def killed(path: Path, program: str) -> RecordFile:
    """The file of a process that writes step records and is killed."""
    head = f"""
import os, signal, time
from pathlib import Path
from ddpcheck.agent import writer as module
from ddpcheck.agent.writer import RecordWriter
from ddpcheck.records.kinds.memory import MemoryRecord
from ddpcheck.records.kinds.modules import JoinRecord

writer = RecordWriter(Path({str(path)!r}), block_seconds=1000.0)

def written():
    while writer._pending or writer._writing or writer._unsaved:
        time.sleep(0.001)

def kill(*_):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run(
        [sys.executable, "-c", head + program], stderr=subprocess.PIPE, text=True, timeout=300
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    return RecordFile(path)


def test_a_killed_rank_loses_no_record_of_the_block_it_collected(path: Path) -> None:
    file = killed(
        path,
        """
for step in range(30):
    writer.write(MemoryRecord(step))
    written()
kill()
""",
    )
    assert path.stat().st_size == 0
    assert list(file.all()) == [MemoryRecord(step) for step in range(30)]
    assert (file.bad, file.torn) == (0, False)


def test_a_rank_killed_after_a_block_has_its_records_once(path: Path) -> None:
    """Between the write of a block and the removal of its records from the other file."""
    file = killed(
        path,
        """
for step in range(30):
    writer.write(MemoryRecord(step))
    written()
module._RecentFile.clear = kill
writer.write(JoinRecord(0, 30))
time.sleep(100)
""",
    )
    assert path.with_suffix(RECENT_SUFFIX).stat().st_size > 0
    assert list(file.all()) == [*(MemoryRecord(step) for step in range(30)), JoinRecord(0, 30)]


def test_a_rank_killed_in_the_middle_of_a_block_loses_nothing_either(path: Path) -> None:
    file = killed(
        path,
        """
writer.write(JoinRecord(0, 0))
written()
for step in range(30):
    writer.write(MemoryRecord(step))
    written()
real = os.write

def torn(descriptor, data):
    real(descriptor, bytes(data)[: len(data) // 2])
    kill()

module.os.write = torn
writer.write(JoinRecord(0, 1))
time.sleep(100)
""",
    )
    assert list(file.all()) == [JoinRecord(0, 0), *(MemoryRecord(step) for step in range(30))]
    assert file.torn
    assert file.bad == 0


def test_a_killed_rank_with_several_blocks(path: Path) -> None:
    file = killed(
        path,
        """
for step in range(60):
    writer.write(MemoryRecord(step))
    written()
    if step in (20, 40):
        writer.write(JoinRecord(0, step))
        written()
kill()
""",
    )
    found = list(file.all())
    assert [record.step for record in found if isinstance(record, MemoryRecord)] == list(range(60))
    assert len(found) == 62
    assert path.stat().st_size > 0


@pytest.mark.parametrize("damage", [b"", b"{}\n", b'{"after": "0"}\n', b"\xff\n", b'{"after": 12345}\n'])
def test_recent_records_without_a_valid_size_are_not_read(path: Path, damage: bytes) -> None:
    path.write_bytes(to_line(STEP))
    path.with_suffix(RECENT_SUFFIX).write_bytes(damage + to_line(STEP))
    assert list(RecordFile(path).all()) == [STEP]


def test_a_rank_that_ends_leaves_one_file(path: Path) -> None:
    writer = RecordWriter(path, block_seconds=1000.0)
    writer.write(STEP)
    deadline = time.monotonic() + 120
    while not path.with_suffix(RECENT_SUFFIX).exists() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert path.with_suffix(RECENT_SUFFIX).stat().st_mode & 0o777 == 0o600
    writer.close(END)
    assert [each.name for each in path.parent.iterdir()] == [path.name]
    assert records_in(path) == [STEP, END]


def test_where_somebody_reads_along_there_is_no_second_file(path: Path) -> None:
    writer = RecordWriter(path, block_seconds=0.0)
    deadline = time.monotonic() + 120
    while not path.stat().st_size and time.monotonic() < deadline:
        writer.write(STEP)
        time.sleep(0.01)
    assert not path.with_suffix(RECENT_SUFFIX).exists()
    writer.close(END)


def test_no_space_left_stops_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    monkeypatch.setattr(writer_module.os, "open", lambda *_: full)
    writer = RecordWriter(tmp_path / "x")
    writer.write(JoinRecord(0, 0))
    writer.flush(10)
    assert "No space left on device" in writer.failed
    writer.close(END)


@pytest.fixture
def stalled(path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RecordWriter, threading.Event]]:
    """A writer whose writes block until the event is set."""
    go = threading.Event()
    real = os.write

    def slow(descriptor: int, data: bytes) -> int:
        go.wait(120)
        return real(descriptor, data)

    monkeypatch.setattr(writer_module.os, "write", slow)
    monkeypatch.setattr(writer_module, "MAX_PENDING", 200)
    writer = RecordWriter(path)
    yield writer, go
    go.set()
    writer._thread.join(30)


def test_stalled_disk_drops_records(path: Path, stalled: tuple[RecordWriter, threading.Event]) -> None:
    writer, go = stalled
    for step in range(2000):
        writer.write(JoinRecord(0, step))
    dropped = writer.dropped
    assert 0 < dropped < 2000
    assert len(writer._pending) <= 200
    go.set()
    writer.close(EndRecord("exit", 1.0, dropped=dropped))
    written = records_in(path)
    assert len(written) == 2000 - dropped + 1
    assert written[:-1] == [JoinRecord(0, step) for step in range(2000 - dropped)]


def test_close_gives_up_on_a_stalled_disk(
    stalled: tuple[RecordWriter, threading.Event],
) -> None:
    writer, _ = stalled
    writer.write(JoinRecord(0, 0))
    writer.close(END, seconds=0.05)
    assert writer._thread.is_alive()


def test_write_and_flush_after_close_have_no_effect(path: Path) -> None:
    writer = RecordWriter(path)
    writer.close(END)
    writer.write(JoinRecord(0, 0))
    flushed = threading.Event()
    waiter = threading.Thread(target=lambda: (writer.flush(seconds=20), flushed.set()))
    waiter.start()
    waiter.join(15)
    assert flushed.is_set()
    assert records_in(path) == [END]


def in_a_fork(body: object) -> int:
    """Run `body` in a forked child and return its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = 0 if body() else 2  # type: ignore[operator]
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# CPython 3.12 and later warn of forks in a process with threads; this test needs such a fork.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_child_does_not_write_to_the_file(path: Path) -> None:
    writer = RecordWriter(path)
    writer.write(JoinRecord(0, 0))
    writer.flush(10)

    def child() -> bool:
        writer.abandon()
        writer.write(JoinRecord(9, 9))
        writer.flush(1)
        writer.close(EndRecord("child", 1.0), seconds=0.1)
        return writer.failed == "forked"

    assert in_a_fork(child) == 0
    writer.write(JoinRecord(0, 1))
    writer.close(END)
    assert records_in(path) == [JoinRecord(0, 0), JoinRecord(0, 1), END]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_child_forked_after_close_closes_no_other_file(path: Path, tmp_path: Path) -> None:
    writer = RecordWriter(path)
    number = writer._parts._fd
    writer.close(END)
    reused = os.open(tmp_path / "other", os.O_RDWR | os.O_CREAT)
    assert reused == number

    def child() -> bool:
        writer.abandon()
        return os.write(reused, b"still open") == 10

    assert in_a_fork(child) == 0
    os.close(reused)
