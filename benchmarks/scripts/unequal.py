"""Write CIFAR-10 with unequal classes as pictures: `python benchmarks/scripts/unequal.py CIFAR10 FOLDER`.

Of the 45,000 images that `--data.val_size=5000` leaves, class c keeps the first 4,500 * 100 ** (-c / 9), the usual
exponential profile (Cui et al., "Class-balanced loss", 2019): 4,500 of the first class, 45 of the last. FOLDER/val has
the 5,000 that are held out, about 500 of each class.
"""

import sys
from pathlib import Path

from PIL import Image

from lit_cifar.data import CIFAR10DataModule


def main(root: str, folder: str) -> None:
    data = CIFAR10DataModule(root, val_size=5000, download=False)
    data.prepare_data()
    data.setup("fit")
    for split in ("train", "val"):
        images = data.sets[split]
        for label, name in enumerate(images.classes):
            most = round(4500 * 100 ** (-label / 9)) if split == "train" else None
            place = Path(folder, split, name)
            place.mkdir(parents=True)
            for number in (images.labels == label).nonzero()[:most, 0].tolist():
                Image.fromarray(images.images[number].permute(1, 2, 0).numpy()).save(place / f"{number:05}.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
