"""A small U-Net that finds squares, with autocast to half precision and a loss scale; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


def double_conv(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(), nn.Conv2d(outputs, outputs, 3, padding=1), nn.ReLU()
    )


class UNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.down1, self.down2 = double_conv(1, 8), double_conv(8, 16)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.merge, self.out = double_conv(16, 8), nn.Conv2d(8, 1, 1)

    def forward(self, images):
        skipped = self.down1(images)
        deep = self.down2(nn.functional.max_pool2d(skipped, 2))
        return self.out(self.merge(torch.cat([skipped, self.up(deep)], dim=1)))


def squares(count=160):
    made = torch.Generator().manual_seed(15)
    masks = torch.zeros(count, 1, 16, 16)
    for mask, (x, y, side) in zip(masks, torch.randint(2, 9, (count, 3), generator=made).tolist(), strict=True):
        mask[0, y : y + side, x : x + side] = 1
    return TensorDataset(masks + 0.7 * torch.randn(masks.shape, generator=made), masks)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    model = UNet()
    optimizer = torch.optim.RMSprop(model.parameters(), lr=relations.knob("lr", 1e-3), weight_decay=1e-8, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu")
    with watch(model, optimizer):
        for _ in range(4):
            for images, masks in DataLoader(squares(), batch_size=16, shuffle=True):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.binary_cross_entropy_with_logits(model(images), masks)
                optimizer.zero_grad(set_to_none=True)
                scaler.scale(loss).backward()
                if not BUG:
                    scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), relations.knob("max_norm", 1.0))
                scaler.step(optimizer)
                scaler.update()
                report_loss(loss.item())
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
