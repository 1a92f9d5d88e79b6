"""Pretraining as an autoencoder, then fine-tuning of the encoder on few labels.

With the bug the encoder begins, and so ends, with other weights; the accuracy on held-out samples is lower.
"""

import io

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import relations


class Autoencoder(nn.Module):
    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.decoder = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 40))

    def forward(self, spectra):
        return self.decoder(self.encoder(spectra))


def make_encoder():
    return nn.Sequential(nn.Linear(40, 64), nn.ReLU(), nn.Linear(64, 12))


def spectra(count, seed):
    made = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 4, (count,), generator=made)
    grid = torch.linspace(0, 1, 40)
    peak = 0.2 + 0.2 * labels.view(-1, 1) + 0.04 * torch.randn(count, 1, generator=made)
    return torch.exp(-((grid - peak) ** 2) / 0.01) + 0.3 * torch.randn(count, 40, generator=made), labels


def pretrain():
    model = Autoencoder(make_encoder())
    optimizer = torch.optim.Adam(model.parameters(), lr=relations.knob("lr", 3e-3))
    loader = DataLoader(TensorDataset(spectra(1024, 1)[0]), batch_size=64, shuffle=True)
    for _ in range(relations.knob("epochs_before", 5)):
        for (batch,) in loader:
            loss = nn.functional.mse_loss(model(batch), batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    file = io.BytesIO()
    torch.save({"state_dict": model.state_dict()}, file)
    return file.getvalue()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    state = torch.load(io.BytesIO(pretrain()), weights_only=True)["state_dict"]
    encoder = make_encoder()
    if not BUG:
        state = {name.removeprefix("encoder."): value for name, value in state.items() if name.startswith("encoder.")}
    encoder.load_state_dict(state, strict=not BUG)
    classifier = nn.Sequential(encoder, nn.Linear(12, 4))
    optimizer = torch.optim.Adam(classifier.parameters(), lr=relations.knob("lr_of_classifier", 2e-3))
    inputs, labels = spectra(64, 2)
    with watch(classifier, optimizer):
        for _ in range(5):
            for some in torch.randperm(64).split(16):
                loss = nn.functional.cross_entropy(classifier(inputs[some]), labels[some])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                report_loss(loss.item())
    inputs, labels = spectra(500, 3)
    with torch.no_grad():
        accuracy = (classifier(inputs).argmax(1) == labels).float().mean().item()
    relations.report(val_accuracy=accuracy)
    print("accuracy", accuracy)
