"""One rank waits for something outside the job, up to a time limit, while the others wait for it at a barrier.

ranks: 2
expect: nothing
options: --hang-timeout 1
cases: event queue condition join_thread lock producer_waits future
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import queue
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SECONDS = 2.5


def wait_for_storage(case: str) -> None:
    """Something that answers late or never: after the limit, training continues without it."""
    if case == "event":
        threading.Event().wait(timeout=SECONDS)
    elif case == "queue":
        with contextlib.suppress(queue.Empty):
            queue.Queue().get(timeout=SECONDS)
    elif case == "condition":
        condition = threading.Condition()
        with condition:
            condition.wait(SECONDS)
    elif case == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire(timeout=SECONDS)
    elif case == "join_thread":
        stop = threading.Event()
        thread = threading.Thread(target=stop.wait, daemon=True)
        thread.start()
        thread.join(timeout=SECONDS)
        stop.set()
    elif case == "future":
        stop = threading.Event()
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            answer = pool.submit(stop.wait)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                answer.result(timeout=SECONDS)
            stop.set()
    else:
        # The training thread itself has no limit; the thread that it waits for has one.
        answers: queue.Queue[bool] = queue.Queue()
        threading.Thread(target=lambda: answers.put(threading.Event().wait(SECONDS)), daemon=True).start()
        answers.get()


def main() -> None:
    case = sys.argv[1]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = torch.Generator().manual_seed(rank)
    for step in range(4):
        optimizer.zero_grad()
        model(torch.randn(16, 8, generator=data)).square().mean().backward()
        optimizer.step()
        if step == 2:
            if rank == 0:
                wait_for_storage(case)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
