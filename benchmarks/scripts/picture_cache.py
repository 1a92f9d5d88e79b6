"""What pictures that are decoded once cost and give: `python benchmarks/scripts/picture_cache.py OUTPUT FOLDER`.

Makes JPEG pictures of 224 x 224 in FOLDER, and measures each case in a process of its own: decoding beside plain loops,
the start when all is decoded, epochs of the loader from the file and from a copy in memory, and a `fit`, also with less
memory than the pictures take. Other work on the machine makes wall time longer, CPU time hardly.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import torchvision
from PIL import Image
from run_record import complete
from torch import nn

from lit_cifar import CIFAR10DataModule
from lit_cifar.data.images import ImageSet
from lit_cifar.data.pictures import read_image
from lit_cifar.launch.malloc_tuning import keep_freed_memory
from lit_cifar.tools.terminal import say

SIZE, CLASSES, LINKS, BATCH = 224, 10, 10, 128
LARGE = 80_000  # pictures of 224 x 224, 12 GB, for processes that may use a tenth of that
LIMIT = 2_000_000_000  # bytes of memory of its own (RLIMIT_DATA) that a process may have where it is limited
Row = dict[str, Any]


def make(folder: Path, num: int) -> None:
    """`folder/few` with `num` pictures, smooth with some noise, and `folder/many` with ten names for each."""
    for index in range(num):
        path = folder / "few" / f"class{index % CLASSES}" / f"{index}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            generator = np.random.default_rng(index)
            smooth = Image.fromarray(generator.integers(0, 256, (28, 28, 3), np.uint8)).resize((SIZE, SIZE))
            noise = generator.integers(0, 24, (SIZE, SIZE, 3), np.uint8)
            Image.fromarray(np.asarray(smooth) // 12 * 11 + noise // 2).save(path, quality=90)
        for link in range(LINKS):
            other = folder / "many" / f"class{index % CLASSES}" / f"{index}-{link}.jpg"
            other.parent.mkdir(parents=True, exist_ok=True)
            if not other.exists():
                other.hardlink_to(path)


def opened(folder: Path, name: str = "few", size: int = SIZE, num: int | None = None) -> CIFAR10DataModule:
    """Set up to train on all pictures, or the first `num`."""
    options: Row = {"cache_dir": folder / "cache", "image_size": size, "val_size": 0, "batch_size": BATCH}
    options |= {"num_train": num, "cache_limit_gb": 1000.0}
    data = CIFAR10DataModule(folder / name, dataset="folder", **options)
    data.setup("fit")
    return data


def in_memory(data: CIFAR10DataModule) -> CIFAR10DataModule:
    """The same pictures as a copy of this process's own."""
    images = data.sets["train"]
    data.sets["train"] = ImageSet(images.gather(torch.arange(len(images))), images.labels, images.classes)
    return data


def one_by_one(folder: Path, read: Callable[[str], object]) -> Row:
    """In this process, on one thread."""
    torch.set_num_threads(1)
    paths = [str(path) for path in sorted((folder / "few").rglob("*.jpg"))[:2000]]
    for path in paths[:20]:
        read(path)
    start, cpu = time.perf_counter(), time.process_time()
    for path in paths:
        read(path)
    return timed(len(paths), start, time.process_time() - cpu)


def timed(num: int, start: float, cpu: float) -> Row:
    return {"pictures": num, "seconds": round(time.perf_counter() - start, 3), "cpu_seconds": round(cpu, 3)}


def setting_up(folder: Path, *arguments: Any) -> Row:
    """Decoding, or the start when that was done."""
    start, cpu = time.perf_counter(), time.process_time()
    num = len(opened(folder, *arguments).sets["train"])
    of_workers = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = time.process_time() - cpu + of_workers.ru_utime + of_workers.ru_stime
    return timed(num, start, spent) | {"largest_child_mb": of_workers.ru_maxrss // 1000}


def blank(folder: Path) -> Row:
    """A file for very many pictures, which are not decoded, as only the start with it is measured."""
    with mock.patch("lit_cifar.data.pictures._pixels", lambda path, *, size: bytes(3 * size * size)):
        return setting_up(folder, "many", 32)


def epoch(data: CIFAR10DataModule, number: int) -> Row:
    """One of augmented and normalised batches, on one thread, in a process that keeps what it frees, as `fit` does."""
    torch.set_num_threads(1)
    keep_freed_memory()
    loader = data.train_dataloader()
    loader.sampler.set_epoch(number)
    start, cpu, own = time.perf_counter(), time.process_time(), []
    for index, batch in enumerate(loader):
        data.on_after_batch_transfer(batch, 0)
        if index % (len(loader) // 4) == len(loader) // 4 - 1:
            own.append(rss_anon_mb(os.getpid()))
    return timed(len(data.sets["train"]), start, time.process_time() - cpu) | {"rss_anon_mb": own}


def in_turn(folder: Path) -> Row:
    """Epochs from the file and from a copy, in one process; the first of the file also compares hashes."""
    sets = {"file": opened(folder), "copy": in_memory(opened(folder))}
    sets["file"].sets["train"].checked[:] = True
    found: Row = {name: [] for name in sets}
    for number in range(6):
        for name in sets if number % 2 else reversed(sets):
            found[name].append(epoch(sets[name], number))
    return found


def epochs(data: CIFAR10DataModule) -> Row:
    """The first compares hashes."""
    return {"epochs": [epoch(data, number) for number in range(2)]}


def large(folder: Path) -> CIFAR10DataModule:
    return opened(folder, "many", SIZE, LARGE)


def training(data: CIFAR10DataModule, num_steps: int = 3) -> Row:
    """Steps of ResNet18 with SGD in a plain loop, on one thread, after one that is not counted."""
    torch.set_num_threads(1)
    keep_freed_memory()
    network = torchvision.models.resnet18(num_classes=CLASSES)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    start = cpu = 0.0
    for index, batch in enumerate(islice(data.train_dataloader(), 1 + num_steps)):
        if index == 1:
            start, cpu = time.perf_counter(), time.process_time()
        ready = data.on_after_batch_transfer(batch, 0)
        loss = nn.functional.cross_entropy(network(ready.images), ready.labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return timed(num_steps * BATCH, start, time.process_time() - cpu) | {"rss_anon_mb": [rss_anon_mb(os.getpid())]}


def rss_anon_mb(process: int) -> int:
    status = Path(f"/proc/{process}/status").read_text()
    found = re.search(r"RssAnon:\s+(\d+) kB", status)
    return int(found[1]) // 1000 if found else 0


def out_of_page_cache(folder: Path) -> None:
    """Let the next process read the decoded pictures from the disk."""
    for path in (folder / "cache").rglob("*.pixels"):
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Patches(nn.Sequential):
    """A network that takes less time than its batches."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 16, 16, stride=16), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 14 * 14, CLASSES))


def fit(folder: Path) -> Row:
    """An epoch on all pictures, with what this process had of its own each 5 seconds."""
    words = ["fit", "--data.dataset=folder", f"--data.root={folder / 'few'}", f"--data.cache_dir={folder / 'cache'}"]
    words += [f"--data.image_size={SIZE}", f"--data.batch_size={BATCH}", "--data.val_size=0"]
    words += [
        "--model.network=picture_cache.Patches",
        "--model.optimizer.lr=0.001",
        "--trainer.max_epochs=1",
        "--trainer.accelerator=cpu",
    ]
    words += ["--trainer.enable_progress_bar=false", f"--run_dir={folder / 'runs' / str(time.time_ns())}"]
    found: Row = {"rss_anon_mb": []}
    start = time.perf_counter()
    environment = os.environ | {"PYTHONPATH": f"{Path(__file__).parent}:{Path.cwd()}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "lit_cifar", *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        found["rss_anon_mb"].append(rss_anon_mb(process.pid))
        time.sleep(5)
    return found | {"status": process.returncode, "seconds": round(time.perf_counter() - start, 1)}


CASES: dict[str, Callable[[Path], Row]] = {
    "loop of PIL": lambda folder: one_by_one(folder, lambda path: np.asarray(Image.open(path).convert("RGB"))),
    "loop of torchvision.io": lambda folder: one_by_one(folder, torchvision.io.decode_image),
    "loop of read_image": lambda folder: one_by_one(folder, lambda path: read_image(path, size=SIZE)),
    "decoded": setting_up,
    "many, blank": blank,
    "start": setting_up,
    **{f"start with many, {n}": lambda folder: setting_up(folder, "many", 32) for n in (1, 2, 3)},
    "from the file and a copy, in turn": in_turn,
    "from a copy, at most 2 GB": lambda folder: epochs(in_memory(opened(folder))),
    "from the file, at most 2 GB": lambda folder: epochs(opened(folder)),
    "large, decoded": lambda folder: setting_up(folder, "many", SIZE, LARGE),
    "large, from a copy": lambda folder: epochs(in_memory(large(folder))),
    "large, from the file, a tenth": lambda folder: epochs(large(folder)),
    **{
        f"large, ResNet18, {kind}, {number}": lambda folder, copied=kind == "from a copy": training(
            in_memory(large(folder)) if copied else large(folder)
        )
        for number in (1, 2, 3)
        for kind in ("from a copy", "from the file, a tenth")
    },
    "fit, at most 2 GB": fit,
}


@contextmanager
def with_a_tenth() -> Iterator[Path]:
    """A control group (version 1) whose processes, with the pages of files that they read, get a tenth of the set."""
    group = Path(f"/sys/fs/cgroup/memory/pictures-{os.getpid()}")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(LARGE * 3 * SIZE * SIZE // 10))
        yield group
    finally:
        group.rmdir()


def measured(case: str, folder: Path) -> Row:
    """In a new process."""
    if "a tenth" in case:
        out_of_page_cache(folder)
        with with_a_tenth() as group:
            row = run(case, folder, lambda: (group / "cgroup.procs").write_text(str(os.getpid())))
            peak = int((group / "memory.max_usage_in_bytes").read_text())
            return row | {"limit_mb": LARGE * 3 * SIZE * SIZE // 10_000_000, "peak_mb": peak // 1_000_000}
    limit = (LIMIT, LIMIT) if "at most 2 GB" in case else resource.getrlimit(resource.RLIMIT_DATA)
    return run(case, folder, lambda: resource.setrlimit(resource.RLIMIT_DATA, limit))


def run(case: str, folder: Path, limit: Callable[[], object]) -> Row:
    command = [sys.executable, __file__, "--case", case, "-", str(folder)]
    done = subprocess.run(command, preexec_fn=limit, capture_output=True, text=True)
    if done.returncode:
        return {"case": case, "failed": (done.stderr.splitlines() or [str(done.returncode)])[-1]}
    return {"case": case} | json.loads(done.stdout)


def main(output: Path, folder: Path, num: int) -> None:
    make(folder, num)
    settings = {"large": LARGE, "pictures": num, "size": SIZE, "batch_size": BATCH, "limit": LIMIT}
    complete(output, list(CASES), lambda case: measured(case, folder), settings=settings, tell=say)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What pictures that are decoded once cost and give.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("folder", type=Path, help="for the pictures, their cache and runs")
    parser.add_argument("--num", type=int, default=20_000, help="pictures")
    parser.add_argument("--case", choices=CASES, help="measure this one here, and print it")
    return parser


if __name__ == "__main__":
    options = parser().parse_args()
    if options.case:
        say(json.dumps(CASES[options.case](options.folder)))
    else:
        main(options.output, options.folder, options.num)
