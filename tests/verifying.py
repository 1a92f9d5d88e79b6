"""A configuration that `verify` compares modes under, for tests."""

from lit_cifar.tools.verify.configuration import Configuration

TINY = ["--model.arch=resnet10", "--model.stem=imagenet", "--model.optimizer.lr=0.02"]
TINY += ["--data.dataset=synthetic", "--data.num_train=175", "--data.val_size=15", "--data.batch_size=64"]
TINY += ["--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=0.5", "--trainer.precision=64-true"]


def settings(*, num_parts: int | None = None, **data: int) -> Configuration:
    """As `Configuration.from_flags` finds them, without asking the command line."""
    trainer = {"accelerator": "cpu", "accumulate_grad_batches": 1, "precision": "64-true"}
    trainer |= {"limit_val_batches": None, "overfit_batches": 0.0}
    model = {"arch": "resnet10", "stem": "imagenet", "num_classes": 10}
    model |= {"network": None, "image_size": None, "fine_tuning": {}}
    data = {"dataset": "synthetic", "num_train": 96, "val_size": 0, "batch_size": 16} | data
    config = {"virtual_replicas": num_parts, "trainer": trainer, "model": model, "data": data}
    return Configuration(tuple(flag for flag in TINY if "accumulate" not in flag), config)
