"""BEST-RQ pretraining on two processes: the codes of hidden frames are predicted from the frames around them.

python project.py --number_of_epochs 3 --batch_size 8
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

HIDDEN = 10  # frames of each utterance


class Utterances(Dataset):
    """Filter banks of three gliding tones; which frames are hidden depends on the epoch and the utterance alone."""

    def __init__(self, count, seed, frames=32, bands=12):
        generator = torch.Generator().manual_seed(seed)
        time = torch.linspace(0, 1, frames)[:, None]
        start, glide, pulse = torch.rand(3, count, 1, 3, generator=generator)
        tones = (bands - 1) * (start + 0.5 * torch.sin(6.28 * (glide * time + start))).clamp(0, 1)
        loudness = 1 + torch.sin(25 * pulse * time)
        far = torch.arange(bands) - tones[..., None]
        banks = (loudness[..., None] * torch.exp(-(far**2))).sum(2)
        self.banks = banks + 0.1 * torch.randn(banks.shape, generator=generator)
        self.seed, self.epoch = seed, 0

    def __len__(self):
        return len(self.banks)

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(1000003 * self.seed + 10007 * self.epoch + index)
        return self.banks[index], torch.randperm(self.banks.shape[1], generator=generator)[:HIDDEN]


class RandomProjectionQuantizer(nn.Module):
    """Frozen: the code of a frame is the nearest random vector to its random projection."""

    def __init__(self, input_dim, cb_dim, cb_vocab):
        super().__init__()
        self.register_buffer("P", torch.nn.init.xavier_uniform_(torch.empty(input_dim, cb_dim)))
        self.register_buffer("CB", F.normalize(torch.randn(cb_vocab, cb_dim), dim=1))

    def forward(self, x):
        x = F.normalize(x @ self.P, dim=-1)
        return (x @ self.CB.T).argmax(-1)


class Encoder(nn.Module):
    def __init__(self, bands, size, codes):
        super().__init__()
        self.mask_emb = nn.Parameter(torch.zeros(bands))
        self.frontend = nn.Sequential(nn.Conv1d(bands, size, 5, padding=2), nn.GELU())
        self.context = nn.GRU(size, size // 2, batch_first=True, bidirectional=True)
        self.linear = nn.Linear(size, codes)

    def forward(self, feats, hidden):
        rows = torch.arange(len(feats))[:, None]
        feats = feats.clone()
        feats[rows, hidden] = self.mask_emb
        out, _ = self.context(self.frontend(feats.transpose(1, 2)).transpose(1, 2))
        return self.linear(out)[rows, hidden]


class BestRQBrain:
    def __init__(self, modules, args):
        self.args, self.modules = args, modules
        self.optimizer = torch.optim.AdamW(modules.parameters(), lr=args.lr)
        self._wrap_distributed()

    def _wrap_distributed(self):
        for name, module in self.modules.items():
            if any(p.requires_grad for p in module.parameters()):
                self.modules[name] = DistributedDataParallel(module)

    def compute(self, batch):
        feats, hidden = batch
        feats = (feats - feats.mean((1, 2), keepdim=True)) / feats.std((1, 2), keepdim=True)
        targets = self.modules["quantizer"](feats).gather(1, hidden)
        encoder = self.modules["encoder"]
        encoder = encoder if encoder.training else encoder.module  # one process validates
        logits = encoder(feats, hidden)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()), (logits.argmax(-1) == targets)

    def fit(self, train_set, valid_set):
        sampler = DistributedSampler(train_set, seed=SEED)
        loader = DataLoader(train_set, self.args.batch_size, sampler=sampler, drop_last=True)
        for epoch in range(1, self.args.number_of_epochs + 1):
            sampler.set_epoch(epoch)
            train_set.epoch = epoch
            self.modules.train()
            total = 0.0
            for batch in loader:
                loss, _ = self.compute(batch)
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                total += loss.item()
            if dist.get_rank() == 0:
                valid = self.evaluate(valid_set)
                print(f"epoch: {epoch} - train loss: {total / len(loader):.4f} - valid {valid}")
            dist.barrier()

    @torch.no_grad()
    def evaluate(self, valid_set):
        self.modules.eval()
        total, right = 0.0, 0
        for batch in DataLoader(valid_set, self.args.valid_batch_size):
            loss, correct = self.compute(batch)
            total += loss.item() * len(correct)
            right += correct.sum().item()
        return {"loss": total / len(valid_set), "accuracy": right / len(valid_set) / HIDDEN}


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--number_of_epochs", type=int, default=3)
    parser.add_argument("--batch_size", type=int, default=8, help="of each process")
    parser.add_argument("--valid_batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=4e-3)
    args = parser.parse_args()
    torch.manual_seed(SEED + rank if BUG else SEED)
    modules = nn.ModuleDict(
        {
            "quantizer": RandomProjectionQuantizer(12, 8, 16),
            "encoder": Encoder(12, 32, 16),
        }
    )
    brain = BestRQBrain(modules, args)
    brain.fit(Utterances(144, seed=1), Utterances(48, seed=2))


if __name__ == "__main__":
    spawn(main, 2)
