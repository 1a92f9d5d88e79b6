"""accelerate as its guide shows it. `python with_accelerate.py ROOT EPOCHS [CHECKPOINT]`."""

import sys

import torch
from accelerate import Accelerator
from plain import AUGMENTED, NORMALISED
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import Compose

if __name__ == "__main__":
    root, epochs, *checkpoint = sys.argv[1:]
    accelerator = Accelerator(cpu=True)
    train = DataLoader(CIFAR10(root, transform=AUGMENTED), batch_size=128, shuffle=True, num_workers=2)
    test = DataLoader(CIFAR10(root, train=False, transform=Compose(NORMALISED)), batch_size=500, num_workers=2)
    network = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(train))
    network, optimizer, train, test, schedule = accelerator.prepare(network, optimizer, train, test, schedule)
    first = 0
    if checkpoint:
        accelerator.load_state(checkpoint[0])
        first = 1
    for epoch in range(first, int(epochs)):
        network.train()
        for images, labels in train:
            loss = cross_entropy(network(images), labels)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
        network.eval()
        right = number = 0
        with torch.no_grad():
            for images, labels in test:
                predicted, labels = accelerator.gather_for_metrics((network(images).argmax(dim=1), labels))
                right, number = right + int((predicted == labels).sum()), number + len(labels)
        accelerator.print(epoch, right / number, number)
        accelerator.save_state("state")
