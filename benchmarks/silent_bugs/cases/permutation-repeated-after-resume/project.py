"""Fine-tunes a small classifier, with checkpoints by steps that a later run can go on from.

python project.py --checkpointing_steps 5
python project.py --checkpointing_steps 5 --resume_from_checkpoint step_10.pt
"""

import argparse
import itertools

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Sampler, TensorDataset


class SeedableRandomSampler(Sampler):
    """Another order in each epoch, from the seed and the number of the epoch."""

    def __init__(self, data_source, seed):
        self.data_source, self.seed, self.epoch = data_source, seed, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return len(self.data_source)

    def __iter__(self):
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        yield from torch.randperm(len(self.data_source), generator=generator).tolist()


class SkipBatchSampler(BatchSampler):
    def __init__(self, sampler, batch_size, skip_batches=0):
        super().__init__(sampler, batch_size, drop_last=True)
        self.skip_batches = skip_batches

    def __len__(self):
        return super().__len__() - self.skip_batches

    def __iter__(self):
        return itertools.islice(super().__iter__(), self.skip_batches, None)


class DataLoaderShard(DataLoader):
    """Counts its passes over the data, and tells the sampler about them."""

    def __init__(self, dataset, batch_sampler, iteration=0, source=None):
        super().__init__(dataset, batch_sampler=batch_sampler)
        self.iteration, self.source = iteration, source

    def __iter__(self):
        self.batch_sampler.sampler.set_epoch(self.iteration)
        yield from super().__iter__()
        self.iteration += 1
        if self.source is not None and not BUG:
            self.source.iteration = self.iteration


def skip_first_batches(dataloader, num_batches):
    sampler = dataloader.batch_sampler
    skipping = SkipBatchSampler(sampler.sampler, sampler.batch_size, num_batches)
    return DataLoaderShard(dataloader.dataset, skipping, dataloader.iteration, source=dataloader)


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 12, generator=generator)
    labels = (inputs[:, 0] * inputs[:, 1] > 0).long() + 2 * (inputs[:, 2] + 0.5 * inputs[:, 3].square() > 0.4).long()
    return TensorDataset(inputs, labels)


@torch.no_grad()
def evaluate(model, dataset, batch_size):
    model.eval()
    loss, right = 0.0, 0
    for inputs, labels in DataLoader(dataset, batch_size):
        logits = model(inputs)
        loss += F.cross_entropy(logits, labels, reduction="sum").item()
        right += (logits.argmax(1) == labels).sum().item()
    model.train()
    return {"eval_loss": loss / len(dataset), "accuracy": right / len(dataset)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--num_epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--checkpointing_steps", type=int, default=5)
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_set, eval_set = make_data(128, seed=1), make_data(100, seed=2)
    model = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
    sampler = SkipBatchSampler(SeedableRandomSampler(train_set, SEED), args.batch_size)
    train_dataloader = DataLoaderShard(train_set, sampler)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, args.num_epochs * len(train_dataloader))

    overall_step, starting_epoch, resume_step = 0, 0, 0
    if args.resume_from_checkpoint:
        state = torch.load(args.resume_from_checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        overall_step = state["step"]
        starting_epoch, resume_step = divmod(overall_step, len(train_dataloader))
        train_dataloader.iteration = starting_epoch
        print(f"resumed from step {overall_step}")

    for epoch in range(starting_epoch, args.num_epochs):
        if epoch == starting_epoch and resume_step:
            active_dataloader = skip_first_batches(train_dataloader, resume_step)
        else:
            active_dataloader = train_dataloader
        for inputs, labels in active_dataloader:
            loss = F.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            overall_step += 1
            if overall_step % args.checkpointing_steps == 0:
                state = {
                    "model": model.state_dict(), "optimizer": optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(), "step": overall_step,
                }  # fmt: skip
                torch.save(state, f"step_{overall_step}.pt")
        print(f"epoch {epoch}:", evaluate(model, eval_set, args.eval_batch_size))


if __name__ == "__main__":
    main()
