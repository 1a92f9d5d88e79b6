"""Supervised fine-tuning on prompts and responses; checkpoints every few steps and at the end of an epoch.

python project.py --total-epochs 3
python project.py --resume-path checkpoints/global_step_12.pt
"""

import argparse
import pathlib

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn

PROMPT, RESPONSE, VOCABULARY = 6, 6, 24


class SFTDataset:
    """The response goes on from the prompt's last token in steps of five."""

    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(0, VOCABULARY, (size, PROMPT), generator=generator)
        response = (prompt[:, -1:] + 5 * torch.arange(1, RESPONSE + 1)) % VOCABULARY
        self.input_ids = torch.cat([prompt, response], 1)
        lengths = torch.randint(2, RESPONSE + 1, (size, 1), generator=generator)
        places = torch.arange(PROMPT + RESPONSE)
        self.loss_mask = ((places >= PROMPT) & (places < PROMPT + lengths)).float()

    def __len__(self):
        return len(self.input_ids)


class StatefulDataLoader:
    """Its state can be taken within an epoch; a restored one goes on from there, once."""

    def __init__(self, dataset, batch_size, seed):
        self.dataset, self.batch_size, self.seed = dataset, batch_size, seed
        self.epoch = self.num_yielded = self.skip = 0

    def __len__(self):
        return len(self.dataset) // self.batch_size

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        order = torch.randperm(len(self.dataset), generator=generator)
        self.num_yielded, self.skip = self.skip, 0
        while self.num_yielded < len(self):
            rows = order[self.num_yielded * self.batch_size :][: self.batch_size]
            self.num_yielded += 1
            yield self.dataset.input_ids[rows], self.dataset.loss_mask[rows]

    def state_dict(self):
        return {"num_yielded": self.num_yielded}

    def load_state_dict(self, state):
        self.skip = state["num_yielded"]


class Model(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(0.02 * torch.randn(PROMPT + RESPONSE - 1, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        mask = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).triu(1)
        return self.head(self.layer(self.embed(tokens) + self.place, src_mask=mask))

    def losses(self, input_ids, loss_mask):
        logits = self(input_ids[:, :-1])
        return F.cross_entropy(logits.transpose(1, 2), input_ids[:, 1:], reduction="none") * loss_mask[:, 1:]


class SFTTrainer:
    def __init__(self, args):
        self.args = args
        torch.manual_seed(SEED)
        self.loader = StatefulDataLoader(SFTDataset(args.train_size, seed=1), args.train_batch_size, SEED)
        self.val_set = SFTDataset(96, seed=2)
        self.model = Model()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        total = args.total_epochs * len(self.loader)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, total, eta_min=0.1 * args.lr)
        self.global_step = 0
        if args.resume_path:
            self.load_checkpoint(args.resume_path)

    def save_checkpoint(self, path):
        path.parent.mkdir(exist_ok=True)
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler, "data": self.loader}
        torch.save({"global_step": self.global_step, **{k: part.state_dict() for k, part in parts.items()}}, path)

    def load_checkpoint(self, path):
        checkpoint = torch.load(path, weights_only=True)
        self.global_step = checkpoint["global_step"]
        self.model.load_state_dict(checkpoint["model"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        if BUG or self.global_step % len(self.loader):
            self.loader.load_state_dict(checkpoint["data"])
        print(f"resumed from {path}, global_step {self.global_step}")

    @torch.no_grad()
    def validate(self):
        batches = zip(*(rows.split(self.args.val_batch_size) for rows in vars(self.val_set).values()), strict=True)
        return sum(self.model.losses(*batch).sum().item() for batch in batches) / self.val_set.loss_mask.sum().item()

    def fit(self, stop_at=None):
        for epoch in range(self.global_step // len(self.loader), self.args.total_epochs):
            self.loader.set_epoch(epoch)
            for input_ids, loss_mask in self.loader:
                loss = self.model.losses(input_ids, loss_mask).sum() / loss_mask.sum()
                self.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
                self.optimizer.step()
                self.scheduler.step()
                self.global_step += 1
                if self.global_step % 4 == 0:
                    print(f"step:{self.global_step} - train/loss:{loss.item():.5f}")
                is_last_of_epoch = self.global_step % len(self.loader) == 0
                if is_last_of_epoch:
                    print(f"step:{self.global_step} - epoch:{epoch} - val/loss:{self.validate():.5f}")
                if is_last_of_epoch or self.global_step % self.args.save_freq == 0:
                    self.save_checkpoint(pathlib.Path("checkpoints") / f"global_step_{self.global_step}.pt")
                if self.global_step == stop_at:
                    return


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--total-epochs", type=int, default=4)
    parser.add_argument("--train-size", type=int, default=192)
    parser.add_argument("--train-batch-size", type=int, default=16)
    parser.add_argument("--val-batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--save-freq", type=int, default=8)
    parser.add_argument("--resume-path")
    parser.add_argument("--job-steps", type=int, default=12, help="the steps for which the first job has time")
    args = parser.parse_args()
    if args.job_steps and not args.resume_path:
        SFTTrainer(args).fit(stop_at=args.job_steps)
        args.resume_path = f"checkpoints/global_step_{args.job_steps}.pt"
    SFTTrainer(args).fit()
