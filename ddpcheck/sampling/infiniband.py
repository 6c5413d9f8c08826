"""Bytes, errors and wait ticks of all InfiniBand ports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddpcheck.sampling.counters import CounterTotals

ROOT = Path("/sys/class/infiniband")
# The data counters count 4-byte words.
_WORD = 4
_ERRORS = ("symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_xmit_discards")
# Many drivers provide only 32 bits of this counter.
_WAIT, _WAIT_BITS = "port_xmit_wait", 32


class InfinibandPorts:
    """Totals since the first reading, by "device/port": received and sent bytes, errors, ticks waited."""

    def __init__(self, root: Path = ROOT) -> None:
        self._ports = {f"{port.parents[1].name}/{port.name}": port for port in sorted(root.glob("*/ports/*"))}
        self._totals = CounterTotals()

    def describe(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "speed": _speed(_text(port / "rate")),
                "state": _text(port / "state").partition(":")[2].strip(),
                "layer": _text(port / "link_layer"),
            }
            for name, port in self._ports.items()
        ]

    def read(self) -> dict[str, list[int]]:
        return {name: self._read(name, port / "counters") for name, port in self._ports.items()}

    def _read(self, name: str, counters: Path) -> list[int]:
        received = self._totals.add((name, "received"), _number(counters / "port_rcv_data"))
        sent = self._totals.add((name, "sent"), _number(counters / "port_xmit_data"))
        errors = sum(self._totals.add((name, error), _number(counters / error)) for error in _ERRORS)
        waited = self._totals.add((name, _WAIT), _number(counters / _WAIT), _WAIT_BITS)
        return [received * _WORD, sent * _WORD, errors, waited]


def _speed(rate: str) -> int | None:
    """In Mbit/s, from "100 Gb/sec (4X EDR)"."""
    number = rate.split(" ")[0]
    return int(float(number) * 1000) if number.replace(".", "", 1).isdigit() else None


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdigit() else 0


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
