"""The table of docs/schedulers.md: each case with its last result."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

PAGE = Path(__file__).parents[2] / "docs" / "schedulers.md"
BEGIN, END = "<!-- cases: make schedulers -->", "<!-- end of cases -->"
_HEAD = ("| with | case | result |", "|---|---|---|")
# By the file of the cases.
NAMES = {"slurm_cases": "Slurm", "mpirun_cases": "OpenMPI", "ray_cases": "Ray", "container_cases": "podman"}


@dataclass(frozen=True)
class Outcome:
    """A case, in the words of its docstring."""

    scheduler: str
    case: str
    result: str

    def row(self) -> str:
        return f"| {self.scheduler} | {self.case} | {self.result} |"


def read_outcomes(path: Path) -> list[Outcome]:
    """From a JUnit file of pytest; what was deselected is not in it."""
    if not path.exists():
        return []
    cases = list(ElementTree.parse(path).iter("testcase"))
    return [
        Outcome(NAMES[_module(case)], _title(case), _result(case)) for case in cases if _module(case) in NAMES
    ]


def _module(case: ElementTree.Element) -> str:
    return case.get("classname", "").rpartition(".")[2]


def _title(case: ElementTree.Element) -> str:
    """The docstring, which conftest.py records as a property."""
    titles = [each.get("value", "") for each in case.iter("property") if each.get("name") == "case"]
    return titles[0] if titles else case.get("name", "")


def _result(case: ElementTree.Element) -> str:
    if case.find("failure") is not None or case.find("error") is not None:
        return "**not as expected**"
    skipped = case.find("skipped")
    return "as expected" if skipped is None else f"not run: {skipped.get('message', '')}"


def update(page: str, outcomes: list[Outcome]) -> str:
    """The page with these rows in place of earlier ones of the same cases."""
    before, _, rest = page.partition(BEGIN)
    table, _, after = rest.partition(END)
    rows: dict[tuple[str, str], str] = {}
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if len(cells) == 3 and cells[0] in NAMES.values():
            rows[cells[0], cells[1]] = line
    rows.update({(each.scheduler, each.case): each.row() for each in outcomes})
    ordered = sorted(rows, key=lambda key: list(NAMES.values()).index(key[0]))
    return "\n".join([before + BEGIN, *_HEAD, *(rows[key] for key in ordered), END + after])
