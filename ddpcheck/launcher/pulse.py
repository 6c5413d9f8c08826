"""A file that changes as long as a node is at work on the report of all: the others wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path

FILE = "reporting"
SECONDS = 5.0


@contextlib.contextmanager
def beating(folder: Path) -> Iterator[None]:
    """While the report is made; the file is gone afterwards. A full disk costs only this."""
    over = threading.Event()
    thread = threading.Thread(target=_beat, args=(folder / FILE, over), name="ddpcheck-pulse", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(SECONDS)
        with contextlib.suppress(OSError):
            (folder / FILE).unlink(missing_ok=True)


def _beat(path: Path, over: threading.Event) -> None:
    number = 0
    while True:
        with contextlib.suppress(OSError):
            path.write_text(f"{number}\n")
        number += 1
        if over.wait(SECONDS):
            return


def claim(folder: Path) -> bool:
    """Whether this node is the one to step in for the one that should have reported: of hundreds only one is to."""
    try:
        with (folder / FILE).open("x") as file:
            file.write(f"{os.uname().nodename} {os.getpid()}\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # where nothing can be written nobody else can tell either
    return True


class Pulse:
    """Seen from another node, whose clock may be another one: what counts is that it changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._last = self._read()

    def has_moved(self) -> bool:
        """Since it was last asked."""
        before, self._last = self._last, self._read()
        return bool(self._last) and self._last != before

    def give_up(self) -> None:
        """It stood still: whoever left it there is gone."""
        with contextlib.suppress(OSError):
            if self._last and self._read() == self._last:
                self._path.unlink(missing_ok=True)

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return ""
