"""A plain loop. `python plain.py ROOT EPOCHS [CHECKPOINT]` goes on from the checkpoint that it writes."""

import sys

import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torchvision.datasets import CIFAR10
from torchvision.models import resnet18
from torchvision.transforms import Compose, Normalize, RandomCrop, RandomHorizontalFlip, ToTensor

NORMALISED = [ToTensor(), Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616))]
AUGMENTED = Compose([RandomCrop(32, padding=4), RandomHorizontalFlip(), *NORMALISED])

if __name__ == "__main__":
    root, epochs, *checkpoint = sys.argv[1:]
    train = DataLoader(CIFAR10(root, transform=AUGMENTED), batch_size=128, shuffle=True, num_workers=2)
    test = DataLoader(CIFAR10(root, train=False, transform=Compose(NORMALISED)), batch_size=500, num_workers=2)
    network = resnet18(num_classes=10)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, epochs=2, steps_per_epoch=len(train))
    first = 0
    if checkpoint:
        state = torch.load(checkpoint[0], weights_only=True)
        network.load_state_dict(state["network"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        first = state["epoch"] + 1
    for epoch in range(first, int(epochs)):
        network.train()
        for images, labels in train:
            loss = cross_entropy(network(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            right = sum(int((network(images).argmax(dim=1) == labels).sum()) for images, labels in test)
        print(epoch, right / len(test.dataset))
        state = {"network": network.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(state | {"schedule": schedule.state_dict()}, "last.pt")
