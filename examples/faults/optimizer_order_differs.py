"""Parameters handed to the optimizer in another order on each rank, and a checkpoint loaded into it.

Decayed parameters are gathered in a set of names. An optimizer's checkpoint knows parameters by their number
only, so each rank gives the momenta to other parameters. Nothing complains: the shapes are all the same.

bug: 24
seen in: -
ranks: 2
launcher: torchrun
expect: DDP206
cause: parameters in another order
stage: params
step: 0
outliers: 0 1
parameter: layers.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

DEPTH = 12


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6, bias=False) for _ in range(DEPTH))

    def forward(self, inputs):
        for layer in self.layers:
            inputs = inputs + torch.tanh(layer(inputs))
        return inputs


def checkpoint():
    momenta = torch.Generator().manual_seed(7)
    optimizer = torch.optim.SGD(
        [nn.Parameter(torch.zeros(6, 6)) for _ in range(DEPTH)], lr=0.01, momentum=0.9
    )
    state = optimizer.state_dict()
    state["state"] = {n: {"momentum_buffer": torch.randn(6, 6, generator=momenta)} for n in range(DEPTH)}
    return state


def train():
    torch.manual_seed(6)
    net = Deep()
    model = DDP(net)
    parameters = dict(net.named_parameters())
    decayed = {name for name in parameters if name.endswith("weight")}
    optimizer = torch.optim.SGD([parameters[name] for name in decayed], lr=0.01, momentum=0.9)
    optimizer.load_state_dict(checkpoint())
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(4):
        inputs = torch.randn(8, 6, generator=data)
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
