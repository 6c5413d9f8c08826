"""One rank's clocks, step by step; of a long run every so-manieth step is kept."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from ddpcheck.records.kinds.timing import ClockRecord

# Steps that are kept. Beyond that every second one is let go, and the same ones on every rank.
MOST_STEPS, FEWEST_STEPS = 2048, 256
# Of all ranks together: with thousands of ranks each has fewer.
_STEPS_OF_ALL = 1 << 20

# What a step is made of, in the order of a bar. `wait` is for communication, `other` what nobody clocked.
PARTS = ("data", "forward", "backward", "optimizer", "other", "wait")
BUSY = PARTS[:-1]
COLUMNS = (*PARTS, "total", "watching", "queued", "faults", "kernel")


@dataclass
class StepTimeSeries:
    """Columns of microseconds, and one of page faults, all of one length."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    columns: dict[str, array[int]] = field(default_factory=lambda: {name: array("q") for name in COLUMNS})
    every: int = 1
    # Whether the parts are those of a device.
    device: bool = False
    ddp: dict[str, int] = field(default_factory=dict)
    most: int = MOST_STEPS

    @classmethod
    def one_of(cls, ranks: int) -> StepTimeSeries:
        return cls(most=max(FEWEST_STEPS, min(MOST_STEPS, _STEPS_OF_ALL // max(1, ranks))))

    def add(self, record: ClockRecord) -> None:
        if record.ddp:
            self.ddp = record.ddp
        if not record.total:
            return
        for number, row in enumerate(_rows(record)):
            step = record.step + number
            if row is not None and step % self.every == 0:
                self.steps.append(step)
                for name, value in row.items():
                    self.columns[name].append(value)
        self.device = self.device or bool(record.device)
        while len(self.steps) > self.most:
            self._thin_out()

    def shortest_wait(self) -> float | None:
        """For communication, in seconds. Steps without any do not count."""
        shortest = min((wait for wait in self.columns["wait"] if wait > 0), default=None)
        return None if shortest is None else shortest / 1e6

    def _thin_out(self) -> None:
        self.every *= 2
        kept = [place for place, step in enumerate(self.steps) if step % self.every == 0]
        self.steps = array("q", (self.steps[place] for place in kept))
        self.columns = {
            name: array("q", (column[place] for place in kept)) for name, column in self.columns.items()
        }


def _rows(record: ClockRecord) -> list[dict[str, int] | None]:
    """The parts of each step; None for one whose columns do not make sense or came too late."""
    host = [record.data, record.forward, record.backward, record.wait, record.optimizer]
    length = len(record.total)
    if any(len(column) != length for column in (*host, record.watching, record.queued)):
        return [None] * length
    # Records of earlier versions do not have them.
    if any(len(column) not in (0, length) for column in (record.faults, record.kernel)):
        return [None] * length
    device = record.device
    if any(len(column) != length for column in device.values()):
        return [None] * length
    return [
        _row(record, place, {name: column[place] for name, column in device.items()})
        for place in range(length)
    ]


def _row(record: ClockRecord, place: int, device: dict[str, int]) -> dict[str, int] | None:
    """On a device the host runs ahead: there its parts count, and the host tells only how long data took."""
    total = record.total[place] if not device else device.get("total", -1)
    parts = {
        name: getattr(record, name)[place] if not device else device.get(name, -1)
        for name in ("forward", "backward", "wait", "optimizer")
    }
    if total <= 0 or min(parts.values()) < 0:
        return None
    rest = max(0, total - sum(parts.values()))
    data = min(record.data[place], rest)
    return {
        **parts,
        "data": data,
        "other": rest - data,
        "total": total,
        # On a device ddpcheck's own work is hidden behind what was enqueued before, as far as it is.
        "watching": record.watching[place],
        "queued": record.queued[place],
        "faults": record.faults[place] if record.faults else -1,
        "kernel": record.kernel[place] if record.kernel else -1,
    }
