"""The table of findings in docs/findings.md: `python -m ddpcheck.rules.tables [--write]`."""

from __future__ import annotations

import sys
from pathlib import Path

from ddpcheck.rules.rule import rules

BEGIN, END = "<!-- findings: generated -->", "<!-- /findings -->"
_ROOT = Path(__file__).resolve().parents[2]


def findings_table() -> str:
    rows = [
        f"| [{rule.code}](../ddpcheck/explanations/{rule.code}.md) | {rule.severity.value} | "
        f"{'yes' if rule.live else ''} | {rule.summary} |"
        for rule in rules()
    ]
    return "\n".join(["| code | severity | while the job runs | what |", "|---|---|---|---|", *rows])


TABLES = {Path("docs/findings.md"): findings_table}


def with_table(text: str, table: str) -> str:
    """`text` with the part between the markers replaced; ValueError if a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"no {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Check the files, or rewrite them with --write; 1 if a file was out of date."""
    stale = 0
    for path, table in TABLES.items():
        text = (_ROOT / path).read_text(encoding="utf-8")
        expected = with_table(text, table())
        if text == expected:
            continue
        stale = 1
        if "--write" in arguments:
            (_ROOT / path).write_text(expected, encoding="utf-8")
        sys.stdout.write(f"{path}: {'rewritten' if '--write' in arguments else 'out of date'}\n")
    return stale


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
