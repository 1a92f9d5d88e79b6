"""Train with another order in every epoch and with one order: `python benchmarks/scripts/shuffling.py OUTPUT [FLAGS]`.

Is the accuracy worse without `set_epoch`, or is that another seed? FLAGS go to `fit`, e.g. `--data.root=/datasets`.
Both runs of a pair have the same initial weights and the same first epoch. The results are written as JSON after every
run; if OUTPUT is there already, only what it lacks is trained. `notebooks/analysis/comparing_runs` reads it, for
notebooks/shuffling.ipynb.
"""

import argparse
from itertools import product
from pathlib import Path
from typing import Any

from fit_and_test import fit_and_test
from run_record import complete

from lit_cifar.cli.usage_errors import cli_exit
from lit_cifar.tools.terminal import say

PROCESSES = (1, 2, 4)
TIMEOUT_S = 3600.0
CONFIG = Path(__file__).parents[2] / "configs" / "reproduce" / "single.yaml"
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


def trained(flags: list[str], *, seed: int, processes: int, set_epoch: bool) -> dict[str, Any]:
    """Train and test once."""
    which = {"seed": seed, "processes": processes, "set_epoch": set_epoch}
    words = [f"--config={CONFIG}", *SETTINGS, *flags_of(seed=seed, processes=processes, set_epoch=set_epoch), *flags]
    result = fit_and_test(words, timeout_s=TIMEOUT_S)
    found = {"losses": result.logged("train/loss"), "correct": result.correct, "total": result.total}
    return which | found | {"seconds": round(result.seconds)}


def main(output: Path, flags: list[str], *, seeds: int, at_once: int = 1) -> None:
    """Seed by seed, so that an interrupted record is whole for the seeds that it has."""

    def tell(row: dict[str, Any]) -> None:
        kind = "with" if row["set_epoch"] else "without"
        say(f"{row['seconds']:4d} s  seed {row['seed']}, {row['processes']}, {kind}: {row['correct']}")

    complete(
        output,
        list(product(range(seeds), PROCESSES, (True, False))),
        lambda case: trained(flags, seed=case[0], processes=case[1], set_epoch=case[2]),
        settings={"flags": [*SETTINGS, *flags]},
        tell=tell,
        at_once=at_once,
    )


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Train with another order in every epoch and with one order.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=5, help="pairs of runs for each number of processes")
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time, each of which computes with one thread")
    return parser


if __name__ == "__main__":
    arguments, rest = parser().parse_known_args()
    with cli_exit():
        main(arguments.output, rest, seeds=arguments.seeds, at_once=arguments.at_once)
