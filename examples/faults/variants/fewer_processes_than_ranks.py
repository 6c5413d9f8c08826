"""A start script counts three ranks and starts two processes: both wait in init_process_group for the third.

torch waits for half an hour, and then names no rank.

variant of: environment_lost_on_one_rank
seen in: -
ranks: 3
launcher: python
options: --hang-timeout 3
hangs: yes
expect: DDP603
cause: rank 2 never joined the process group of 3 ranks
step: none
outliers: 2
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

RANKS = 3


def train():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DDP(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(8, 4)).square().mean().backward()
    optimizer.step()
    dist.destroy_process_group()


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), WORLD_SIZE=str(RANKS))
    processes = []
    for rank in range(1, RANKS):
        pid = os.fork()
        if not pid:
            os.environ["RANK"] = str(rank - 1)
            train()
            os._exit(0)
        processes.append(pid)
    for pid in processes:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
