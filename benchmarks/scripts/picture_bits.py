"""Do runs from decoded pictures in a file end with the bits of runs from memory? `picture_bits.py OUTPUT FOLDER`.

Trains `tiny` for two epochs under `ddp` on 1, 2, 3, 4 and 7 processes, each from the mapped file and from a copy of it
in memory, and compares the SHA-256 of all weights after each epoch, and of the samples of every step.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from PIL import Image
from run_record import complete

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.checkpoint.sample_audit import FILE_NAME
from lit_cifar.cli.main import main as fit
from lit_cifar.data.images import ImageSet
from lit_cifar.data.pictures import OwnPictures
from lit_cifar.tools.terminal import say

PICTURES, BATCH, SIZE, EPOCHS = 672, 84, 64, 2
load_mapped = OwnPictures.load


def load_copy(self: OwnPictures, *args: Any, **kwargs: Any) -> ImageSet:
    mapped = load_mapped(self, *args, **kwargs)
    return ImageSet(mapped.gather(torch.arange(len(mapped))), mapped.labels, mapped.classes)


def make(folder: Path) -> None:
    for index in range(PICTURES):
        path = folder / f"class{index % 10}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.random.default_rng(index).integers(0, 256, (80, 70, 3), np.uint8)).save(path)


def trained(case: tuple[int, str], folder: Path) -> dict[str, Any]:
    """What the run folder says of the weights after each epoch, and of the samples of all steps."""
    processes, source = case
    run = folder / "runs" / f"{processes}-{source}"
    data = [f"--data.root={folder / 'pictures'}", f"--data.cache_dir={folder / 'cache'}", f"--data.image_size={SIZE}"]
    data += ["--data.dataset=folder", f"--data.batch_size={BATCH}", "--data.val_size=0"]
    model = ["--model.arch=tiny", "--model.stem=imagenet", f"--trainer.max_epochs={EPOCHS}", f"--run_dir={run}"]
    trainer = ["--trainer.accelerator=cpu", "--trainer.strategy=ddp", f"--trainer.devices={processes}"]
    command = [sys.executable, __file__, "--fit", source, "fit", *data, *model, *trainer]
    subprocess.run(command, check=True, capture_output=True)
    weights = [line.split()[0] for line in (run / DIGESTS).read_text().splitlines()]
    samples = [line.split(",")[-1] for line in (run / FILE_NAME).read_text().splitlines()[1:]]
    return {"processes": processes, "source": source, "weights": weights, "samples": samples}


def main(output: Path, folder: Path) -> None:
    make(folder / "pictures")
    cases = [(processes, source) for processes in (1, 2, 3, 4, 7) for source in ("file", "memory")]
    settings = {"pictures": PICTURES, "size": SIZE, "batch_size": BATCH, "epochs": EPOCHS}
    rows = complete(output, cases, lambda case: trained(case, folder), settings=settings, tell=say)
    pairs = zip(rows[::2], rows[1::2], strict=True)
    unlike = [mapped["processes"] for mapped, copied in pairs if mapped["weights"] != copied["weights"]]
    say(f"bits differ on {unlike or 'no number of'} processes")
    say(f"{len({tuple(row['samples']) for row in rows})} digest(s) of the samples of {EPOCHS} epochs")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--fit"]:
        source, arguments = sys.argv[2], sys.argv[3:]
        with mock.patch.object(OwnPictures, "load", load_copy if source == "memory" else load_mapped):
            fit(arguments)
    else:
        parser = argparse.ArgumentParser(description="Are the bits of pictures in a file those in memory?")
        parser.add_argument("output", type=Path, help="JSON file to write")
        parser.add_argument("folder", type=Path, help="for the pictures, their cache and runs")
        main(**vars(parser.parse_args()))
