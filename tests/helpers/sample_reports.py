"""Reports for tests: one with markup in every text, and one of many ranks."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ddpcheck.analysis.finding import Finding, Severity
from ddpcheck.analysis.report import AttemptSummary, Check, RankStatus, RankSummary, Report, Verdict
from ddpcheck.analysis.report_builder import analyse_run
from ddpcheck.analysis.timeseries.model import (
    AgreementHistory,
    AgreementInterval,
    EnvironmentRow,
    EnvironmentValue,
    GradientHistory,
)
from ddpcheck.reports.json_report import from_json, to_json

STORED = Path(__file__).parents[1] / "stored_runs"
ATTACK = "</script><script>window.attacked=1</script>\"'><img src=x onerror=window.attacked=1>"
# Keys whose values are enums; every other string is text.
_WORDS = {"schema", "verdict", "severity", "status", "code", "outcome", "part"}


def stored(name: str) -> Report:
    return analyse_run(STORED / name)


def with_parts(report: Report, parts: dict[str, Any]) -> Report:
    """The report with these keys of report.json replaced."""
    return from_json(json.dumps({**json.loads(to_json(report)), **parts}))


def attacking(name: str = "1-learning-rate") -> Report:
    """A real report with markup in every text."""
    document = json.loads(to_json(stored(name)))
    return from_json(json.dumps({key: attacked(key, value) for key, value in document.items()}))


def attacked(key: str, value: Any) -> Any:
    """The value with markup in every text."""
    if isinstance(value, str):
        return value if key in _WORDS else value + ATTACK
    if isinstance(value, list):
        return [attacked(key, item) for item in value]
    if isinstance(value, dict):
        return {name: attacked(name, item) for name, item in value.items()}
    return value


def of_many_ranks(ranks: int = 1024, steps: int = 1000) -> Report:
    """Two ranks diverge at step 400, and one has no records from step 700 on."""
    all_ranks = tuple(range(ranks))
    outliers = (17, ranks - 100)
    silent = ranks // 2
    points = tuple(range(0, steps, 48))
    norms = {
        str(rank): tuple(
            round(
                math.exp(-step / 400) * (1 + 0.1 * math.sin(rank + step)) * (30 if rank in outliers else 1), 4
            )
            for step in points
        )
        for rank in all_ranks
    }
    return Report(
        verdict=Verdict.FINDINGS,
        world_size=ranks,
        steps=steps,
        command=("srun", "python", "train.py"),
        exit_code=0,
        findings=(
            Finding(
                code="DDP201",
                severity=Severity.ERROR,
                title="Parameters diverged",
                message="After step 400 parameters are no longer the same on all ranks.",
                module="0",
                step=400,
                stage="params",
                parameter="layers.3.weight",
                ranks=outliers,
                evidence={
                    "groups": [
                        {"ranks": [rank for rank in all_ranks if rank not in outliers], "digest": "ab" * 16},
                        {"ranks": list(outliers), "digest": "cd" * 16},
                    ],
                    "hyperparameters": [
                        {
                            "optimizer": 0,
                            "group": 0,
                            "name": "lr",
                            "by_rank": {str(rank): 0.01 if rank in outliers else 0.001 for rank in all_ranks},
                        }
                    ],
                },
            ),
        ),
        attempts=(AttemptSummary(0, ranks, steps, tuple(_rank(rank, steps, silent) for rank in all_ranks)),),
        checks=(Check("parameters after each step", steps, "differ", f"{steps} x {ranks} ranks"),),
        agreement=(
            AgreementHistory(
                "0",
                "Net",
                all_ranks,
                (
                    AgreementInterval(-1, -1, 1),
                    AgreementInterval(0, 399, 400),
                    AgreementInterval(400, 699, 300, outliers),
                    AgreementInterval(700, steps - 1, steps - 700, outliers, (silent,)),
                ),
            ),
        ),
        gradients=(
            GradientHistory(
                "0",
                "Net",
                48,
                points,
                norms,
                tuple(0.5 for _ in points),
                tuple(0.1 for _ in points),
            ),
        ),
        environment=(
            EnvironmentRow("torch", (EnvironmentValue("2.13.0", all_ranks),)),
            EnvironmentRow(
                "NCCL_DEBUG",
                (
                    EnvironmentValue("", all_ranks[::2]),
                    EnvironmentValue("INFO", all_ranks[1::2]),
                ),
            ),
        ),
        run={
            "path": "ddpcheck-runs/many",
            "name": "many",
            "torch": ["2.13.0"],
            "parameters": 300,
            "every": 1,
        },
    )


def _rank(rank: int, steps: int, silent: int) -> RankSummary:
    died = rank == silent
    return RankSummary(
        rank=rank,
        status=RankStatus.DIED if died else RankStatus.FINISHED,
        host=f"node{rank // 8:03d}",
        device=f"cuda:{rank % 8}",
        steps=700 if died else steps,
        last_step=699 if died else steps - 1,
        last_stage="params",
    )
