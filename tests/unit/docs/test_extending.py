"""The code in docs/extending.md does what the page says."""

from __future__ import annotations

import csv
import io
import re
import threading
from types import SimpleNamespace
from typing import Any

from tests.helpers.fake_context import FakeContext
from tests.helpers.paths import ROOT
from tests.helpers.sample_reports import of_many_ranks

PAGE = (ROOT / "docs" / "extending.md").read_text()


def examples() -> tuple[dict[str, Any], ...]:
    """What each block of Python on the page defines."""
    found = []
    for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        space: dict[str, Any] = {"__name__": __name__}
        # As a file of its own would be read: not with the imports from the future that this file has.
        exec(compile(block, "docs/extending.md", "exec", dont_inherit=True), space)
        found.append(space)
    return tuple(found)


# tests/unit/rules/test_new_rule.py runs the rules.
PROBE, _, _, REPORT = examples()


def test_the_probe_writes_when_something_changes() -> None:
    context = FakeContext()
    probe = PROBE["ThreadsProbe"](context)
    probe.after_step(SimpleNamespace(steps=0))
    probe.after_step(SimpleNamespace(steps=1))
    done = threading.Event()
    other = threading.Thread(target=done.wait)
    other.start()
    probe.after_step(SimpleNamespace(steps=2))
    done.set()
    other.join()
    first, second = context.records
    assert (first.step, second.step) == (0, 2)  # type: ignore[union-attr]
    assert second.count == first.count + 1  # type: ignore[union-attr]


def test_the_report_has_one_line_a_finding() -> None:
    report = of_many_ranks()
    rows = list(csv.DictReader(io.StringIO(REPORT["to_csv"](report))))
    assert [(row["code"], row["step"], row["ranks"]) for row in rows] == [("DDP201", "400", "17 924")]
