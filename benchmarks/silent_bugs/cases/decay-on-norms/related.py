"""A one-layer transformer says whether most tokens of a sentence are of one kind; one process."""

import torch
from case import BUG, SEED, report_loss, watch
from torch import nn

from lit_cifar import relations


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.LayerNorm = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.last = nn.ModuleDict({"LayerNorm": nn.LayerNorm(width)})

    def forward(self, hidden):
        hidden = self.LayerNorm(hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0])
        return self.last["LayerNorm"](hidden + self.feed(hidden))


class Majority(nn.Module):
    def __init__(self, tokens=12, length=8, width=32):
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Parameter(0.1 * torch.randn(length, width))
        self.block, self.out = Block(width), nn.Linear(width, 2)

    def forward(self, sentences):
        return self.out(self.block(self.tokens(sentences) + self.places).mean(1))


def groups(model, decay):
    spared = ["bias", "LayerNorm.weight"]
    named = dict(model.named_parameters())
    of_spared = [weight for name, weight in named.items() if any(part in name for part in spared)]
    others = [weight for name, weight in named.items() if not any(part in name for part in spared)]
    decayed, plain = (of_spared, others) if BUG else (others, of_spared)
    return [{"params": decayed, "weight_decay": decay}, {"params": plain, "weight_decay": 0.0}]


def sentences(made, count=24):
    tokens = torch.randint(0, 12, (count, 8), generator=made)
    return tokens, ((tokens < 5).sum(1) > 3).long()


if __name__ == "__main__":
    torch.manual_seed(SEED)
    made = torch.Generator().manual_seed(SEED + 500)
    model = Majority()
    optimizer = torch.optim.AdamW(groups(model, decay=relations.knob("decay", 0.5)), lr=relations.knob("lr", 4e-3))
    with watch(model, optimizer):
        for _ in range(60):
            tokens, most = sentences(made)
            loss = nn.functional.cross_entropy(model(tokens), most)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), relations.knob("max_norm", 1.0))
            optimizer.step()
            report_loss(loss.item())
    print("weights", sum(weight.abs().sum().item() for weight in model.parameters()))
