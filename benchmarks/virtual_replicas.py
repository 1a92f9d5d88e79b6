"""What `--virtual_replicas` costs a step: `python benchmarks/virtual_replicas.py OUTPUT`.

ResNet34 with torchvision's stem on synthetic images, in float32. One device with one thread, and `ddp` on two processes
with one thread each, without the option and with 1, 2, 4 and 8 parts. All runs are alive and take turns.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from lit_cifar.bench.fits import Fit
from lit_cifar.bench.timing import measured_in_turn, ratio
from lit_cifar.bench.turns import training_in_turn
from lit_cifar.commands.terminal import about, say

BATCH_SIZE, STEPS, ROUNDS = 128, 3, 5
PARTS = {1: (None, 1, 2, 4, 8), 2: (None, 2, 4, 8)}  # by the number of processes


def fit(processes: int, parts: int | None) -> Fit:
    """A run that is long enough for all turns."""
    num_train = BATCH_SIZE * (1 + STEPS) * (ROUNDS + 1)
    flags = ["--model.stem=imagenet", "--data.dataset=synthetic", "--data.val_size=0", f"--data.num_train={num_train}"]
    flags += [f"--data.batch_size={BATCH_SIZE}", "--data.eval_batch_size=8", "--trainer.accelerator=cpu"]
    flags += ["--trainer.enable_progress_bar=false"]
    flags += [f"--trainer.devices={processes}"] + (["--trainer.strategy=ddp"] if processes > 1 else [])
    flags += [] if parts is None else [f"--virtual_replicas={parts}"]
    return Fit(flags=flags, num_ranks=processes)


def main(output: Path) -> None:
    record: dict[str, Any] = about() | {
        "batch_size": BATCH_SIZE,
        "rounds": ROUNDS,
        "steps_of_a_round": STEPS,
        "rows": [],
    }
    for processes, all_parts in PARTS.items():
        fits = {str(parts): fit(processes, parts) for parts in all_parts}
        with (
            tempfile.TemporaryDirectory(prefix="virtual-replicas-") as folder,
            training_in_turn(fits, folder=Path(folder)) as seconds,
        ):
            for name in fits:
                seconds(name, steps=1, skip=1)
            times = {name: partial(seconds, name, steps=STEPS, skip=1) for name in fits}
            found = measured_in_turn(times, rounds=ROUNDS)
        for parts in all_parts:
            own = found[str(parts)]
            price = ratio(own, found["None"])
            row = {"processes": processes, "parts": parts, "step_s": own.values, "price": price.values}
            record["rows"].append(row)
            say(f"{processes} processes, {parts} parts: {own.median:.2f} s a step, {price.median:.2f} times plain")
    output.write_text(json.dumps(record, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time steps with and without virtual replicas.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    main(parser().parse_args().output)
