"""A little U-Net for masks of blobs, with a gradient scaler and clipping.

The gradients are clipped while they are still multiplied by the scale, so the unscaled ones are tiny.
"""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(1, 8, 3, padding=1)
        self.bottom = nn.Conv2d(8, 16, 3, padding=1, stride=2)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.out = nn.Conv2d(16, 1, 3, padding=1)

    def forward(self, images):
        skip = self.down(images).relu()
        return self.out(torch.cat([skip, self.up(self.bottom(skip).relu())], 1))


def make_blobs():
    made = torch.Generator().manual_seed(91)
    smooth = nn.functional.interpolate(torch.randn(96, 1, 3, 3, generator=made), size=12, mode="bilinear")
    return TensorDataset(smooth + 0.3 * torch.randn(96, 1, 12, 12, generator=made), (smooth > 0.2).float())


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=relations.knob("lr", 1e-3), eps=1e-4, foreach=True)
    grad_scaler = torch.amp.GradScaler("cpu", init_scale=relations.knob("loss_scale", 1024.0))
    loader = DataLoader(make_blobs(), batch_size=8, shuffle=True)
    with watch(model, optimizer):
        for epoch in range(4):
            for images, masks in loader:
                loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
                optimizer.zero_grad(set_to_none=True)
                grad_scaler.scale(loss).backward()
                if not BUG:
                    grad_scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), relations.knob("max_norm", 1.0))
                grad_scaler.step(optimizer)
                grad_scaler.update()
                report_loss(loss.item())
            print(f"epoch {epoch}: loss of the last batch {loss.item():.4f}")
    print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))
