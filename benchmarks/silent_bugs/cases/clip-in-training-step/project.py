"""A world model of a bouncing ball: from a state and a push to the next state; two ranks, two batches to a step."""

import lightning.pytorch as pl
import torch
from case import BUG, SEED, watching
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

MAX_NORM = 0.2


def bounces(count=512):
    made = torch.Generator().manual_seed(21)
    place, speed = torch.rand(count, 2, generator=made), torch.randn(count, 2, generator=made)
    push = torch.randn(count, 2, generator=made)
    after = place + 0.3 * (speed + push)
    hit = (after < 0) | (after > 1)
    return TensorDataset(
        torch.cat([place, speed], 1), push, torch.cat([after.clamp(0, 1), torch.where(hit, -speed, speed)], 1)
    )


class WorldModel(pl.LightningModule):
    def __init__(self, width=48):
        super().__init__()
        self.state, self.action = nn.Linear(4, width), nn.Linear(2, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.SiLU()) for _ in range(2)
        )
        self.change = nn.Linear(width, 4)

    def forward(self, state, action):
        hidden = self.state(state) + self.action(action)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return state + self.change(hidden)

    def training_step(self, batch, batch_idx):
        state, action, after = batch
        loss = nn.functional.mse_loss(self(state, action), after)
        if BUG:
            nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        if not BUG:
            nn.utils.clip_grad_norm_(self.parameters(), MAX_NORM)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


if __name__ == "__main__":
    pl.seed_everything(SEED, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu", strategy="ddp", devices=2, max_epochs=3, accumulate_grad_batches=2, callbacks=watching(),
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    model = WorldModel()
    trainer.fit(model, DataLoader(bounces(), batch_size=8, shuffle=True))
    if trainer.is_global_zero:
        print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
