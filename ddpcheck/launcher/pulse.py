"""A file that changes as long as a node is at work on the report of all: the others wait for it."""

from __future__ import annotations

import contextlib
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


class Pulse:
    """Seen from another node, whose clock may be another one: what counts is that it changes."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._last = self._read()

    def has_moved(self) -> bool:
        """Since it was last asked."""
        before, self._last = self._last, self._read()
        return bool(self._last) and self._last != before

    def _read(self) -> str:
        try:
            return self._path.read_text()
        except OSError:
            return ""
