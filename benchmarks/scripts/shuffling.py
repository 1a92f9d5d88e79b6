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
from run_record import complete, run_script, with_seeds

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
    parts = [f"--model.ghost_batchnorm.data_parallel_size={processes}"] if processes > 1 else []
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
    parser = argparse.ArgumentParser(description="Train with another order in every epoch and with one order.")
    return with_seeds(parser, what="pairs of runs for each number of processes")


if __name__ == "__main__":
    run_script(parser(), main)
