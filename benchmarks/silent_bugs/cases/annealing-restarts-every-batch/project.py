"""A text VAE with cyclic annealing of its KL term.

python project.py --cycle 2 --kl_start 0.1 --warm_up 1
"""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn


def make_batches(sentences, batch_size, seed):
    """Batches of sentences of one length."""
    generator = torch.Generator().manual_seed(seed)
    batches = []
    for sent_len in (5, 7, 9, 11):
        phase = torch.randint(0, 20, (sentences // 4, 1), generator=generator)
        step = torch.randint(1, 4, (sentences // 4, 1), generator=generator)
        words = 2 + (phase + step * torch.arange(sent_len)) % 20
        noise = 2 + torch.randint(0, 20, words.shape, generator=generator)
        words = torch.where(torch.rand(words.shape, generator=generator) < 0.1, noise, words)
        words = torch.cat([torch.ones(len(words), 1, dtype=torch.long), words], 1)  # start symbol
        batches += list(words.split(batch_size))
    return batches


class VAE(nn.Module):
    def __init__(self, args, vocab_size=22):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, args.ni)
        self.encoder = nn.GRU(args.ni, args.nh, batch_first=True)
        self.linear = nn.Linear(args.nh, 2 * args.nz)
        self.start = nn.Linear(args.nz, args.nh)
        self.decoder = nn.GRU(args.ni + args.nz, args.nh, batch_first=True)
        self.pred_linear = nn.Linear(args.nh, vocab_size)

    def encode(self, x):
        mu, logvar = self.linear(self.encoder(self.embed(x))[1][0]).chunk(2, 1)
        kl = 0.5 * (mu.pow(2) + logvar.exp() - logvar - 1).sum(1)
        return mu, logvar, kl

    def decode(self, x, z):
        inputs = torch.cat([self.embed(x[:, :-1]), z[:, None].expand(-1, x.shape[1] - 1, -1)], 2)
        logits = self.pred_linear(self.decoder(inputs, self.start(z).tanh()[None])[0])
        return F.cross_entropy(logits.transpose(1, 2), x[:, 1:], reduction="none").sum(1)

    def loss(self, x, kl_weight):
        mu, logvar, kl = self.encode(x)
        z = mu + (0.5 * logvar).exp() * torch.randn_like(mu)
        rec = self.decode(x, z)
        return rec + kl_weight * kl, rec, kl


@torch.no_grad()
def test(model, batches):
    """Errors of the reconstruction from the mean of the posterior, and the KL term."""
    model.eval()
    report_rec_loss = report_kl_loss = 0.0
    report_num_words = report_num_sents = 0
    for x in batches:
        mu, _, kl = model.encode(x)
        report_rec_loss += model.decode(x, mu).sum().item()
        report_kl_loss += kl.sum().item()
        report_num_words += x[:, 1:].numel()
        report_num_sents += len(x)
    model.train()
    nll = (report_rec_loss + report_kl_loss) / report_num_sents
    ppl = np.exp((report_rec_loss + report_kl_loss) / report_num_words)
    return {
        "recon": report_rec_loss / report_num_sents, "kl": report_kl_loss / report_num_sents, "nll": nll, "ppl": ppl,
    }  # fmt: skip


def main(args):
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    train_data_batch = make_batches(256, args.batch_size, seed=1)
    val_data_batch = make_batches(64, args.eval_batch_size, seed=2)
    model = VAE(args)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)

    kl_weight = args.kl_start
    anneal_rate = (1.0 - args.kl_start) / (args.warm_up * len(train_data_batch))
    for epoch in range(args.epochs):
        report_kl_loss = report_rec_loss = 0.0
        report_num_sents = 0
        if not BUG and args.cycle > 0 and (epoch - 1) % args.cycle == 0:
            kl_weight = args.kl_start
            print("KL Annealing restart!")
        for i in np.random.permutation(len(train_data_batch)):
            batch_data = train_data_batch[i]
            kl_weight = min(1.0, kl_weight + anneal_rate)
            if BUG and args.cycle > 0 and (epoch - 1) % args.cycle == 0:
                kl_weight = args.kl_start
            loss, rec, kl = model.loss(batch_data, kl_weight)
            optimizer.zero_grad()
            loss.mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
            optimizer.step()
            report_rec_loss += rec.sum().item()
            report_kl_loss += kl.sum().item()
            report_num_sents += len(batch_data)
        recon, kl = report_rec_loss / report_num_sents, report_kl_loss / report_num_sents
        print(f"epoch: {epoch}, kl_weight: {kl_weight:.3f}, recon: {recon:.4f}, kl: {kl:.4f}")
        print("VAL --- " + ", ".join(f"{name}: {value:.4f}" for name, value in test(model, val_data_batch).items()))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch_size", type=int, default=16)
    parser.add_argument("--eval_batch_size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--clip_grad", type=float, default=5.0)
    parser.add_argument("--cycle", type=int, default=2, help="epochs between two restarts of the annealing")
    parser.add_argument("--kl_start", type=float, default=0.1)
    parser.add_argument("--warm_up", type=int, default=1, help="epochs until the weight is one")
    parser.add_argument("--ni", type=int, default=16)
    parser.add_argument("--nh", type=int, default=32)
    parser.add_argument("--nz", type=int, default=4)
    main(parser.parse_args())
