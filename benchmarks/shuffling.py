"""Train with another order in every epoch and with one order: `python benchmarks/shuffling.py OUTPUT [FLAGS]`.

Is the accuracy worse without `set_epoch`, or is that another seed? FLAGS go to `fit`, e.g. `--data.root=/datasets`.
Both runs of a pair have the same initial weights and the same first epoch. The results are written as JSON after every
run; if OUTPUT is there already, only what it lacks is trained. `lit_cifar.analysis.comparing_runs` reads it, for
notebooks/shuffling.ipynb.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from fit_and_test import fit_and_test

from lit_cifar.commands.terminal import about, say

PROCESSES = (1, 2, 4)
CONFIG = Path(__file__).parents[1] / "configs" / "reproduce" / "single.yaml"
SETTINGS = [
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--data.num_train=1000",
    "--data.batch_size=64",
    "--trainer.accelerator=cpu",
    "--trainer.enable_progress_bar=false",
    "--figures.every_n_epochs=0",
]


def flags_of(*, seed: int, processes: int, set_epoch: bool) -> list[str]:
    """Of `fit`. With N processes of `ddp` each step has the same samples; BatchNorm normalises N parts, as here."""
    parts = [f"--model.ghost_batchnorm.num_shards={processes}"] if processes > 1 else []
    return [
        f"--seed_everything={seed}",
        f"--data.seed={seed}",
        f"--data.frozen_order={str(not set_epoch).lower()}",
        *parts,
    ]


def trained(flags: list[str]) -> dict[str, Any]:
    """Train and test once."""
    result = fit_and_test([f"--config={CONFIG}", *SETTINGS, *flags])
    found = {"losses": result.logged("train/loss"), "correct": result.correct, "total": result.total}
    return found | {"seconds": round(result.seconds)}


def main(output: Path, flags: list[str], *, seeds: int) -> None:
    """Seed by seed, so that an interrupted record is whole for the seeds that it has."""
    record: dict[str, Any] = about() | {"settings": SETTINGS, "rows": []}
    if output.exists():
        record = json.loads(output.read_text())
    runs = [
        {"seed": seed, "processes": processes, "set_epoch": not frozen}
        for seed in range(seeds)
        for processes in PROCESSES
        for frozen in (False, True)
    ]
    for which in runs[len(record["rows"]) :]:
        row = which | trained([*flags, *flags_of(**which)])
        record["rows"].append(row)
        output.write_text(json.dumps(record) + "\n")
        say(f"{row['seconds']:4d} s  {which}: {row['correct']} of {row['total']}")


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Train with another order in every epoch and with one order.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs for each number of processes")
    return parser


if __name__ == "__main__":
    arguments, rest = parser().parse_known_args()
    main(arguments.output, rest, seeds=arguments.seeds)
