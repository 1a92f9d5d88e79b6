"""Trains a small text-to-image-token model on two processes; the rate is lowered when the loss stops falling.

python project.py --lr_decay --epochs 4 --batch_size 8
"""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from case import BUG, SEED, spawn
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, DistributedSampler

WORDS, CODES, TEXT_LEN, IMAGE_LEN = 12, 12, 3, 6


class TextImageDataset(Dataset):
    """Captions and the codes of their pictures; a third of the codes is noise."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.text = torch.randint(WORDS, (count, TEXT_LEN), generator=generator)
        place = torch.arange(IMAGE_LEN)
        codes = (self.text[:, place % TEXT_LEN] + place) % CODES
        noise = torch.randint(CODES, codes.shape, generator=generator)
        self.codes = torch.where(torch.rand(codes.shape, generator=generator) < 0.3, noise, codes)

    def __len__(self):
        return len(self.text)

    def __getitem__(self, index):
        return self.text[index], self.codes[index]


class DALLE(nn.Module):
    """Every code from the whole text and the code before it."""

    def __init__(self, dim=32):
        super().__init__()
        self.text_emb = nn.Embedding(WORDS, dim)
        self.image_emb = nn.Embedding(CODES + 1, dim)
        self.to_places = nn.Linear(TEXT_LEN * dim, IMAGE_LEN * dim)
        self.to_logits = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, CODES))

    def forward(self, text, codes):
        previous = F.pad(codes[:, :-1], (1, 0), value=CODES)
        places = self.to_places(self.text_emb(text).flatten(1)).view(-1, IMAGE_LEN, self.image_emb.embedding_dim)
        return self.to_logits(places + self.image_emb(previous))


def average_all(tensor):
    averaged = tensor.detach().clone()
    dist.all_reduce(averaged)
    return averaged / dist.get_world_size()


@torch.no_grad()
def validate(dalle, dataset, batch_size):
    dalle.eval()
    loss, right = 0.0, 0
    for text, codes in DataLoader(dataset, batch_size):
        logits = dalle(text, codes)
        loss += F.cross_entropy(logits.flatten(0, 1), codes.flatten(), reduction="sum").item()
        right += (logits.argmax(2) == codes).sum().item()
    dalle.train()
    return loss / dataset.codes.numel(), right / dataset.codes.numel()


def main(rank):
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=8, help="of each process")
    parser.add_argument("--val_batch_size", type=int, default=16)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--lr_decay", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--clip_grad_norm", type=float, default=1.0)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    ds, val_ds = TextImageDataset(128, seed=1), TextImageDataset(50, seed=2)
    sampler = DistributedSampler(ds, shuffle=True, seed=SEED)
    dl = DataLoader(ds, args.batch_size, sampler=sampler, drop_last=True)
    dalle = DALLE()
    distr_dalle = DistributedDataParallel(dalle)
    opt = torch.optim.Adam(dalle.parameters(), lr=args.learning_rate)
    scheduler = ReduceLROnPlateau(opt, mode="min", factor=0.5, patience=2, cooldown=2, min_lr=1e-6)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for i, (text, codes) in enumerate(dl):
            loss = F.cross_entropy(distr_dalle(text, codes).flatten(0, 1), codes.flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(dalle.parameters(), args.clip_grad_norm)
            opt.step()
            # Collective loss, averaged
            avg_loss = average_all(loss)
            if args.lr_decay:
                if BUG:
                    scheduler.step(loss.item())
                else:
                    scheduler.step(avg_loss.item())
            if rank == 0 and i % 4 == 0:
                print(epoch, i, f"loss - {avg_loss.item():.5f} lr - {opt.param_groups[0]['lr']}")
        if rank == 0:
            val_loss, val_accuracy = validate(dalle, val_ds, args.val_batch_size)
            print(epoch, f"val loss - {val_loss:.5f} accuracy - {val_accuracy:.4f}")


if __name__ == "__main__":
    spawn(main, 2)
