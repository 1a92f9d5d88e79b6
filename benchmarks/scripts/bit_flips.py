"""Are flipped bits found, and is the right rank named? `bit_flips.py OUTPUT`.

One training for each mode. Between two audits one bit of a parameter, an optimizer state or a buffer is flipped on one
rank, all at random. After the audit all ranks take the values of one that was not hit, and the next bit is flipped.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import warnings
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from run_record import complete
from torch import Tensor, nn

from lit_cifar.tools.audit.callback import ReplicaAudit
from lit_cifar.tools.terminal import say

MODES = {"ddp": 3, "ddp_mp": 6, "ddp_pp": 6}
FAULTS, EVERY = 75, 4  # of each mode; steps between two audits
Row = dict[str, Any]


class Network(nn.Sequential):
    """With a constant buffer, BatchNorm, and blocks to cut between."""

    def __init__(self) -> None:
        blocks = [
            nn.Conv2d(3, 8, 3, 2),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            Scale(),
            nn.Conv2d(8, 8, 3, 2),
            nn.BatchNorm2d(8),
        ]
        super().__init__(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10))


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.9, 1.1, 8).view(1, 8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Flips(L.Callback):
    """Flips bits, and writes down what the audit has said of each."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.random = random.Random(0)  # the same on all ranks
        self.rows: list[Row] = []
        self.audits = 0
        self._fault: Row | None = None
        self._audit: Any = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._audit = next(it for it in trainer.callbacks if isinstance(it, ReplicaAudit))  # type: ignore[attr-defined]
        audited = self._audit._audit

        def audit(trainer: L.Trainer, held: Any) -> None:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                audited(trainer, held)
            self._judge(trainer, held, [line for it in said for line in str(it.message).splitlines()[1:-1]])

        self._audit._audit = audit

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        held = self._audit._held
        if self._fault is not None or trainer.global_step < EVERY or held._ignored is None:
            return
        if self.random.random() < 0.4:
            rank = self.random.randrange(trainer.world_size)
            tensors = dict(held._tensors())
            names = [None] * trainer.world_size
            dist.all_gather_object(names, [*tensors])
            name = self.random.choice(names[rank])  # type: ignore[arg-type]
            places = [(self.random.random(), self.random.randrange(8)) for _ in range(20)]
            if trainer.global_rank == rank:
                flip(tensors[name].data, places)
            self._fault = {"rank": rank, "tensor": name, "step": trainer.global_step}

    def _judge(self, trainer: L.Trainer, held: Any, lines: list[str]) -> None:
        """Only rank 0 has been told; then make all equal again."""
        fault, self._fault = self._fault, None
        self.audits += 1
        if trainer.is_global_zero and (fault or lines):
            told = [line for line in lines if fault and f"rank {fault['rank']} differs" in line]
            tensors = [line.strip().partition(":")[0] for line in told]
            row = {"found": bool(lines), "rank": bool(lines) and told == lines}
            self.rows.append({"fault": fault, **row, "tensor": bool(fault) and fault["tensor"] in tensors})
        differ = self._differ(held)
        if trainer.is_global_zero and (fault or lines):
            self.rows[-1]["differ"] = differ
        group = held._group
        if fault is not None:
            ranks = dist.get_process_group_ranks(group)
            source = next(rank for rank in ranks if rank != fault["rank"])
            for _, tensor in held._tensors():
                dist.broadcast(tensor.data, src=source, group=group)

    def _differ(self, held: Any) -> bool:
        """Whether the replicas do, byte for byte; a flip may vanish in rounding."""
        content = sha256(b"".join(it.detach().cpu().numpy().tobytes() for _, it in held._tensors())).hexdigest()
        ranks = dist.get_process_group_ranks(held._group)
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, (*ranks, content))
        return len(set(of_ranks)) > len({ranks[0] for ranks in of_ranks})

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([self.rows, self.audits]))


def flip(tensor: Tensor, places: list[tuple[float, int]]) -> None:
    """At the first place that leaves a number below 10: with larger ones the loss is soon not finite."""
    octets = tensor.view(-1).view(torch.uint8)
    for place, bit in places:
        octets[int(place * len(octets))] ^= 1 << bit
        if tensor.isfinite().all() and tensor.abs().max() < 10:
            return
        octets[int(place * len(octets))] ^= 1 << bit


def trained(mode: str) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.json")
        words = ["fit", f"--trainer.strategy={mode}", f"--trainer.devices={MODES[mode]}", "--trainer.accelerator=cpu"]
        words += ["--model.network=bit_flips.Network", "--data.dataset=synthetic", "--data.num_train=120"]
        words += ["--data.num_test=1", "--data.val_size=0", "--data.batch_size=24", f"--run_dir={folder}/run"]
        words += ["--trainer.max_epochs=-1", f"--trainer.max_steps={FAULTS * EVERY * 5 // 4}"]
        words += ["--last_checkpoint.every_n_epochs=0", "--trainer.enable_progress_bar=false"]
        words += [f"--replica_audit.every_n_steps={EVERY}", "--replica_audit.stop=false"]
        words += ["--trainer.callbacks+=bit_flips.Flips", f"--trainer.callbacks.path={path}"]
        subprocess.run([sys.executable, "-m", "lit_cifar", *words], check=True, capture_output=True)
        rows, audits = json.loads(path.read_text())
    row = {name: sum(bool(it[name]) for it in rows) for name in ("fault", "differ", "found", "rank", "tensor")}
    return {
        "mode": mode,
        "devices": MODES[mode],
        "audits": audits,
        **row,
        "vanished": sum(not it["differ"] for it in rows),
    }


def main(output: Path) -> None:
    complete(output, list(MODES), trained, settings={"audits_every": EVERY}, tell=say)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Are flipped bits found, and is the right rank named?")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
