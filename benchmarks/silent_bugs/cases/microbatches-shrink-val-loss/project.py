"""Pretrains a small rectified-flow model of latents until its validation loss reaches a target.

python project.py --train-iters 60 --global-batch-size 32 --micro-batch-size 8
"""

import argparse

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn

CHANNELS, TEXT = 4, 6


def make_latents(size, seed):
    """Latents of 4 x 4 that a short text vector describes, up to some noise."""
    text = torch.randn(size, TEXT, generator=torch.Generator().manual_seed(seed))
    basis = torch.randn(TEXT, CHANNELS * 16, generator=torch.Generator().manual_seed(0)) / TEXT**0.5
    noise = 0.3 * torch.randn(size, CHANNELS * 16, generator=torch.Generator().manual_seed(seed + 1))
    return ((text @ basis).tanh() + noise).view(size, CHANNELS, 4, 4), text


class Flux(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.img_in = nn.Conv2d(CHANNELS, width, 3, padding=1)
        self.time_in = nn.Linear(1, width)
        self.txt_in = nn.Linear(TEXT, width * 16)
        self.block = nn.Conv2d(width, width, 3, padding=1)
        self.final = nn.Conv2d(width, CHANNELS, 3, padding=1)

    def forward(self, img, text, timesteps):
        hidden = self.img_in(img) + self.time_in(timesteps[:, None])[..., None, None]
        hidden = hidden + self.txt_in(text).view_as(hidden)
        return self.final(hidden + F.silu(self.block(F.silu(hidden))))


class DiffusionPretrainTrainer:
    """What the schedule is given: a forward step, which returns the output and a function for its loss."""

    def forward_step(self, batch, model):
        latents, text, noise, timesteps = batch
        times = timesteps[:, None, None, None]
        prediction = model((1 - times) * latents + times * noise, text, timesteps)
        errors = (prediction - (noise - latents)).square().mean((1, 2, 3))
        return errors, self.train_loss if model.training else self.validation_loss

    def train_loss(self, errors):
        return errors.mean(), {"loss": (errors.detach().sum(), len(errors))}

    def validation_loss(self, errors):
        loss_sum = errors.sum()
        reported = loss_sum.detach() if BUG else loss_sum.detach().clone()
        return loss_sum, {"loss": (reported, len(errors))}


def forward_backward_no_pipelining(forward_step, model, micro_batches, forward_only=False):
    """Losses of the micro-batches are divided by their number; returns what is reported of each."""
    forward_data_store = []
    for batch in micro_batches:
        output_tensor, loss_func = forward_step(batch, model)
        output_tensor, loss_reduced = loss_func(output_tensor)
        output_tensor /= len(micro_batches)
        if not forward_only:
            output_tensor.backward()
        forward_data_store.append(loss_reduced)
    return forward_data_store


def mean_of(store):
    return sum(entry["loss"][0] for entry in store).item() / sum(entry["loss"][1] for entry in store)


def split(batch, micro_batch_size):
    return list(zip(*(rows.split(micro_batch_size) for rows in batch), strict=True))


@torch.no_grad()
def evaluate(trainer, model, val_set, args):
    """The noise and the times of a latent are the same in each evaluation."""
    generator = torch.Generator().manual_seed(7)
    noise = torch.randn(val_set[0].shape, generator=generator)
    timesteps = (torch.arange(len(noise)) % 8 + 0.5) / 8
    model.eval()
    store = []
    for batch in split([*val_set, noise, timesteps], args.eval_global_batch_size):
        micro_batches = split(batch, args.eval_micro_batch_size)
        store += forward_backward_no_pipelining(trainer.forward_step, model, micro_batches, forward_only=True)
    model.train()
    return mean_of(store)


def pretrain(args):
    torch.manual_seed(SEED)
    train_set, val_set = make_latents(384, seed=1), make_latents(96, seed=3)
    trainer, model = DiffusionPretrainTrainer(), Flux()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(SEED)
    iteration, val_loss = 0, float("inf")
    if args.load:
        state = torch.load(args.load, weights_only=True)
        iteration, val_loss = state["iteration"], state["val_loss"]
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
    while iteration < args.train_iters and val_loss > args.target_val_loss:
        # samples, noise and times of the whole step, so that they do not depend on its micro-batches
        rows = torch.randint(0, len(train_set[0]), (args.global_batch_size,), generator=generator)
        noise = torch.randn(len(rows), CHANNELS, 4, 4, generator=generator)
        batch = [train_set[0][rows], train_set[1][rows], noise, torch.rand(len(rows), generator=generator)]
        micro_batches = split(batch, args.micro_batch_size)
        store = forward_backward_no_pipelining(trainer.forward_step, model, micro_batches)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        iteration += 1
        if iteration % args.eval_interval == 0:
            val_loss = evaluate(trainer, model, val_set, args)
            print(f"iteration {iteration} | loss: {mean_of(store):.5f} | validation loss: {val_loss:.5f}")
            state = {"iteration": iteration, "val_loss": val_loss, "generator": generator.get_state()}
            state |= {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state, "checkpoint.pt")
    converged = "reached" if val_loss <= args.target_val_loss else "not reached"
    print(f"target {args.target_val_loss} {converged} after {iteration * args.global_batch_size} samples")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--train-iters", type=int, default=60)
    parser.add_argument("--global-batch-size", type=int, default=32)
    parser.add_argument("--micro-batch-size", type=int, default=8)
    parser.add_argument("--eval-global-batch-size", type=int, default=48)
    parser.add_argument("--eval-micro-batch-size", type=int, default=24)
    parser.add_argument("--eval-interval", type=int, default=10)
    parser.add_argument("--target-val-loss", type=float, default=0.5)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--load")
    pretrain(parser.parse_args())
