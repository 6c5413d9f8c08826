"""The corpus: every fault is found as its header says, sound jobs raise nothing, and a wrong answer is noticed.

All faults and their variants, and a sample of the healthy jobs at two ranks; `make corpus` runs everything, with
what PyTorch says by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.corpus.jobs import Job, batches, jobs_of, run_batch
from tests.corpus.run import FAULTS, HEALTHY, ROOT, VARIANTS, collect, main
from tests.corpus.verdict import judge

pytestmark = pytest.mark.slow

MOST_IN_A_BATCH = 20
# Each takes the import of torch on every rank; a few show that the launcher makes no difference.
MOST_BY_LAUNCHER = {"torchrun": 2, "environment": 1, "python": 1}
EVERY_SO_MANIETH_CASE = 3


def faults() -> list[Job]:
    jobs = [job for folder in (FAULTS, VARIANTS) for h in collect(ROOT / folder) for job in jobs_of(h)]
    forked = [job for job in jobs if job.header.launcher == "fork"]
    launched = [
        job
        for launcher, most in MOST_BY_LAUNCHER.items()
        for job in [job for job in jobs if job.header.launcher == launcher][:most]
    ]
    return forked + launched


def healthy_sample() -> list[Job]:
    jobs = [job for header in collect(ROOT / HEALTHY) for job in jobs_of(header)]
    at_two = [job for job in jobs if job.header.launcher == "fork" and job.world_size == 2]
    return at_two[::EVERY_SO_MANIETH_CASE]


def named(batch: Sequence[Job]) -> str:
    return batch[0].name if len(batch) == 1 else f"{batch[0].name} and {len(batch) - 1} more"


@pytest.mark.parametrize("batch", batches([*faults(), *healthy_sample()], MOST_IN_A_BATCH), ids=named)
def test_findings_are_those_the_headers_expect(batch: list[Job]) -> None:
    verdicts = [judge(outcome) for outcome in run_batch(batch)]
    assert {v.outcome.job.name: v.misses for v in verdicts if not v.passed} == {}


SCRIPT = '''"""A forward around the wrapper, from the third step on.

bug: 1
ranks: 2
expect: {code}
cause: wrapper bypassed
step: {step}
odd ranks: 0 1
"""
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
drawn = torch.Generator().manual_seed(dist.get_rank())
for step in range(4):
    optimizer.zero_grad()
    (model if step < 2 else model.module)(torch.randn(3, 4, generator=drawn)).square().mean().backward()
    optimizer.step()
dist.destroy_process_group()
'''


def test_a_wrong_answer_fails_the_corpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / FAULTS
    folder.mkdir(parents=True)
    for name, code, step in (("right", "DDP202", 2), ("late", "DDP202", 3), ("other", "DDP104", 2)):
        (folder / f"{name}.py").write_text(SCRIPT.format(code=code, step=step))
    healthy = tmp_path / HEALTHY
    healthy.mkdir()
    sound = SCRIPT.format(code="nothing", step=2).split("\n")
    header = [line for line in sound[:9] if not line.startswith(("bug", "cause", "step", "odd"))]
    (healthy / "alarm.py").write_text("\n".join(header + sound[9:]))

    assert main(["--root", str(tmp_path), "--no-plain", "--no-real", "--jobs", "1"]) == 1
    shown = capsys.readouterr().out
    assert "faults: 1 of 3 right (code 2, cause 2, step 1, rank 2)" in shown
    assert "faults/late x2: step: expected 3, found 2" in shown
    assert "faults/other x2: expected DDP104, found DDP202" in shown
    assert "healthy: 0 of 1 jobs as expected (1 variants), 1 findings at warning or above" in shown
    assert main(["--root", str(tmp_path), "--no-plain", "--no-real", "--only", "right"]) == 0
