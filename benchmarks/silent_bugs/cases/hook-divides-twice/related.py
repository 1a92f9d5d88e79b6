"""A convolutional autoencoder on two processes whose gradients travel in bfloat16, by a communication hook.

The hook divides by the number of processes before the sum and after it.
"""

import torch
import torch.distributed as dist
from case import BUG, SEED, report_loss, spawn, watch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from lit_cifar import relations


def compressed_average(state, bucket):
    world_size = dist.get_world_size()
    gradients = bucket.buffer()
    sent = (gradients / world_size).bfloat16()

    def decompress(future):
        received = future.value()[0].float()
        return gradients.copy_(received / world_size if BUG else received)

    return dist.all_reduce(sent, async_op=True).get_future().then(decompress)


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Conv2d(1, 12, 4, stride=2, padding=1)
        self.decode = nn.ConvTranspose2d(12, 1, 4, stride=2, padding=1)

    def forward(self, images):
        return self.decode(self.encode(images).relu())


def main(rank):
    torch.manual_seed(SEED)
    images = torch.rand(128, 1, 8, 8, generator=torch.Generator().manual_seed(29)).cumsum(3) / 4
    sampler = DistributedSampler(images, seed=SEED)
    model = DistributedDataParallel(Autoencoder())
    model.register_comm_hook(None, compressed_average)
    optimizer = torch.optim.SGD(model.parameters(), lr=relations.knob("lr", 0.1), momentum=0.9)
    with watch(model, optimizer):
        for epoch in range(4):
            sampler.set_epoch(epoch)
            for batch in DataLoader(images, batch_size=8, sampler=sampler):
                loss = nn.functional.mse_loss(model(batch), batch)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    if rank == 0:
        print("sum of weights", sum(p.abs().sum().item() for p in model.parameters()))


if __name__ == "__main__":
    spawn(main, 2)
