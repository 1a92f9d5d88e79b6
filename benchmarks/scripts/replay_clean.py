"""Does `Replay` call wrong what is right? `python benchmarks/scripts/replay_clean.py OUTPUT`.

Trainings as users write them, on 1, 2 and 3 CPU processes. Network, optimizer, schedule, precision, accumulation,
clipping, kind of `ddp` or FSDP2, and batch size are drawn at random by number. The trainer is taken to be right, so a
FAIL would be a false alarm.
"""

import argparse
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import clean_networks
import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from lit_cifar import Replay
from lit_cifar.tools.terminal import about

PROCESSES = {1: 50, 2: 110, 3: 50}  # how many trainings each
STEPS = 3
NETWORKS = (
    "Plain",
    "Grouped",
    "Normalised",
    "Depthwise",
    "Attentive",
    "Tied",
    "Dropped",
    "Frozen",
    "Counted",
    "Blurred",
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True, "weight_decay": 1e-3},
    "Adam": {},
    "AdamW": {},
    "NAdam": {},
    "RAdam": {},
    "Adamax": {},
    "Adagrad": {},
    "Adadelta": {},
    "RMSprop": {},
    "ASGD": {},
    "Rprop": {},
}
SCHEDULES = ("none", "step", "epoch", "OneCycleLR")
KINDS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "find_unused": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "bucket_view": {"gradient_as_bucket_view": True},
}
FSDP2 = "fsdp2"
CLIPPING = ({}, {"gradient_clip_val": 0.1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})


def drawn(number: int) -> dict[str, Any]:
    """The settings of a training."""
    choose = random.Random(number).choice
    kind = choose([*KINDS, FSDP2])
    return {
        "number": number,
        "network": choose(NETWORKS),
        # torch's Rprop writes into parts of tensors that are divided, which it refuses.
        "optimizer": choose([name for name in OPTIMIZERS if kind != FSDP2 or name != "Rprop"]),
        "schedule": choose(SCHEDULES),
        # Lightning's strategy for FSDP2 refuses float64.
        "precision": choose(["32-true", "bf16-mixed", *["64-true"] * (kind != FSDP2)]),
        # torch's reducer fails where a static graph accumulates.
        "accumulation": 1 if kind == "static_graph" else choose([1, 1, 2, 3]),
        "clipping": choose([0, 0, 1, 2]),
        "kind": kind,
        "batch_size": choose([4, 5, 8]),
        "at": choose([0, 0, 2]),
    }


class Task(pl.LightningModule):
    """A classifier that returns its loss, as some do, or a dictionary with its predictions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__()
        self.settings = settings
        self.network = getattr(clean_networks, settings["network"])()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        images, labels = batch
        logits = self.network(images)
        loss = cross_entropy(logits, labels)
        self.log("loss", loss, sync_dist=self.settings["number"] % 2 == 0)
        return {"loss": loss, "predictions": logits} if self.settings["number"] % 3 == 0 else loss

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            for layer in self.network.children():
                if [*layer.parameters()]:
                    fully_shard(layer, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.network, mesh=self.device_mesh["data_parallel"])

    def configure_optimizers(self) -> Any:
        name, schedule = self.settings["optimizer"], self.settings["schedule"]
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = getattr(torch.optim, name)(trained, lr=1e-2, **OPTIMIZERS[name])
        if schedule == "none":
            return optimizer
        if schedule == "OneCycleLR" and name in ("SGD", "Adam", "AdamW", "RMSprop", "NAdam", "RAdam"):
            steps = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.02, total_steps=100)
            return [optimizer], [{"scheduler": steps, "interval": "step"}]
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": decay, "interval": "epoch" if schedule == "epoch" else "step"}]


def judged(settings: dict[str, Any], folder: Path, num_processes: int) -> dict[str, Any]:
    pl.seed_everything(settings["number"], verbose=False)
    generator = torch.Generator().manual_seed(settings["number"])
    dtype = torch.float64 if settings["precision"] == "64-true" else torch.float32
    images = torch.randn(50, 3, 32, 32, generator=generator).to(dtype)
    data = TensorDataset(images, torch.randint(0, 10, (50,), generator=generator))
    watch = Replay(STEPS, at=[settings["at"]], stop=True)
    strategy: Any = "auto"
    if num_processes > 1 and settings["kind"] == FSDP2:
        strategy = ModelParallelStrategy(data_parallel_size=num_processes, tensor_parallel_size=1)
    elif num_processes > 1:
        strategy = DDPStrategy(**KINDS[settings["kind"]])
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=num_processes,
        strategy=strategy,
        precision=settings["precision"],
        accumulate_grad_batches=settings["accumulation"],
        callbacks=[watch],
        max_steps=settings["at"] + STEPS,
        max_epochs=-1,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **CLIPPING[settings["clipping"]],
    )
    loader = DataLoader(data, settings["batch_size"], shuffle=True, drop_last=settings["accumulation"] > 1)
    trainer.fit(Task(settings), loader)
    (report,) = [report.as_json() for report in watch.reports if not report.subject]
    kept = (
        "outcome",
        "num_ranks",
        "num_steps",
        "counts",
        "largest_share",
        "seconds",
        "mebibytes",
        "abstained",
        "error",
    )
    return settings | {name: report[name] for name in kept} | {"findings": report["findings"][:2]}


def work(output: Path, num_processes: int) -> None:
    """What each process does."""
    torch.set_num_threads(1)
    first = 1000 * num_processes
    rows = []
    for number in range(first, first + PROCESSES[num_processes]):
        rows.append(judged(drawn(number), output.parent, num_processes))
    if os.environ.get("RANK", "0") == "0":
        output.write_text(json.dumps(rows))


def main(output: Path) -> None:
    record: dict[str, Any] = about() | {"steps": STEPS, "rows": []}
    with TemporaryDirectory() as folder:
        for num_processes in PROCESSES:
            found = Path(folder, "rows.json")
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
            own = [str(Path(__file__)), str(found), f"--processes={num_processes}"]
            subprocess.run([sys.executable, "-W", "ignore", *(torchrun if num_processes > 1 else []), *own], check=True)
            record["rows"] += json.loads(found.read_text())
    output.write_text(json.dumps(record, indent=1) + "\n")
    print(Counter(row["outcome"] for row in record["rows"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--processes", type=int, help="be one of so many processes")
    options = parser.parse_args()
    if options.processes is None:
        main(options.output)
    else:
        work(options.output, options.processes)
