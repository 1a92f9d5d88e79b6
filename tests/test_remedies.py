"""What a strategy answers a size that cannot work with, pasted behind the same command, works."""

import math
import re

import pytest
from commands import TINY, run_here

from lit_cifar.cli.main import CLI
from lit_cifar.cli.preflight import BOUNDS

# Cut evenly by every number of devices and microbatches below; two full batches.
BATCHES = ["--data.num_train=496", "--data.batch_size=240"]

FUSED = ["--model.optimizer=SGD", "--model.optimizer.lr=0.1", "--model.optimizer.fused=true"]

BEYOND = {
    f"{name}={bound}": [f"--{name}={bound}"]
    for name, (least, most) in BOUNDS.items()
    for bound in (least - 1, *([] if most == math.inf else [10**12]))
}
REFUSED = BEYOND | {
    "too few for 1F1B": ["strategy=PipelineStrategy", "devices=5", "strategy.num_microbatches=4"],
    "too few for a V": [
        *("strategy=PipelineStrategy", "devices=3"),
        *("strategy.schedule=ZBVZeroBubble", "strategy.num_microbatches=4"),
    ],
    "too few for a V of a given number of stages": [
        *("strategy=PipelineStrategy", "strategy.num_stages=4", "devices=2"),
        *("strategy.schedule=ZBVZeroBubble", "strategy.num_microbatches=2"),
    ],
    "uneven rounds": [
        *("strategy=PipelineStrategy", "devices=2"),
        *("strategy.schedule=Interleaved1F1B", "strategy.num_microbatches=5"),
    ],
    "no microbatch": ["strategy=PipelineStrategy", "devices=5", "strategy.num_microbatches=0"],
    "half a V": ["strategy=PipelineStrategy", "devices=2", "strategy.num_stages=3", "strategy.schedule=ZBVZeroBubble"],
    "half a pipeline": ["strategy=ddp_pp", "devices=3"],
    "more stages than processes": ["strategy=PipelineStrategy", "devices=2", "strategy.num_stages=3"],
    "no microbatch in one process": ["strategy=LayerParallelStrategy", "devices=2", "strategy.num_microbatches=0"],
    "half a process by its short name": ["strategy=ddp_mp", "devices=3"],
    "half a process": ["strategy=DDPLayerParallelStrategy", "strategy.num_stages=3", "devices=4"],
    "synchronised microbatches": [
        *("strategy=DDPLayerParallelStrategy", "devices=4"),
        *("strategy.num_microbatches=2", "sync_batchnorm=true"),
    ],
    "synchronised pipeline": ["strategy=pp", "devices=2", "sync_batchnorm=true"],
    "uneven stages": ["strategy=LayerParallelStrategy", "strategy.num_stages=3", "devices=2"],
    "uneven tensors": ["strategy=tp", "devices=3"],
    "parts of tensors in one kernel": ["strategy=fsdp2", "devices=2", *FUSED],
    "fewer parts than none": ["strategy=ShardedStrategy", "devices=2", "strategy.tensor_parallel_size=0"],
    "compiled copies": ["strategy=dp", "devices=2", "--model.compile=true"],
    "compiled parts of tensors": ["strategy=tp", "devices=2", "--model.compile=true"],
    "no interval": ["val_check_interval=0"],
    "an interval longer than an epoch": ["val_check_interval=3"],
    "less than a batch": ["limit_train_batches=0.1"],
    "less than a batch of a few": ["overfit_batches=0.1"],
    "no classes": ["--model.num_classes=0"],
    "less than a pixel": ["--model.image_size=-1"],
    "more chunks than images": [
        "--model.ghost_batchnorm.accumulation=2",
        f"--model.ghost_batchnorm.dp_size={10**12}",
    ],
    "another product": [
        *("strategy=ShardedStrategy", "devices=2"),
        *("strategy.data_parallel_size=2", "strategy.tensor_parallel_size=2"),
    ],
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_remedy_is_accepted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)  # all that is found before processes are started
    command = [*TINY, *BATCHES, *(flag if flag.startswith("--") else f"--trainer.{flag}" for flag in REFUSED[name])]
    refused = run_here("fit", *command)
    assert refused.status == 2
    assert len(refused.stderr.splitlines()) <= 5
    remedy = refused.stderr.strip().splitlines()[-1]
    alternatives = [flags for part in re.split(r"\bor\b", remedy) if (flags := re.findall(r"--[\w.]+=\w+", part))]
    assert alternatives
    assert not re.search(r"--trainer\.strategy\.\w+(?![\w=])", remedy)  # a flag without a value cannot be pasted
    for flags in alternatives:
        accepted = run_here("fit", *command, *flags)
        assert accepted.status == 0, (flags, accepted.stderr)
