"""A configuration that `verify` compares modes under, for tests."""

from typing import Any

from lit_cifar.tools.verify.configuration import Configuration

TINY = [
    "--model.arch=resnet10",
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=175",
    "--data.val_size=15",
    "--data.batch_size=64",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.gradient_clip_val=0.5",
    "--trainer.precision=64-true",
]


def settings(*, num_parts: int | None = None, **data: int) -> Configuration:
    """As `Configuration.from_flags` finds them, without asking the command line."""
    config: dict[str, Any] = {
        "virtual_replicas": num_parts,
        "trainer": {
            "accelerator": "cpu",
            "accumulate_grad_batches": 1,
            "precision": "64-true",
            "limit_val_batches": None,
            "overfit_batches": 0.0,
        },
        "model": {
            "arch": "resnet10",
            "stem": "imagenet",
            "num_classes": 10,
            "network": None,
            "image_size": None,
            "fine_tuning": {},
        },
        "data": {"dataset": "synthetic", "num_train": 96, "val_size": 0, "batch_size": 16} | data,
    }
    return Configuration(tuple(flag for flag in TINY if "accumulate" not in flag), config)
