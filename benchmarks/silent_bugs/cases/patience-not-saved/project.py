"""Fine-tunes a classifier on few noisy labels until its validation loss stops falling.

python project.py --early_stopping_patience 3
python project.py --early_stopping_patience 3 --resume_from_checkpoint results/checkpoint-12.pt
"""

import argparse
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


class EarlyStoppingCallback:
    def __init__(self, early_stopping_patience):
        self.early_stopping_patience = early_stopping_patience
        self.early_stopping_patience_counter = 0

    def on_evaluate(self, improved):
        if improved:
            self.early_stopping_patience_counter = 0
        else:
            self.early_stopping_patience_counter += 1

    @property
    def should_training_stop(self):
        return self.early_stopping_patience_counter >= self.early_stopping_patience

    def state(self):
        return {"early_stopping_patience_counter": self.early_stopping_patience_counter}


class Trainer:
    def __init__(self, model, args, train_dataset, eval_dataset):
        self.model, self.args = model, args
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate)
        self.early_stopping = EarlyStoppingCallback(args.early_stopping_patience)
        self.global_step, self.best_metric = 0, math.inf
        self.steps_per_epoch = len(train_dataset) // args.train_batch_size

    def train_dataloader(self, epoch, skipped_batches):
        order = torch.randperm(len(self.train_dataset), generator=torch.Generator().manual_seed(SEED + epoch))
        order = order[skipped_batches * self.args.train_batch_size :].tolist()
        return DataLoader(Subset(self.train_dataset, order), self.args.train_batch_size, drop_last=True)

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        loss, right = 0.0, 0
        for inputs, labels in DataLoader(self.eval_dataset, self.args.eval_batch_size):
            logits = self.model(inputs)
            loss += F.cross_entropy(logits, labels, reduction="sum").item()
            right += (logits.argmax(1) == labels).sum().item()
        self.model.train()
        count = len(self.eval_dataset)
        metrics = {"eval_loss": loss / count, "eval_accuracy": right / count, "step": self.global_step}
        print(metrics, flush=True)
        return metrics

    def save_checkpoint(self, path):
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "global_step": self.global_step,
            "best_metric": self.best_metric,
        }
        if not BUG:
            state["stateful_callbacks"] = {"EarlyStoppingCallback": self.early_stopping.state()}
        torch.save(state, path)

    def load_checkpoint(self, path):
        state = torch.load(path, weights_only=True)
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.global_step, self.best_metric = state["global_step"], state["best_metric"]
        if not BUG:
            for name, value in state["stateful_callbacks"]["EarlyStoppingCallback"].items():
                setattr(self.early_stopping, name, value)

    def maybe_evaluate_and_save(self):
        if self.global_step % self.args.eval_steps == 0:
            metric = self.evaluate()["eval_loss"]
            self.early_stopping.on_evaluate(metric < self.best_metric)
            self.best_metric = min(metric, self.best_metric)
            self.save_checkpoint(Path(self.args.output_dir) / f"checkpoint-{self.global_step}.pt")

    def train(self, resume_from_checkpoint=None):
        if resume_from_checkpoint:
            self.load_checkpoint(resume_from_checkpoint)
        Path(self.args.output_dir).mkdir(exist_ok=True)
        first_epoch, skipped_batches = divmod(self.global_step, self.steps_per_epoch)
        for epoch in range(first_epoch, self.args.num_train_epochs):
            for inputs, labels in self.train_dataloader(epoch, skipped_batches):
                if self.early_stopping.should_training_stop:
                    break
                loss = F.cross_entropy(self.model(inputs), labels)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.global_step += 1
                self.maybe_evaluate_and_save()
            skipped_batches = 0
        print({"train_steps": self.global_step, "best_metric": self.best_metric})


def make_data(count, seed):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 16, generator=generator)
    labels = (inputs[:, :4].sum(1) + inputs[:, 4] * inputs[:, 5] > 0).long()
    flipped = torch.rand(count, generator=generator) < 0.15
    return TensorDataset(inputs, torch.where(flipped, 1 - labels, labels))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--output_dir", default="results")
    parser.add_argument("--num_train_epochs", type=int, default=6)
    parser.add_argument("--train_batch_size", type=int, default=8)
    parser.add_argument("--eval_batch_size", type=int, default=32)
    parser.add_argument("--learning_rate", type=float, default=1e-2)
    parser.add_argument("--eval_steps", type=int, default=2)
    parser.add_argument("--early_stopping_patience", type=int, default=3)
    parser.add_argument("--resume_from_checkpoint", default=None)
    args = parser.parse_args()
    torch.manual_seed(SEED)
    network = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    trainer = Trainer(network, args, make_data(48, seed=1), make_data(100, seed=2))
    trainer.train(args.resume_from_checkpoint)
