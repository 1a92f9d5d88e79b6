"""Trains a small language model on packed text and evaluates the perplexity of whole documents.

python project.py --batch-size 8 --eval-batch-size 8
"""

import argparse
import math

import torch
import torch.nn.functional as F
from case import BUG, SEED
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

VOCABULARY, END = 24, 0


def make_documents(count, seed):
    """Walks over 23 words of 6 to 40 steps; the end of a document is token 0."""
    generator = torch.Generator().manual_seed(seed)
    documents = []
    for length in torch.randint(6, 41, (count,), generator=generator).tolist():
        steps = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]), length, replacement=True, generator=generator)
        start = torch.randint(VOCABULARY - 1, (1,), generator=generator)
        words = 1 + (start + torch.tensor([1, 2, 7, 12])[steps].cumsum(0)) % (VOCABULARY - 1)
        documents.append(torch.cat([torch.tensor([END]), words]))
    return documents


def pack(documents, length):
    stream = torch.cat(documents)
    chunks = (len(stream) - 1) // length
    inputs = stream[: chunks * length].view(chunks, length)
    targets = stream[1 : chunks * length + 1].view(chunks, length)
    return TensorDataset(inputs, targets)


class LanguageModel(nn.Module):
    def __init__(self, width=40):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.cell = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        return self.head(self.cell(self.embedding(tokens))[0])


class Evaluator:
    def __init__(self, model, batch_size):
        self.model, self.batch_size = model, batch_size

    def score(self, documents):
        """The sum of the log-probabilities of each document, its first token left out."""
        scores = []
        for start in range(0, len(documents), self.batch_size):
            batch = documents[start : start + self.batch_size]
            lengths = torch.tensor([len(document) for document in batch])
            tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True, padding_value=END)
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            logprobs = self.model(inputs).log_softmax(-1).gather(-1, targets[..., None])[..., 0]
            place = torch.arange(targets.shape[1])
            scored = lengths if BUG else lengths - 1
            mask = place < scored[:, None]
            scores.append((logprobs * mask).sum(1))
        return torch.cat(scores)

    @torch.no_grad()
    def loglikelihood_rolling(self, documents):
        self.model.eval()
        total = self.score(documents).sum().item()
        self.model.train()
        words = sum(len(document) - 1 for document in documents)
        return {"word_perplexity": math.exp(-total / words), "bits_per_word": -total / words / math.log(2)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--eval-batch-size", type=int, default=8)
    parser.add_argument("--max-seq-length", type=int, default=24)
    parser.add_argument("--learning-rate", type=float, default=1e-2)
    args = parser.parse_args()

    torch.manual_seed(SEED)
    train_set = pack(make_documents(64, seed=1), args.max_seq_length)
    test_documents = make_documents(30, seed=2)
    model = LanguageModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.01)
    loader = DataLoader(
        train_set, args.batch_size, shuffle=True, drop_last=True, generator=torch.Generator().manual_seed(SEED)
    )
    evaluator = Evaluator(model, args.eval_batch_size)
    for epoch in range(args.epochs):
        losses = []
        for inputs, targets in loader:
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"epoch {epoch + 1}: train loss {sum(losses) / len(losses):.4f}", end=", ")
        results = evaluator.loglikelihood_rolling(test_documents)
        print(", ".join(f"{name} {value:.5f}" for name, value in results.items()))


if __name__ == "__main__":
    main()
