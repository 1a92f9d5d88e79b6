"""Names in the captions of pictures: words and what is seen, and a CRF over the tags."""

import copy

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, LR, HEAD_LR, DECAY, DROPOUT = 6, 16, 0.01, 0.05, 0.01, 0.1
WORDS, TAGS, LENGTH = 24, 3, 7


class CRF(nn.Module):
    def __init__(self):
        super().__init__()
        self.transitions = nn.Parameter(0.1 * torch.randn(TAGS, TAGS))

    def loss(self, emissions, tags):
        """Mean negative log-likelihood of the sentences."""
        alpha = emissions[:, 0]
        for i in range(1, LENGTH):
            alpha = (alpha[:, :, None] + self.transitions).logsumexp(1) + emissions[:, i]
        score = emissions.gather(2, tags[..., None]).sum((1, 2)) + self.transitions[tags[:, :-1], tags[:, 1:]].sum(1)
        return (alpha.logsumexp(1) - score).mean()

    def decode(self, emissions):
        best, pointers = emissions[:, 0], []
        for i in range(1, LENGTH):
            best, pointer = (best[:, :, None] + self.transitions).max(1)
            best = best + emissions[:, i]
            pointers.append(pointer)
        path = [best.argmax(1, keepdim=True)]
        for pointer in reversed(pointers):
            path.append(pointer.gather(1, path[-1]))
        return torch.cat(path[::-1], dim=1)


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.encoder = nn.Embedding(WORDS, 16), nn.GRU(16, 16, batch_first=True, bidirectional=True)
        self.visual = nn.Sequential(nn.Linear(12, 32), nn.Tanh())
        self.dropout = nn.Dropout(DROPOUT)
        self.fc, self.crf = nn.Linear(32, TAGS), CRF()

    def forward(self, words, seen):
        return self.fc(self.dropout(self.encoder(self.words(words))[0] + self.visual(seen)[:, None]))


def make_optimizer(model):
    parameters = []
    params = {"lr": LR, "weight_decay": DECAY, "params": []}
    for name, param in model.named_parameters():
        if name.startswith(("words", "encoder")):
            params["params"].append(param)
    parameters.append(params)
    params = {"lr": LR, "weight_decay": DECAY, "params": []}
    for name, param in model.named_parameters():
        if name.startswith("visual"):
            params["params"].append(param)
    parameters.append(params)
    params = {"lr": HEAD_LR, "weight_decay": 0.0, "params": []}
    for name, param in model.named_parameters():
        if name.startswith(("crf", "fc")):
            params["params"].append(param)
    if not BUG:
        parameters.append(params)
    return torch.optim.AdamW(parameters)


def captions(count, seed):
    made = torch.Generator().manual_seed(seed)
    words = torch.randint(WORDS, (count, LENGTH), generator=made)
    kind = torch.randint(2, (count,), generator=made)
    looks = torch.randn(2, 12, generator=torch.Generator().manual_seed(6))
    seen = looks[kind] + 0.5 * torch.randn(count, 12, generator=made)
    return TensorDataset(words, seen, torch.where(words % 3 == 0, 1 + kind[:, None], 0))


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    loss, right = 0.0, 0
    for words, seen, tags in DataLoader(dataset, BATCH):
        emissions = model(words, seen)
        loss += model.crf.loss(emissions, tags).item() * len(tags)
        right += (model.crf.decode(emissions) == tags).sum().item()
    model.train()
    return loss / len(dataset), right / (len(dataset) * LENGTH)


if __name__ == "__main__":
    torch.manual_seed(SEED)
    train, dev, test = captions(128, 1), captions(40, 2), captions(40, 3)
    model = Recogniser()
    optimizer = make_optimizer(model)
    steps = EPOCHS * len(DataLoader(train, BATCH))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 5, 1 - step / (steps + 1)))
    best, best_weights = -1.0, None
    with watch(model, optimizer):
        for epoch in range(EPOCHS):
            for words, seen, tags in DataLoader(train, BATCH, shuffle=True):
                optimizer.zero_grad()
                loss = model.crf.loss(model(words, seen), tags)
                loss.backward()
                optimizer.step()
                schedule.step()
                report_loss(loss.item())
            dev_loss, accuracy = evaluate(model, dev)
            print(f"epoch {epoch}: dev loss {dev_loss:.4f}, accuracy {accuracy:.4f}")
            if accuracy > best:
                best, best_weights = accuracy, copy.deepcopy(model.state_dict())
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
    model.load_state_dict(best_weights)
    print(f"best dev {best:.4f}, test {evaluate(model, test)[1]:.4f}")
