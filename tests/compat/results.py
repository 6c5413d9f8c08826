"""The results of one environment: scripts of the corpus and tests, kept until the environment is removed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

_FILE = "results.json"
_PROGRAM = (
    "import json, platform, sysconfig, torch; print(json.dumps([torch.__version__, platform.python_version(), "
    "bool(sysconfig.get_config_var('Py_GIL_DISABLED'))]))"
)


@dataclass(frozen=True)
class Results:
    """`corpus`: by part and script, as `tests.corpus --json` gives it. `tests`: by part and test, its outcome."""

    torch: str
    python: str
    corpus: Mapping[str, Mapping[str, Mapping[str, Any]]] = field(default_factory=dict)
    tests: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    def with_corpus(self, found: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Results:
        merged = {part: {**self.corpus.get(part, {}), **rows} for part, rows in found.items()}
        return replace(self, corpus={**self.corpus, **merged})

    def with_tests(self, part: str, found: Mapping[str, str]) -> Results:
        return replace(self, tests={**self.tests, part: {**self.tests.get(part, {}), **found}})

    def left_out(self) -> list[str]:
        """Variants of jobs that this version of torch cannot run, with or without ddpcheck."""
        outcomes = [outcome for part in self.tests.values() for outcome in part.values()]
        words = [outcome.partition(" without ")[2].split() for outcome in outcomes]
        return sorted({name for of_test in words for name in of_test})

    def misses(self) -> list[str]:
        """Every difference from what a script expects, and every test that failed."""
        lines = [
            f"{part}/{script}: {miss}"
            for part, rows in sorted(self.corpus.items())
            for script, row in sorted(rows.items())
            for miss in _first_lines(row["misses"])
        ]
        return lines + [
            f"{test}: {outcome}"
            for _, outcomes in sorted(self.tests.items())
            for test, outcome in sorted(outcomes.items())
            if outcome.startswith("failed")
        ]


def _first_lines(misses: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(miss.splitlines()[0] for miss in misses if miss))


def read_results(folder: Path) -> Results:
    """Those of earlier runs in this environment."""
    path = folder / _FILE
    if path.exists():
        return Results(**json.loads(path.read_text()))
    found = subprocess.run(
        [folder / "bin" / "python", "-c", _PROGRAM], capture_output=True, text=True, check=True
    )
    torch, python, free_threaded = json.loads(found.stdout)
    return Results(torch.partition("+")[0], f"{python}{'t' if free_threaded else ''}")


def write_results(folder: Path, results: Results) -> None:
    (folder / _FILE).write_text(json.dumps(asdict(results), indent=1))
