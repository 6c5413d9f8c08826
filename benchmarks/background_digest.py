"""Compares digests taken in the training thread with digests taken by a background thread: time and correctness.

    python benchmarks/background_digest.py

Trains one small model in one process and hashes its parameters after each step, in line and in a thread.
The job clamps its weights through `.data` right after the step, as WGANs do: no version counter moves, so
nothing can be fenced. A digest that is neither that of the parameters before the clamp nor after it belongs
to no moment of the job; two healthy ranks would be told apart by it.
"""

from __future__ import annotations

import statistics
import threading
import time

import torch
from torch import nn

from ddpcheck.probes.digest import combine
from ddpcheck.probes.digest.submit import submit

STEPS = 200


def digest(tensors: list[torch.Tensor]) -> bytes:
    return combine(submit(tensors).result())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=1e-2)
    inputs = torch.randn(32, 1024)
    torn, wrong_moment, in_line, beside = 0, 0, [], []
    for step in range(STEPS):
        begin = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()
        looking = time.perf_counter()
        if step % 2:
            digest(parameters)
            seconds = time.perf_counter() - looking
            in_line.append(seconds / (looking - begin))
            continue
        found: list[bytes] = []
        before = digest(parameters)
        thread = threading.Thread(target=lambda found=found: found.append(digest(parameters)))
        begin = time.perf_counter()
        thread.start()
        with torch.no_grad():
            for parameter in parameters:
                parameter.data.clamp_(-0.02, 0.02)
        beside.append(time.perf_counter() - begin)
        thread.join()
        after = digest(parameters)
        torn += found[0] not in (before, after)
        wrong_moment += found[0] == after != before
        with torch.no_grad():
            for parameter in parameters:
                parameter.data.mul_(1.5)
    looks = STEPS // 2
    print(f"in line: {statistics.median(in_line):.1%} of forward, backward and step")
    print("in a thread, with a clamp through .data behind the step:")
    print(f"  {torn} of {looks} digests belong to no moment of the job,")
    print(f"  {wrong_moment} more to another moment than the one they were taken for")


if __name__ == "__main__":
    main()
