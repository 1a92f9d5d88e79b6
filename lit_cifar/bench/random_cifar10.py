"""Files as those of CIFAR-10, so that a run reads as much as it would, without a download."""

from pathlib import Path

import numpy as np

from lit_cifar.data.cifar10 import CLASSES, FILES, RECORD_BYTES, RECORDS_PER_FILE
from lit_cifar.data.download import CIFAR10_BINARY


def write_random_cifar10(root: Path) -> None:
    """Write noise with labels in turn, as the binary edition of CIFAR-10 (180 MB), below `root`."""
    folder = root / CIFAR10_BINARY.folder
    folder.mkdir(parents=True)
    records = np.random.default_rng(0).integers(0, 256, (RECORDS_PER_FILE, RECORD_BYTES), np.uint8)
    records[:, 0] = np.arange(RECORDS_PER_FILE) % len(CLASSES)
    for names in FILES.values():
        for name in names:
            records.tofile(folder / name)
