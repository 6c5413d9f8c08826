"""An autoencoder of which only the encoder is wrapped; the decoder has an optimizer of its own.

Both parts are in one loss. The encoder's gradients are averages over ranks, but each of them was taken through
another decoder.

variant of: -
ranks: 2
expect: DDP211
cause: trained outside DDP
stage: params
step: 0
outliers: 0 1
parameter: Decoder.*
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.GELU(), nn.Linear(16, 12))

    def forward(self, codes):
        return self.layers(codes)


def train():
    torch.manual_seed(72)
    encoder = DDP(nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 3)))
    decoder = Decoder()
    encodes = torch.optim.AdamW(encoder.parameters(), lr=5e-3)
    decodes = torch.optim.AdamW(decoder.parameters(), lr=5e-3)
    data = torch.Generator().manual_seed(310 + dist.get_rank())
    for _ in range(6):
        inputs = torch.randn(16, 12, generator=data)
        F.mse_loss(decoder(encoder(inputs)), inputs).backward()
        for optimizer in (encodes, decodes):
            optimizer.step()
            optimizer.zero_grad()


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
