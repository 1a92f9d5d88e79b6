"""Are faults of one rank found by `ReplicaAudit`, and are runs without one left alone? `audit_faults.py OUTPUT`.

Many short trainings of a plain LightningModule in `ddp`: networks, optimizers, precisions, accumulation and the number
of ranks vary. In some of them one rank goes wrong, at random. The processes stay, so a training takes a second.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from run_record import complete
from torch import Tensor, nn

from lit_cifar.errors import ReplicaAuditError
from lit_cifar.tools.audit import ReplicaAudit
from lit_cifar.tools.forked import ForkedRun
from lit_cifar.tools.terminal import say

EVERY, STEPS = 4, 16
KINDS = {
    "bit of a parameter": 40,
    "bit of an optimizer state": 40,
    "bit of a gradient, after averaging": 30,
    "bit of a gradient, before averaging, in a step that is repeated": 20,
    "bit of a gradient, before averaging, in another step": 10,
    "wrong multiplication for ten steps": 40,
    "wrong multiplication from the start": 10,
    "schedule one step off": 20,
    "none": 500,
}
_PART, _LIMIT_S = 61, 3600.0  # trainings in the same processes, and the seconds that they may take
Row = dict[str, Any]


class Attention(nn.Module):
    """With dropout, and one weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.twice = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.twice.linear1.weight = self.layer.linear1.weight
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.twice(self.layer(x.flatten(1).view(len(x), -1, 16))).mean(1))
        return logits


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(16, 12, batch_first=True), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.rnn(x.flatten(1).view(len(x), -1, 16))[0].mean(1))
        return logits


def frozen_start() -> nn.Module:
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.GELU(), nn.Flatten(), nn.Linear(288, 5))
    network[0].requires_grad_(requires_grad=False)
    return network


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout2d(0.2), nn.Flatten(), nn.Linear(288, 5)
    ),
    "mlp": lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 32), nn.Tanh(), nn.Dropout(0.3), nn.Linear(32, 5)),
    "attention": Attention,
    "recurrent": Recurrent,
    "frozen": frozen_start,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": lambda its: torch.optim.SGD(its, 0.02, momentum=0.9),
    "AdamW": lambda its: torch.optim.AdamW(its, 0.002),
    "RMSprop": lambda its: torch.optim.RMSprop(its, 0.001, momentum=0.5),
}


class Module(L.LightningModule):
    def __init__(self, network: str, optimizer: str, *, manual: bool) -> None:
        super().__init__()
        self.network, self.optimizer, self.automatic_optimization = NETWORKS[network](), optimizer, not manual
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 5))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        loss = nn.functional.cross_entropy(self.network(batch[0]) * self.scale, batch[1])
        self.log("loss", loss, sync_dist=True)
        if self.automatic_optimization:
            return loss
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.lr_schedulers().step()  # type: ignore[union-attr, call-arg]
        return None

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.optimizer]([its for its in self.parameters() if its.requires_grad])
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=STEPS)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fault(L.Callback):
    """Makes one rank go wrong, from step `at` on."""

    def __init__(self, kind: str, rank: int, at: int, seed: int) -> None:
        self.kind, self.rank, self.at = kind, rank, at
        self.random = random.Random(seed)
        self.tensor = ""

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank != self.rank:
            return
        step, here = trainer.global_step, trainer.global_step == self.at and not self.tensor
        parameters = {name: its for name, its in pl_module.named_parameters() if its.requires_grad}
        if "multiplication" in self.kind:
            _multiply_wrongly(self.at <= step < (STEPS if "start" in self.kind else self.at + 10))
        elif here and self.kind == "schedule one step off":
            self.tensor = "all"
            trainer.lr_scheduler_configs[0].scheduler.step()
        elif here and "before" in self.kind:
            self.tensor, parameter = self.random.choice([*parameters.items()])
            handle = parameter.register_hook(lambda gradient: (handle.remove(), flipped(gradient, self.random))[1])
        elif here and self.kind == "bit of a parameter":
            self.tensor, parameter = self.random.choice([*parameters.items()])
            parameter.data.copy_(flipped(parameter.data, self.random))
        elif here and self.kind == "bit of an optimizer state":
            names = {its: name for name, its in parameters.items()}
            states = [(f"{k} of {names[p]}", t) for p, s in trainer.optimizers[0].state.items() for k, t in s.items()]
            self.tensor, state = self.random.choice(
                [(name, its) for name, its in states if its is not None and its.dim()]
            )
            state.copy_(flipped(state, self.random))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: Any, optimizer: Any) -> None:
        if "after" in self.kind and (trainer.global_rank, trainer.global_step) == (self.rank, self.at):
            graded = [(name, its.grad) for name, its in pl_module.named_parameters() if its.grad is not None]
            self.tensor, gradient = self.random.choice(graded)
            gradient.copy_(flipped(gradient, self.random))

    def on_train_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        _multiply_wrongly(False)

    def on_exception(self, *_: Any) -> None:
        _multiply_wrongly(False)


def flipped(tensor: Tensor, chance: random.Random) -> Tensor:
    """A copy in which one bit of a number is another, so that it is finite and not large."""
    most = max(10.0, float(tensor.abs().max()))
    while True:
        its = tensor.detach().clone().contiguous()
        octets = its.view(-1).view(torch.uint8)
        octets[chance.randrange(len(octets))] ^= 1 << chance.randrange(8)
        if its.isfinite().all() and its.abs().max() <= most:
            return its


_linear, _conv2d = torch._C._nn.linear, torch.conv2d


def _multiply_wrongly(wrong: bool) -> None:
    """One product of each layer of this process is a few units in the last place off."""

    def slightly(real: Any) -> Any:
        def function(*args: Any, **kwargs: Any) -> Tensor:
            result: Tensor = real(*args, **kwargs)
            factor = torch.ones_like(result)
            factor.view(-1)[0] += 4 * torch.finfo(result.dtype).eps
            return result * factor

        return function

    nn.functional.linear = slightly(_linear) if wrong else _linear
    nn.functional.conv2d = slightly(_conv2d) if wrong else _conv2d


def trial(number: int, kind: str) -> Row:
    """One training on all ranks, and what the audit said."""
    chance = random.Random(number)
    ranks = dist.get_world_size()
    manual, wrong, seen = chance.random() < 0.2, chance.randrange(ranks), {}
    how = {
        "network": chance.choice([its for its in NETWORKS if its != "recurrent" or "multiplication" not in kind]),
        "optimizer": chance.choice([*OPTIMIZERS]),
        "precision": chance.choice(["32-true", "bf16-mixed", "64-true"]),
        "accumulate": 1 if manual else chance.choice([1, 2]),
        "clip": None if manual else chance.choice([None, 1.0]),
        "strategy": chance.choice(["ddp", "ddp_find_unused_parameters_true"]),
    }
    at = {"repeated": EVERY, "step": EVERY + 1, "start": 0}.get(kind.split()[-1], chance.randrange(1, STEPS - EVERY))
    torch.manual_seed(number)
    data = torch.utils.data.TensorDataset(torch.randn(192 * ranks, 3, 8, 8), torch.randint(0, 5, (192 * ranks,)))
    fault, audit = Fault(kind, wrong, at, number), ReplicaAudit(EVERY)
    trainer = L.Trainer(
        strategy=how["strategy"],
        accelerator="cpu",
        devices=ranks,
        max_steps=STEPS,
        max_epochs=-1,
        precision=how["precision"],
        accumulate_grad_batches=how["accumulate"],
        gradient_clip_val=how["clip"],
        callbacks=[fault, audit],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        trainer.fit(Module(how["network"], how["optimizer"], manual=manual), torch.utils.data.DataLoader(data, 12))
    except ReplicaAuditError as error:
        lines = [line for line in str(error).splitlines() if line.startswith("  ")]
        named = all(f"rank {wrong} differs" in line for line in lines)
        seen = {"after": trainer.global_step, "rank": named, "no majority": all("no majority" in it for it in lines)}
    tensors: list[Any] = [None] * ranks
    dist.all_gather_object(tensors, fault.tensor)
    its = {"kind": kind, "ranks": ranks, "manual": manual, "at": at, "tensor": tensors[wrong], **how}
    return its | {"repeats": audit._gradients is not None, "found": seen}


def ranks_of(cases: str, output: str) -> None:
    """In each process: all trials, one after the other."""
    warnings.simplefilter("ignore")
    torch.use_deterministic_algorithms(mode=True)
    dist.init_process_group("gloo")
    rows = []
    for number, kind in json.loads(cases):
        rows.append(trial(number, kind))
        if dist.get_rank() == 0:
            Path(output).write_text(json.dumps(rows))


def trained(case: tuple[int, list[tuple[int, str]]]) -> Row:
    ranks, cases = case
    with tempfile.TemporaryDirectory() as folder:
        log, output = Path(folder, "log"), Path(folder, "rows.json")
        paths = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
        words = [json.dumps(cases), str(output)]
        run = ForkedRun(
            words, environment=environment, stdout=log, stderr=log, num_ranks=ranks, module=Path(__file__).stem
        )
        if run.wait(_LIMIT_S) != 0:
            run.kill()
            raise RuntimeError(log.read_text())
        return {"ranks": ranks, "trials": json.loads(output.read_text())}


def main(output: Path, share: float) -> None:
    """`share` of all trials; two in five of them on two ranks, where there is no majority."""
    kinds = [kind for kind, number in KINDS.items() for _ in range(max(1, round(share * number)))]
    random.Random(0).shuffle(kinds)
    numbered = [*enumerate(kinds)]
    parts = [
        (2 if part % 5 < 2 else 3, numbered[at : at + _PART]) for part, at in enumerate(range(0, len(kinds), _PART))
    ]
    complete(output, parts, trained, settings={"every": EVERY, "steps": STEPS}, tell=lambda row: say(summary([row])))
    say(summary(json.loads(output.read_text())["rows"]))


def summary(rows: list[Row]) -> str:
    """A line for each kind: how many, found, of these on three ranks the rank named, and in how many steps at most."""
    lines = []
    for kind in KINDS:
        its = [trial for row in rows for trial in row["trials"] if trial["kind"] == kind]
        found = [trial for trial in its if trial["found"]]
        of_three = [trial for trial in found if trial["ranks"] == 3]
        named = sum(trial["found"]["rank"] for trial in found)
        most = max([trial["found"]["after"] - trial["at"] for trial in found], default=0)
        lines.append(
            f"{kind}: {len(its)}, found {len(found)} within {most} steps, rank named {named}, "
            f"on three ranks {sum(trial['found']['rank'] for trial in of_three)} of {len(of_three)}"
        )
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Are faults of one rank found, and runs without one left alone?")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--share", type=float, default=1.0, help="share of the trials")
    return parser


if __name__ == "__main__":
    if "RANK" in os.environ:
        ranks_of(*sys.argv[1:])
    else:
        main(**vars(parser().parse_args()))
