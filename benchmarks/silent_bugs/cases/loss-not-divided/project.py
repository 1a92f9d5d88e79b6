"""A small causal transformer on price curves, trained with accumulated gradients and clipping.

The loss of a micro-batch is not divided by their number: gradients are four times too large and clipped too early.
"""

import torch
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

gradient_accumulation_steps = 4
grad_clip = 10.0


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 32)
        self.position = nn.Parameter(0.02 * torch.randn(23, 32))
        self.blocks = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
        self.head = nn.Linear(32, 1)

    def forward(self, curves):
        x = self.embed(curves[:, :-1, None]) + self.position
        causal = nn.Transformer.generate_square_subsequent_mask(23)
        predicted = self.head(self.blocks(x, mask=causal, is_causal=True)).squeeze(2)
        return nn.functional.mse_loss(predicted, curves[:, 1:])


def get_batch(made):
    drift = 0.05 * torch.randn(4, 1, generator=made)
    return (drift + 0.1 * torch.randn(4, 24, generator=made)).cumsum(1)


def main(rank):
    torch.manual_seed(SEED)
    model = DDP(Forecaster())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    made = torch.Generator().manual_seed(10 * SEED + rank)
    with watch(model, optimizer):
        for _ in range(30):
            losses = 0.0
            for micro_step in range(gradient_accumulation_steps):
                model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
                loss = model(get_batch(made))
                losses += loss.item() / gradient_accumulation_steps
                if not BUG:
                    loss = loss / gradient_accumulation_steps
                loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            report_loss(losses)
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
