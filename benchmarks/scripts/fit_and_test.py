"""Train once and test the last checkpoint, in a folder that is removed afterwards."""

import csv
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lit_cifar.tools.verify.runs import LIMIT_S, refusal, run


@dataclass(frozen=True)
class Result:
    """What a run reached."""

    counts: list[tuple[int, int]]  # of each test: right images, all images
    seconds: float  # of the whole `fit`, with its start
    rows: list[dict[str, str]]  # of its metrics.csv

    @property
    def correct(self) -> int:
        """Of the first test."""
        return self.counts[0][0]

    @property
    def total(self) -> int:
        return self.counts[0][1]

    def logged(self, metric: str) -> list[float]:
        return [float(row[metric]) for row in self.rows if row.get(metric)]


def fit_and_test(
    words: Sequence[str],
    *,
    tests: Sequence[Sequence[str]] = ((),),
    split: Literal["val", "test"] = "test",
    threads: int = 1,
    limit_s: float = LIMIT_S,
) -> Result:
    """`fit` with these arguments, which may take `limit_s`, then a `test` with each of the flags in `tests`.

    With `split` "val" these count the held-out images, by `validate`.

    Raises:
        ConfigError: One of them failed.
    """
    with tempfile.TemporaryDirectory(prefix="fit-and-test-") as name:
        folder = Path(name)
        fit_dir = folder / "fit"
        fitted = run(["fit", *words, f"--run_dir={fit_dir}"], folder=folder, threads=threads, limit_s=limit_s)
        if fitted.status:
            raise refusal(fitted)
        checkpoint = fit_dir / "checkpoints" / "last.ckpt"
        trained = [f"--config={fit_dir / 'config.yaml'}", f"--ckpt_path={checkpoint}"]
        counts = []
        command = "test" if split == "test" else "validate"
        for number, flags in enumerate(tests):
            test_dir = folder / f"test{number}"
            ended = run([command, *trained, *flags, f"--run_dir={test_dir}"], folder=folder, threads=threads)
            if ended.status:
                raise refusal(ended)
            rows = _rows(test_dir / "per_rank.csv")
            (whole,) = (row for row in rows if (row["split"], row["rank"]) == (split, "all"))
            counts.append((int(whole["correct"]), int(whole["total"])))
        return Result(counts, fitted.seconds, _rows(fit_dir / "metrics.csv"))


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
