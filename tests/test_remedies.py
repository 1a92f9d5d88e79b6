"""What a strategy answers a size that cannot work with, pasted behind the same command, works."""

import math
import re

import pytest
from commands import TINY, refused, run_here

from lit_cifar.cli.main import CLI
from lit_cifar.cli.preflight import BOUNDS

# Cut evenly by every number of devices and microbatches below; two full batches.
BATCHES = ["--data.num_train=496", "--data.batch_size=240"]

BEYOND = [
    f"--{name}={bound}"
    for name, (least, most) in BOUNDS.items()
    for bound in (least - 1, *([] if most == math.inf else [10**12]))
]
REFUSED = [
    # Without two dashes it is a flag of the trainer.
    "strategy=PipelineStrategy devices=5 strategy.num_microbatches=4",
    "strategy=PipelineStrategy devices=3 strategy.schedule=ZBVZeroBubble strategy.num_microbatches=4",
    "strategy=PipelineStrategy devices=2 strategy.schedule=ZBVZeroBubble strategy.num_microbatches=2"
    " strategy.num_stages=4",
    "strategy=PipelineStrategy devices=2 strategy.schedule=Interleaved1F1B strategy.num_microbatches=5",
    "strategy=PipelineStrategy devices=5 strategy.num_microbatches=0",
    "strategy=PipelineStrategy devices=2 strategy.num_stages=3 strategy.schedule=ZBVZeroBubble",
    "strategy=PipelineStrategy devices=2 strategy.num_stages=3",
    "strategy=pp devices=2 sync_batchnorm=true",
    "strategy=ddp_pp devices=3",
    "strategy=LayerParallelStrategy devices=2 strategy.num_microbatches=0",
    "strategy=LayerParallelStrategy devices=2 strategy.num_stages=3",
    "strategy=ddp_mp devices=3",
    "strategy=DDPLayerParallelStrategy devices=4 strategy.num_stages=3",
    "strategy=DDPLayerParallelStrategy devices=4 strategy.num_microbatches=2 sync_batchnorm=true",
    "strategy=tp devices=3",
    "strategy=tp devices=2 --model.compile=true",
    "strategy=dp devices=2 --model.compile=true",
    "strategy=fsdp2 devices=2 --model.optimizer=SGD --model.optimizer.lr=0.1 --model.optimizer.fused=true",
    "strategy=ShardedStrategy devices=2 strategy.tensor_parallel_size=0",
    "strategy=ShardedStrategy devices=2 strategy.data_parallel_size=2 strategy.tensor_parallel_size=2",
    "strategy=ShardedStrategy devices=4 strategy.data_parallel_size=3",
    "val_check_interval=0",
    "val_check_interval=3",  # longer than an epoch
    "limit_train_batches=0.1",  # less than a batch
    "overfit_batches=0.1",
    "--model.num_classes=0",
    "--model.image_size=-1",
    f"--model.ghost_batchnorm.accumulation=2 --model.ghost_batchnorm.dp_size={10**12}",
]


@pytest.mark.parametrize("flags", [*BEYOND, *REFUSED])
def test_every_remedy_is_accepted(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)  # all that is found before processes are started
    command = [*TINY, *BATCHES, *(flag if flag.startswith("--") else f"--trainer.{flag}" for flag in flags.split())]
    remedy = refused("fit", *command).strip().splitlines()[-1]
    alternatives = [found for part in re.split(r"\bor\b", remedy) if (found := re.findall(r"--[\w.]+=\w+", part))]
    assert alternatives
    assert not re.search(r"--trainer\.strategy\.\w+(?![\w=])", remedy)  # a flag without a value cannot be pasted
    for pasted in alternatives:
        accepted = run_here("fit", *command, *pasted)
        assert accepted.status == 0, (pasted, accepted.stderr)
