"""Half of the model goes to another dtype and back: DDP counts that half as unused.

The encoder is exported in float64 and comes back. With `find_unused_parameters=True` DDP looks for its hooks in the
graph, does not find the encoder's, and reduces the decoder only. There is no error.

variant of: converted_and_back
seen in: pytorch#104336
ranks: 2
expect: DDP202
cause: hooks are lost
stage: applied
step: 2
outliers: 0 1
parameter: encoder.0.weight
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class EncoderDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 12), nn.ReLU())
        self.decoder = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 8))

    def forward(self, inputs):
        return self.decoder(self.encoder(inputs))


def export(encoder):
    weights = {name: tensor.clone() for name, tensor in encoder.double().state_dict().items()}
    encoder.float()
    return weights


def train():
    torch.manual_seed(8)
    model = EncoderDecoder()
    ddp = DDP(model, find_unused_parameters=True)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-2)
    data = torch.Generator().manual_seed(40 + dist.get_rank())
    for step in range(5):
        if step == 2:
            export(model.encoder)
        inputs = torch.randn(6, 8, generator=data)
        optimizer.zero_grad()
        F.mse_loss(ddp(inputs), inputs).backward()
        optimizer.step()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
