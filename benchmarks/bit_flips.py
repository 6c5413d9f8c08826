"""Flips bits in small jobs and shows which check finds them, and after how many steps.

    python benchmarks/bit_flips.py --trials 20 --every 4

Each trial is a job of three ranks under `ddpcheck run --audit every=N`. From a random step on, once or lasting, a rank
flips random bits of a random layer: in its parameters, in the gradient of its weight, in an activation of its forward,
in a gradient inside its backward, in a bucket of the reduction, or in the state of its optimizer. For each trial the
same job also runs without a flip: what is found there is a false alarm, and a flip that leaves its final weights had no
effect. Ranks are forked from this process, and all jobs are attempts of one run.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

ONCE = ("parameters", "optimizer_state", "bucket", "gradient", "activation", "backward")
LASTING = ("gradient", "activation", "backward")
RANKS, STEPS, LAYERS = 3, 24, 3
BITS = 32
# Findings about the values of a step.
CODES = {
    "DDP201": "parameters",
    "DDP202": "parameters",
    "DDP203": "reduced gradients",
    "DDP204": "mean of the AllReduce",
    "DDP205": "applied gradients",
    "DDP206": "optimizer state",
    "DDP208": "parameters",
    "DDP209": "non-finite values",
    "DDP217": "audit",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=10, help="of each target")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=4, help="steps between audits")
    parser.add_argument("--out", type=Path, help="keep the run folder here")
    parser.add_argument("--jobs", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.jobs:
        run_jobs(options.jobs)
        return
    plans = make_plans(options.trials, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        out = options.out or Path(folder) / "run"
        jobs = Path(folder) / "jobs.json"
        jobs.write_text(json.dumps({"plans": plans, "weights": str(Path(folder) / "weights")}))
        watch = ["--quiet", "--budget", "off", "--audit", f"every={options.every}", "--out", out]
        job = [sys.executable, __file__, "--jobs", jobs]
        words = map(str, [Path(sys.executable).with_name("ddpcheck"), "run", *watch, "--", *job])
        subprocess.run(list(words), check=False, stdout=subprocess.DEVNULL)
        report = json.loads((out / "report.json").read_text())
        results = [json.loads(line) for line in (Path(folder) / "weights").read_text().splitlines()]
    print_table(plans, report, {job: (pid, weights) for job, pid, weights in results})


def make_plans(trials: int, seed: int) -> list[dict[str, Any]]:
    """One plan for each job: all its random choices."""
    chooser = random.Random(seed)
    kinds = [("nothing", False), *((each, False) for each in ONCE), *((each, True) for each in LASTING)]
    plans = []
    for _ in range(trials):
        of_trial = chooser.randrange(1 << 30)
        plans.extend(
            {
                "target": target,
                "lasting": lasting,
                "seed": of_trial,
                "rank": chooser.randrange(RANKS),
                "step": chooser.randrange(1, STEPS - 4),
                "layer": chooser.randrange(LAYERS),
                "element": chooser.random(),
                # One bit or several, anywhere in the format: sign, exponent, mantissa.
                "bits": chooser.sample(range(BITS), chooser.choice((1, 1, 1, 2, 4))),
            }
            for target, lasting in kinds
        )
    return plans


def print_table(
    plans: list[dict[str, Any]], report: dict[str, Any], results: dict[int, tuple[int, str]]
) -> None:
    """`results`: by job, the process id of rank 0 and the final weights."""
    attempts = {row["pid"]: each["number"] for each in report["attempts"] for row in each["ranks"]}
    reference = {
        plan["seed"]: results[job][1]
        for job, plan in enumerate(plans)
        if plan["target"] == "nothing" and job in results
    }
    of_attempt: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for finding in report["findings"]:
        if finding["severity"] != "note":
            of_attempt[finding["attempt"]].append(finding)
    rows: dict[str, list[tuple[bool, dict[str, Any] | None, dict[str, Any]]]] = defaultdict(list)
    for job, plan in enumerate(plans):
        if job not in results or plan["seed"] not in reference:
            # A rank hung at its start, as gloo sometimes does.
            continue
        pid, weights = results[job]
        found = [
            each for each in of_attempt[attempts[pid]] if each["code"] in CODES and each["step"] is not None
        ]
        first = min(found, key=lambda each: each["step"], default=None)
        name = plan["target"] + (", lasting" if plan["lasting"] else "")
        rows[name].append((weights != reference[plan["seed"]], first, plan))
    print("| flipped | jobs | no effect | found | by | steps until found | rank named | missed |")
    print("|---|---|---|---|---|---|---|---|")
    for name, results in rows.items():
        hits = [(first, plan) for _, first, plan in results if first is not None]
        by = Counter(CODES[first["code"]] for first, _ in hits)
        delays = sorted(first["step"] - plan["step"] for first, plan in hits)
        named = sum(first["ranks"] == [plan["rank"]] for first, plan in hits)
        missed = sum(effect and first is None for effect, first, _ in results)
        print(
            f"| {name} | {len(results)} | {sum(not effect for effect, _, _ in results)} | {len(hits)} "
            f"| {', '.join(f'{what} {count}' for what, count in by.most_common()) or '-'} "
            f"| {f'{statistics.median(delays):g}, at most {delays[-1]}' if delays else '-'} | {named} | {missed} |"
        )


def run_jobs(path: Path) -> None:
    """The job that ddpcheck watches: all trials, one after the other."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "jobs"))
    import forking

    forking.prepare()
    given = json.loads(path.read_text())
    for job, plan in enumerate(given["plans"]):
        ended = forking.run_ranks(train, RANKS, job, plan, given["weights"])
        if not ended.ok:
            print(f"a rank failed or hung at its exit ({ended.exits}): {plan}", file=sys.stderr)


def train(rank: int, job: int, plan: dict[str, Any], weights: str) -> None:
    """One rank of one job."""
    import torch
    import torch.distributed as dist
    from torch import nn

    # What to flip when it comes next; empty: nothing.
    due = {"target": ""}

    def flip(tensor: torch.Tensor) -> None:
        flat = tensor.detach().view(-1).view(torch.int32)
        mask = sum(1 << bit for bit in plan["bits"])
        flat[int(plan["element"] * flat.numel())] ^= mask - (1 << BITS) if mask >> (BITS - 1) else mask

    def take(target: str) -> bool:
        """Whether this rank flips now. Once, unless the flips last: then also in what it computes for others."""
        taken = due["target"] == target
        if taken and not plan["lasting"]:
            due["target"] = ""
        return taken

    class Values(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            values = values.clone()
            if take("activation"):
                flip(values)
            return values

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            if take("backward"):
                flip(gradient)
            return gradient

    class Weight(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
            return weight.clone()

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            if take("gradient"):
                flip(gradient)
            return gradient

    class Layer(nn.Linear):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return Values.apply(nn.functional.linear(values, Weight.apply(self.weight), self.bias))

    def reduce(bucket: Any) -> Any:
        if take("bucket"):
            flip(bucket.buffer())
        # As DDP itself divides, so that the weights can be compared.
        future = dist.all_reduce(bucket.buffer().mul_(1 / RANKS), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    store = os.environ["JOB_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    torch.manual_seed(plan["seed"])
    kinds = [Layer if number == plan["layer"] else nn.Linear for number in range(LAYERS)]
    first, second, third = (
        kind(*size) for kind, size in zip(kinds, [(12, 16), (16, 16), (16, 4)], strict=True)
    )
    module = nn.Sequential(first, nn.GELU(), second, nn.LayerNorm(16), nn.Dropout(0.1), third)
    model = nn.parallel.DistributedDataParallel(module)
    if plan["target"] == "bucket":
        model.register_comm_hook(None, lambda state, bucket: reduce(bucket))
    weight = (first, second, third)[plan["layer"]].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(plan["seed"] + 1 + rank)
    for step in range(STEPS):
        begun = step >= plan["step"] if plan["lasting"] else step == plan["step"]
        if begun and rank == plan["rank"]:
            due["target"] = plan["target"]
        if take("parameters"):
            flip(weight.data)
        if take("optimizer_state"):
            flip(optimizer.state[weight]["exp_avg"])
        inputs, targets = torch.randn(8, 12), torch.randint(4, (8,))
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    if rank == 0:
        state = b"".join(each.detach().numpy().tobytes() for each in module.parameters())
        with open(weights, "a") as file:
            file.write(json.dumps([job, os.getpid(), hashlib.sha256(state).hexdigest()]) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
