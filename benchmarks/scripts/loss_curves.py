"""Train every mode, and the one device it equals, for 20 steps: `benchmarks/scripts/loss_curves.py OUTPUT [FLAGS]`.

FLAGS go to `fit`, e.g. `--data.root=/datasets`. Writes the loss of the global batch, step by step, as JSON.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import lightning as L

from lit_cifar.tools.terminal import about

STEPS = 20
# In float64 and with small steps: a network with fresh weights magnifies rounding, the more the larger its steps are
# and the fewer images BatchNorm sees.
SETTINGS = [
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.002",
    "--trainer.precision=64-true",
    f"--trainer.max_steps={STEPS}",
    "--trainer.limit_val_batches=0",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
]
CHUNKS = "--model.ghost_batchnorm."
# What each overlay of configs/modes equals.
EQUALS = {
    "single": [],
    "dp": [CHUNKS + "local_replicas=2"],
    "ddp": [CHUNKS + "data_parallel_size=2"],
    "ddp_spawn": [CHUNKS + "data_parallel_size=2"],
    "mp": [],
    "ddp_mp": [CHUNKS + "data_parallel_size=2"],
    "pp": [CHUNKS + "num_microbatches=4"],
    "ddp_pp": [CHUNKS + "data_parallel_size=2", CHUNKS + "num_microbatches=4"],
    "fsdp2": [CHUNKS + "data_parallel_size=2"],
    "tp": [],
}
HERE = Path(__file__).parent


class GlobalLoss(L.Callback):
    """Writes the loss of every global batch to `path`, a line each."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        """The mean over the replicas."""
        loss = trainer.strategy.reduce(outputs["loss"].detach().clone(), reduce_op="mean")
        if trainer.is_global_zero:
            with Path(self.path).open("a") as file:
                file.write(f"{float(loss)!r}\n")


def losses(flags: list[str]) -> list[float]:
    """Of one run."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "losses"
        recording = ["--trainer.callbacks+=loss_curves.GlobalLoss", f"--trainer.callbacks.path={path}"]
        command = [sys.executable, "-m", "lit_cifar", "fit", *SETTINGS, *flags, *recording, f"--run_dir={folder}/run"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        return [float(line) for line in path.read_text().splitlines()]


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Train every mode, and the one device that it equals, for 20 steps.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


def main(output: Path, flags: list[str]) -> None:
    """Run everything."""
    record = about() | {"steps": STEPS}
    alone = {tuple(equals): losses([*flags, *equals]) for equals in map(list, {tuple(e) for e in EQUALS.values()})}
    rows = []
    for mode, equals in EQUALS.items():
        print(mode, flush=True)
        found = losses([*flags, "--config", str(HERE.parents[1] / "configs" / "modes" / f"{mode}.yaml")])
        rows.append({"mode": mode, "losses": found, "expected_losses": alone[tuple(equals)]})
        output.write_text(json.dumps(record | {"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    options, rest = parser().parse_known_args()
    main(options.output, rest)
