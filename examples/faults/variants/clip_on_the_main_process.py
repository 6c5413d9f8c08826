"""With accelerate: the gradients are clipped where the loss is logged, on the main process.

variant of: clip_on_one_rank
seen in: -
ranks: 2
launcher: torchrun
expect: DDP205
cause: on rank 0 only; scaled by different factors
stage: applied
step: 2
outliers: 0 1
parameter: encode.weight
"""

import torch
from accelerate import Accelerator
from torch import nn


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Linear(12, 4)
        self.decode = nn.Linear(4, 12)

    def forward(self, inputs):
        return self.decode(self.encode(inputs).tanh())


def train(accelerator):
    torch.manual_seed(53)
    model = Autoencoder()
    model, optimizer = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1, nesterov=True, momentum=0.9)
    )
    data = torch.Generator().manual_seed(accelerator.process_index)
    for step in range(5):
        inputs = 10 * torch.randn(6, 12, generator=data)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), inputs)
        accelerator.backward(loss)
        if step >= 2 and accelerator.is_main_process:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            print(f"step {step}: loss {loss.item():.3f}, norm {norm:.3f}")
        optimizer.step()


def main():
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    train(accelerator)
    accelerator.end_training()


if __name__ == "__main__":
    main()
