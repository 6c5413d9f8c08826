"""Bytes, errors and drops of every network interface, as the kernel counts them."""

from __future__ import annotations

from ddpcheck.sampling.counters import Totals

# /proc/net is that of the process: each launcher sees the network namespace that it runs in.
_COUNTERS = "/proc/self/net/dev"
# Of the columns behind an interface's name: bytes, packets, errs, drop, … received and then the same sent.
_COLUMNS = {
    "received": 0,
    "sent": 8,
    "receive_errors": 2,
    "send_errors": 10,
    "receive_drops": 3,
    "send_drops": 11,
}
NAMES = tuple(_COLUMNS)

Reading = dict[str, list[int]]


class Interfaces:
    """Totals since the first reading, in the order of `NAMES`."""

    def __init__(self) -> None:
        self._totals = Totals()

    def read(self) -> Reading:
        return {
            name: [
                self._totals.add((name, column), value) for column, value in zip(NAMES, values, strict=True)
            ]
            for name, values in parse(counters_text()).items()
        }


def parse(text: str) -> Reading:
    """The counters by interface; lines of another shape are passed over."""
    found: Reading = {}
    for line in text.splitlines():
        name, colon, numbers = line.partition(":")
        columns = numbers.split()
        if colon and len(columns) >= 16 and all(column.isdigit() for column in columns):
            found[name.strip()] = [int(columns[place]) for place in _COLUMNS.values()]
    return found


def counters_text() -> str:
    try:
        with open(_COUNTERS) as file:
            return file.read()
    except OSError:
        return ""
