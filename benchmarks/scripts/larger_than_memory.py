"""Trainings on pictures that take ten times the memory that their processes get: `larger_than_memory.py OUTPUT FOLDER`.

Each case is a command of its own, in a control group (version 1) with a tenth of what the decoded pictures take, the
pages of files that are read counted in, or in one that only counts. FOLDER gets the pictures, as `picture_cache.py`
makes them: 200,000 JPEG files of 224 x 224, ten names for each of 20,000.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
from picture_cache import SIZE, make, out_of_page_cache
from run_record import complete

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.checkpoint.sample_audit import FILE_NAME
from lit_cifar.cli.main import main as lit_cifar
from lit_cifar.data.images import ImageSet
from lit_cifar.data.pictures import OwnPictures
from lit_cifar.tools.terminal import say

NUM, FEW = 200_000, 1_680
DECODED = NUM * 3 * SIZE * SIZE  # bytes
LIMITS = {"a tenth": DECODED // 10, "a seventh": DECODED // 7, "all": 2**62}
SOURCES = {"file": "once", "copy": "once", "as_needed": "as_needed"}
PROCESSES = (1, 2, 3, 4, 7)
GROUPS = Path("/sys/fs/cgroup/memory")
Row = dict[str, Any]


class Clock(L.Callback):
    """Prints when the first step began, and the seconds and the number of images of every epoch's other steps."""

    def __init__(self) -> None:
        self._began = 0.0

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.is_global_zero and not trainer.global_step:
            print(json.dumps({"first_step": time.time()}))
        if batch_idx == 1:
            self._began = time.perf_counter()

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        steps = int(trainer.num_training_batches) - 1
        if trainer.is_global_zero and self._began:
            images = steps * trainer.datamodule.batch_size  # type: ignore[attr-defined]
            print(json.dumps({"images": images, "seconds": round(time.perf_counter() - self._began, 2)}))


class Slow(L.Callback):
    """Gives faults time to hit a save."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.15)


@contextmanager
def group_of(limit: int) -> Iterator[Path]:
    group = GROUPS / f"larger-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(limit))
        yield group
    finally:
        while (group / "cgroup.procs").read_text():
            time.sleep(0.1)
        group.rmdir()


def counted(words: list[str], limit: int, **environment: str) -> Row:
    """Runs `words`: what it printed, its seconds, and the largest sum of what its processes had of their own."""
    with group_of(limit) as group:
        start, largest = time.time(), 0
        process = subprocess.Popen(
            words,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
            preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())) and None,
        )
        while process.poll() is None:
            values = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            largest = max(largest, int(values["total_rss"]) // 1_000_000)
            time.sleep(0.1)
        out, err = process.communicate()
        charged = int((group / "memory.max_usage_in_bytes").read_text()) // 1_000_000
    row = {"start": start, "seconds": round(time.time() - start, 2), "largest_rss_mb": largest, "charged_mb": charged}
    if process.returncode:
        return row | {"failed": process.returncode, "error": err.splitlines()[-3:]}
    return row | {"printed": [json.loads(line) for line in out.splitlines() if line.startswith("{")]}


def words_of(folder: Path, *, source: str, size: int, num: int | None, cache: str = "cache") -> list[str]:
    words = ["--data.dataset=folder", f"--data.root={folder / 'many'}", f"--data.image_size={size}"]
    words += ["--data.val_size=0", "--trainer.accelerator=cpu", f"--data.decode={SOURCES[source]}"]
    words += [f"--data.num_train={num}"] if num else []
    if SOURCES[source] == "once":
        words += [f"--data.cache_dir={folder / cache}", "--data.cache_limit_gb=1000"]
    return words


def fit(folder: Path, run: str, source: str, own: str, *, limit: int, **options: Any) -> Row:
    target = folder / "runs" / f"{run}-{time.time_ns()}"
    out_of_page_cache(folder)  # pages count for those who have read them first
    words = [*words_of(folder, source=source, **options), *own.split(), f"--run_dir={target}"]
    words += ["--trainer.enable_progress_bar=false", "--trainer.callbacks+=larger_than_memory.Clock"]
    scripts = Path(__file__).parent
    row = counted(
        [sys.executable, __file__, "--fit", source, "fit", *words],
        limit,
        PYTHONPATH=f"{scripts}:{scripts.parent.parent}",
        OMP_NUM_THREADS="1",
    )
    if (target / DIGESTS).exists():  # it has ended an epoch
        row["weights"] = [line.split()[0] for line in (target / DIGESTS).read_text().splitlines()]
        row["samples"] = [line.split(",")[-1] for line in (target / FILE_NAME).read_text().splitlines()[1:]]
    return row


def start(folder: Path, processes: int, cache: str) -> Row:
    """All 200,000 files, made into 64 x 64: the command's seconds until its first step."""
    own = f"--model.arch=tiny --trainer.max_steps=1 {ddp(processes)} --data.batch_size=84"
    row = fit(folder, "start", "file", own, limit=LIMITS["all"], size=64, num=None, cache=cache)
    if "printed" in row:
        row["until_first_step"] = round(row["printed"][0]["first_step"] - row["start"], 2)
    return row


def ddp(processes: int) -> str:
    return f"--trainer.strategy=ddp --trainer.devices={processes}"


def kills(folder: Path) -> Row:
    """20 faults of a training of two processes that get a tenth."""
    found, config = (folder / f"chaos-{time.time_ns()}.{kind}" for kind in ("json", "yaml"))
    out_of_page_cache(folder)
    # Without a file of one's own `chaos` has data of its own.
    network = "{network: picture_cache.Patches, optimizer: {class_path: lit_cifar.NesterovSGD, init_args: {lr: 0.001}}}"
    config.write_text(f"model: {network}\ndata: {{batch_size: 32}}\n")
    data = words_of(folder, source="file", size=SIZE, num=None)
    data.remove("--trainer.accelerator=cpu")  # `chaos` sets it
    words = ["chaos", "--faults=20", "--modes=ddp", "--devices=2", f"--json={found}", f"--config={config}", *data]
    words.append("--trainer.callbacks+=larger_than_memory.Slow")
    row = counted([sys.executable, "-m", "lit_cifar", *words], LIMITS["a tenth"])
    return row | {"chaos": json.loads(found.read_text())["rows"] if found.exists() else None}


CASES: dict[str, Any] = {
    **{
        f"start, {processes}, {when}": lambda folder, n=processes: start(folder, n, f"cache-{n}")
        for processes in (1, 2, 4)
        for when in ("first", "later 1", "later 2", "later 3")
    },
    **{
        f"bits of few, {n}, {source}": lambda folder, n=n, source=source: fit(
            folder,
            f"few-{n}-{source}",
            source,
            f"--model.arch=tiny --model.stem=imagenet --trainer.max_epochs=2 --data.batch_size=84 {ddp(n)}",
            limit=LIMITS["all"],
            size=64,
            num=FEW,
        )
        for n in PROCESSES
        for source in SOURCES
    },
    "decoded": lambda folder: fit(
        folder, "decoded", "file", "--model.arch=tiny --trainer.max_steps=1", limit=LIMITS["all"], size=SIZE, num=None
    ),
    **{
        f"bits of all, {n}, {source}, {share}": lambda folder, n=n, source=source, share=share: fit(
            folder,
            f"all-{n}-{source}",
            source,
            "--model.network=picture_cache.Patches --model.optimizer.lr=0.001 --trainer.max_epochs=1 "
            f"--trainer.limit_train_batches=300 --data.batch_size=84 {ddp(n)}",
            limit=LIMITS[share],
            size=SIZE,
            num=None,
        )
        for n in PROCESSES
        for source, share in (
            ("file", "all"),
            ("file", "a seventh" if n == 7 else "a tenth"),  # seven processes have 3.8 GB of their own
            *([("as_needed", "a tenth")] * (n < 3)),  # workers have 0.4 GB each
        )
    },
    **{
        f"ResNet18, {number}, {source}": lambda folder, source=source, num=num, share=share: fit(
            folder,
            "resnet18",
            source,
            "--model.arch=resnet18 --model.stem=imagenet --trainer.max_epochs=2 --trainer.limit_train_batches=8 "
            "--data.batch_size=32",
            limit=LIMITS[share],
            size=SIZE,
            num=num,
        )
        for number in range(1, 4)
        for source, num, share in (("copy", FEW, "all"), ("file", None, "a tenth"), ("as_needed", None, "a tenth"))
    },
    "20 kills, a tenth": kills,
}


def load_copy(self: OwnPictures, *args: Any, **kwargs: Any) -> ImageSet:
    mapped = load_mapped(self, *args, **kwargs)
    return ImageSet(mapped.gather(torch.arange(len(mapped))), mapped.labels, mapped.classes)


def main(output: Path, folder: Path, only: str) -> None:
    make(folder, NUM // 10)
    settings = {"pictures": NUM, "size": SIZE, "decoded_mb": DECODED // 1_000_000}
    cases = [case for case in CASES if case.startswith(only)]
    complete(output, cases, lambda case: {"case": case} | CASES[case](folder), settings=settings, tell=say)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Trainings on pictures that take ten times their memory.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("folder", type=Path, help="for the pictures, their caches and runs")
    parser.add_argument("--only", default="", help="cases that begin so")
    return parser


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        load_mapped = OwnPictures.load
        with mock.patch.object(OwnPictures, "load", load_copy if sys.argv[2] == "copy" else load_mapped):
            lit_cifar(sys.argv[3:])
    else:
        main(**vars(parser().parse_args()))
