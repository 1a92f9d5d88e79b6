"""What cannot work is refused at once and in words, and what is told to be passed instead works."""

import math
import os
import re
from collections.abc import Callable
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from commands import TINY, mode_flags, refused, run_here
from jsonargparse import Namespace

from lit_cifar.checkpoint.callbacks import LastCheckpoint
from lit_cifar.checks.watchdog.callback import Watchdog
from lit_cifar.cli.main import CLI
from lit_cifar.cli.trainer_arguments import BOUNDS, check_bounds
from lit_cifar.data import Augment, CIFAR10DataModule, Mixing
from lit_cifar.errors import ConfigError
from lit_cifar.models.fine_tuning import FineTuning
from lit_cifar.reporting.figures import EvaluationFigures
from lit_cifar.task.module import LitResNet
from lit_cifar.task.optimization import RateScaling

ONE_CYCLE = "--model.lr_scheduler=OneCycleLR --model.lr_scheduler.max_lr=1 --model.lr_scheduler.total_steps"
TRANSFORM = "--data.augment.transforms+=torchvision.transforms.v2."
# Flags of a fit, and what is said of them.
REFUSED = {
    "--trainer.strategy=dp --trainer.devices=3": ["--data.batch_size=15 or"],
    "--trainer.strategy=dpp": ["did you mean --trainer.strategy=ddp?", "ddp_spawn, mp,", "fsdp2"],
    "\u2013trainer.max_epochs=1": ["did you mean --trainer.max_epochs?"],
    "trainer.max_epochs=1": ["did you mean --trainer.max_epochs?"],
    "--epochs=1": ["did you mean --trainer.max_epochs?"],
    "--trainer.gpus=2": ["did you mean --trainer.devices?"],
    "--weight-decay=0.1": ["did you mean --model.optimizer.weight_decay?"],
    "--img_size=64": ["did you mean --data.image_size?"],
    f"--ckpt_path={'x' * 300}": ["use another checkpoint"],
    "--data_dir=x": ["did you mean --data.root?"],
    "/": ["did you mean --run_dir=/ --resume=auto?"],
    "x" * 300: ["unrecognized arguments: xxx"],
    "--run_dir=/": ["the run folder / is not empty", "--run_dir=/-2"],
    "--trainer.precision=fp16": ["did you mean --trainer.precision=16-mixed?"],
    "--ckpt_path=": ["--ckpt_path= is empty"],
    "--ckpt_path=.": [". is a folder, and no checkpoint"],
    "--data.batchsize=3": ["batchsize", "did you mean --data.batch_size?", "--help"],
    "--model.optimizer.lr=-1": ["learning rate: -1"],
    "--trainer.max_epochs=-1": ["plans over the whole run, and this one has no end"],
    f"{ONE_CYCLE}=3": ["steps=5"],
    f"{ONE_CYCLE}=5 --model.rate_scaling.rule=linear": ["OneCycleLR has rates of its own"],
    f"{ONE_CYCLE}=5 --model.fine_tuning.head_lr=0.3": ["OneCycleLR has rates of its own"],
    "--dataset=cifar100": ["did you mean --data.dataset?"],
    "--trainer.limit_train_batches=0": ["--trainer.limit_train_batches=0 would train nothing"],
    "--trainer.accumulate_grad_batches=4 --trainer.limit_train_batches=6": ["=4 or --trainer.limit_train_batches=8"],
    "--trainer.accumulate_grad_batches=2 --trainer.val_check_interval=3": ["or --trainer.val_check_interval=4"],
    "--model.lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau --data.val_size=0": ["follows val/loss"],
    "--model.lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau --model.lr_scheduler.mode=max": ["the worst for"],
    "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau --model.lr_scheduler.monitor=vl/loss": ["val/loss?"],
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=train/loss --trainer.val_check_interval=5": [
        "not known yet",
        "check_on_train_epoch_end=true",
    ],
    "--best_checkpoint.monitor=train/acc_step --trainer.log_every_n_steps=2": ["=train/acc,"],
    "--best_checkpoint.monitor=train/accuracy": ["did you mean --best_checkpoint.monitor=train/acc?"],
    "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau --model.lr_scheduler.monitor=train/loss_step "
    "--trainer.strategy=ddp --trainer.devices=2": ["pass --model.lr_scheduler.monitor=train/loss,"],
    "--model.lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau --trainer.check_val_every_n_epoch=null "
    "--trainer.val_check_interval=99": ["follows val/loss"],
    "--trainer.val_check_interval=0.01": ["is less than one", "pass --trainer.val_check_interval=1"],
    "--trainer.val_check_interval=00:00:10:00": ["by the clock", "a number of batches"],
    "--trainer.overfit_batches=2 --data.balance.draw_equally=true": ["one repeats, one draws anew"],
    "--trainer.accumulate_grad_batches=2 --trainer.overfit_batches=1": ["whole steps: --trainer.overfit_batches=2"],
    "--trainer.callbacks+=StochasticWeightAveraging --trainer.callbacks.swa_lrs=0.01": ["EMAWeightAveraging"],
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val_loss": ["did you mean", "monitor=val/loss?"],
    "--trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=val/loss --data.val_size=0": ["no images are vali"],
    "--best_checkpoint.monitor=val/loss": ["the worst for the best", "--best_checkpoint.mode=min"],
    "--best_checkpoint.monitor=val_acc": ["did you mean --best_checkpoint.monitor=val/acc?"],
    "--trainer.callbacks+=BackboneFinetuning": ["frees parameters while it trains"],
    "--trainer.callbacks+=BatchSizeFinder": ["--data.batch_size=N"],
    '--trainer.callbacks+=GradientAccumulationScheduler --trainer.callbacks.scheduling={"0":1}': ["grad_batches=N"],
    "--trainer.callbacks+=LearningRateFinder": ["--model.optimizer.lr=VALUE"],
    "--trainer.callbacks+=ModelPruning --trainer.callbacks.pruning_fn=l1_unstructured": ["torch.nn.utils.prune"],
    "--trainer.callbacks+=lightning.pytorch.callbacks.SpikeDetection": ["+=EarlyStopping", "divergence_threshold="],
    "--trainer.callbacks+=ThroughputMonitor --trainer.callbacks.batch_size_fn=math.cos": ["train/images_per_s"],
    "--trainer.callbacks+=Timer --trainer.callbacks.duration=00:01:00:00": ["--trainer.max_time=DAYS:HOURS"],
    "--trainer.callbacks+=EMAWeightAveraging --trainer.strategy=DDPLayerParallelStrategy --trainer.devices=4 "
    "--trainer.strategy.start_method=spawn": ["cannot be sent to spawned processes"],
    "--trainer.callbacks+=EMAWeightAveraging --trainer.callbacks+=WeightAveraging": ["leave out all but one"],
    "--model.lr_scheduler=StepLR --model.lr_scheduler.step_size=0": ["--model.lr_scheduler.NAME=VALUE"],
    **({} if torch.cuda.is_available() else {"--trainer.accelerator=cuda": ["finds no GPU here"]}),
    "--trainer.devices=-1": ["--trainer.devices=-1", "--trainer.devices=2"],
    "--trainer.devices=abc": ["--trainer.devices=abc", "int > 0"],
    "--trainer.strategy=dp --trainer.num_nodes=2": ["--trainer.num_nodes=2", "--trainer.strategy=ddp"],
    "--trainer.strategy=mp --trainer.devices=10": ["10 stages of a network of 6 blocks"],
    "--trainer.strategy=dp --trainer.devices=2 --model.ghost_batchnorm.data_parallel_size=2": ["--trainer.devices=1"],
    "--data.val_size=96": ["--data.val_size=9"],
    "--data.num_train=97": ["--data.order.drop_last=true"],
    f"{TRANSFORM}Resize --data.augment.transforms.size=16": ["uint8, (3, 16, 16) of torch.uint8, (3, 32, 32)"],
    f"{TRANSFORM}MixUp --data.augment.transforms.num_classes=10": ["cannot transform", "--data.mixing.mixup=1.0"],
    f"{TRANSFORM}Normalize --data.augment.transforms.mean=[0.5] --data.augment.transforms.std=[1]": [
        "Normalize cannot transform a uint8 tensor (3, 32, 32): Input tensor should be a float tensor"
    ],
    "--data.augment.transforms+=builtins.dict": ["builtins.dict does not correspond to a subclass of Module"],
    "--data.num_workers=2": ["--data.num_workers=2, but these images are in memory"],
    "--data.augment.reflect=true --data.augment.padding=32": ["lower --data.augment.padding"],
    "--data.memory_gb=5": ["--data.memory_gb=5.0 is for pictures of your own"],
    "--data.dataset=cifar10 --data.download=false --data.root=nowhere": ["synthetic"],
    "--trainer.barebones=true": ["--trainer.barebones=true", "--trainer.fast_dev_run=N"],
    "--trainer.logger=false": ["--trainer.logger=false", "--trainer.fast_dev_run=N"],
    "--trainer.default_root_dir=x": ["--trainer.default_root_dir=x", "--run_dir=x"],
    "--trainer.strategy.num_microbatches=8": ["=auto ", "=CLASS --trainer.strategy.num_microbatches=8"],
    # A value that an option cannot have: what it can be, and what may have been meant.
    "--data.num_train=many": ["--data.num_train=many must be a whole number or null"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.num_stages=x": ["num_stages=x must be a whole number"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.timeout=soon": ["must be a duration, as 0:10:00"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.schedule=1F2B": ["GPipe, 1F1B", "schedule=1F1B?"],
    "--data.dataset=cifar-100": ["cifar10, cifar100, synthetic, ", "--data.dataset=cifar100?"],
    "--data.augment.cutot=8": ["did you mean --data.augment.cutout?"],
    "--data.augment=maybe": ["--data.augment=maybe must be true or false"],
    "--model.optimizer=torch.optim.Sgd": ["did you mean --model.optimizer=SGD?"],
    "--model.lr_scheduler=cosine": ["did you mean --model.lr_scheduler=CosineAnnealing"],
    "--model.network=torchvision.models.resnet19": ["did you mean --model.network=torchvision.models.resnet18?"],
    "--model.arch=ResNet-18": ["did you mean --model.arch=resnet18?"],
    "--trainer.callbacks+=EarlyStoping": ["did you mean --trainer.callbacks=EarlyStopping?"],
    "--trainer.strategy=PipelineStrategi": ["mean --trainer.strategy=pp?", "the modes: auto, dp, "],
    "--model.optimizer=LBFGS": ["computes a batch several times", "pass another --model.optimizer"],
    "--model.optimizer=qqq": ["--model.optimizer=qqq: there is no such class", "--help"],
    "--model.num_classes=11": ["synthetic has 10", "--model.num_classes=10"],
    "--data.mixing.cutmix=inf": ["--data.mixing.cutmix=inf"],
    "--data.balance.class_weights=[1,2]": ["2 factors for 10 classes", "disc plain"],
    "--data.balance.class_weights=[1,-2]": ["[1.0, -2.0]", "balanced"],
    "--data.balance.class_weights=equal": ["class_weights"],
    "--model.fine_tuning.freeze=conv1": ["freeze=conv1 matches no parameter of TinyResNet", "conv1.*"],
    "--model.fine_tuning.freeze=['conv1.*','bn1.wieght']": ["freeze=bn1.wieght matches no", "bn1.weight"],
    "--model.fine_tuning.freeze=*": ["freeze=* leaves nothing of TinyResNet to train", "name fewer"],
    # Lightning disables Comet's experiment where it is to be offline. Comet need not be installed.
    "--trainer.logger=CometLogger --trainer.logger.online=false": ["would record nothing", "offline"],
    # What does not go together.
    "--data.balance.draw_equally=true --data.balance.class_weights=balanced": ["both correct rare classes"],
    "--model.fine_tuning.head_lr=1 --model.optimizer=lit_cifar.MuonSGD": ["takes no parameter groups"],
    "--trainer.strategy=ddp --trainer.devices=2 --trainer.sync_batchnorm=true --model.compile=true": [
        "--trainer.sync_batchnorm=true: it cannot be traced how each BatchNorm communicates"
    ],
    "--model.compile=cuda_graphs --trainer.devices=2": ["needs a mode by name"],
    "--model.compile=cuda_graphs --trainer.accumulate_grad_batches=2": ["a graph overwrites those of the batch before"],
}
# Each with --virtual_replicas=4: what would change the bits.
OTHER_BITS = {
    "--virtual_replicas=3": ["no power of two"],
    "--virtual_replicas=32": ["--data.batch_size=16"],
    "--trainer.strategy=mp --trainer.devices=2 --model.compile=true": ["compiled to other kernels"],
    "--trainer.strategy=fsdp2 --trainer.devices=2 --model.channels_last=true": ["parameters in torch's own order"],
    "--trainer.strategy=dp --trainer.devices=3": ["so that there are 2"],
    "--trainer.strategy=ddp --trainer.devices=2 --trainer.sync_batchnorm=true": ["each part is normalised by itself"],
    "--trainer.accumulate_grad_batches=2": ["another order"],
    "--data.eval_batch_size=6": ["--data.eval_batch_size=6"],
    "--model.optimizer=lit_cifar.MuonSGD": ["its bits depend on how many matrices a process has"],
    "--trainer.strategy=LayerParallelStrategy --trainer.devices=2 --trainer.strategy.num_microbatches=2": [
        "a part passes all stages before the next one"
    ],
    "--trainer.strategy=PipelineStrategy --trainer.devices=2 --trainer.strategy.num_microbatches=2": [
        "num_microbatches=4"
    ],
    "--trainer.strategy=ddp_pp --trainer.devices=8": ["pass --virtual_replicas=8"],
    "--trainer.strategy=fsdp2 --trainer.devices=1": ["on one process does not reduce"],
}
REFUSED |= {f"--virtual_replicas=4 --data.eval_batch_size=8 {flags}": words for flags, words in OTHER_BITS.items()}
# Whole commands.
WHOLE = {
    "doctor --device=2": "--device=2",
    "fit --resume=auto": "--run_dir",
    "fit --resume=auto --run_dir=run --ckpt_path=some.ckpt": "--ckpt_path",
    "test --resume=auto --run_dir=run": "resumes a training, and this is test",
    "ray": "command",
    "ray fti": "'fti'",
    "ray --nodes=1:2 fit": "1:2 is not a whole number from 1",
    "ray fit --trainer.devices=2": "--trainer.devices itself",
    "ray --max_failures=3 fit": "--resume=auto",
    "ray --max_failures=3 fit --config=some.yaml": "--resume=auto",
    "ray --max_failures=-1 fit": "-1 is not a whole number from 0",
    "verify --modes=dpp": "dpp",
    "verify --devices=1": "--devices=1",
    f"verify --devices={10**12}": "--devices 2",
    "verify --steps=1": "--steps=1",
    "verify --trainer.strategy=ddp": "--trainer.strategy",
    "verify --ckpt_path=last.ckpt": "--ckpt_path",
    "verify --json=/nowhere/at/all.json": "--json",
}
ALL = [
    *(pytest.param(["fit", *TINY, *flags.split()], says, id=flags) for flags, says in REFUSED.items()),
    *(pytest.param(line.split(), [says], id=line) for line, says in WHOLE.items()),
]


@pytest.mark.parametrize(("command", "says"), ALL)
def test_what_cannot_work_is_refused_before_anything_is_written(
    command: list[str], says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """And before Lightning says on what it runs, and with which seed. A fit says nothing of Python's types."""
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        said = refused(*command, says=says)
    assert command[0] != "fit" or not any(word in said for word in ("Errors:", "class '"))
    assert caplog.text == ""
    assert {*tmp_path.rglob("*")} <= {tmp_path / "runs"}  # empty


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"\x8d\xff\x00", "not text"),
        (b"trainer: {}\0", "config.yaml: "),
        (b"model:\n\tarch: tiny", "line 2, column 1"),
        (b"model:\n  lr_scheduler:", "pass --model.lr_scheduler=ConstantLR --model.lr_scheduler.factor=1 to keep"),
        (b"- model\n- data", "config.yaml holds no settings"),
        (b"model: {}\ndata: [1]", "has no settings of data in line 2"),
        (b"data:\n  augment:\n    padding:", "--data.augment.padding=None must be at least 0"),
        (b"data:\n  mixing: true", "has no settings of data.mixing in line 2"),
        (b"figures:\n  # every_n_epochs: 9", "has no settings of figures in line 1"),
        (b"data:\n  val_size: 8\n  val_size: 9", "config.yaml holds data.val_size again in line 3"),
    ],
)
def test_a_config_without_settings_or_with_one_twice_is_refused(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    refused("fit", f"--config={tmp_path / 'config.yaml'}", says=[says])


def test_a_config_is_no_pipe(tmp_path: Path) -> None:
    """Not even one of `<(COMMAND)`, which has no name."""
    os.mkfifo(tmp_path / "config.yaml")
    reader, writer = os.pipe()
    for pipe in (tmp_path / "config.yaml", f"/dev/fd/{reader}"):
        refused("fit", f"--config={pipe}", says=[f"--config={pipe} is a pipe"])
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(
    ("variables", "flags", "words"),
    [
        # As another rank than 0 the only process would write nothing.
        ({"RANK": "1"}, [], ["RANK=1 in the environment", "unset RANK"]),
        ({"LOCAL_RANK": "1"}, [], ["LOCAL_RANK=1 in the environment", "unset LOCAL_RANK"]),
        ({"SLURM_PROCID": ""}, [], ["SLURM_PROCID='' in the environment is not a rank", "unset SLURM_PROCID"]),
        ({"SLURM_NTASKS": ""}, [], ["SLURM_NTASKS='' in the environment is not a number", "unset SLURM_NTASKS"]),
        ({"WORLD_SIZE": "x"}, [], ["WORLD_SIZE='x' in the environment is not a number", "unset WORLD_SIZE"]),
        # Processes that could not meet.
        ({"MASTER_PORT": "abc"}, mode_flags("ddp"), ["MASTER_PORT=abc", "export MASTER_PORT="]),
        ({"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}, mode_flags("ddp"), ["MASTER_PORT does not", "export"]),
    ],
)
def test_an_environment_in_which_no_run_can_work_is_refused(
    variables: dict[str, str], flags: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "1" in variables.values():
        monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)  # as Lightning's import finds it
        monkeypatch.setattr("lit_cifar.launch.startup.exit_with_parent", list)
    refused("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}", says=words)
    assert not list(tmp_path.iterdir())


# Cut evenly by every number of devices and microbatches below; two full batches.
BATCHES = ["--data.num_train=496", "--data.batch_size=240"]

SIZES = [
    # Without two dashes it is a flag of the trainer.
    "strategy=PipelineStrategy devices=5 strategy.num_microbatches=4",
    "strategy=PipelineStrategy devices=1 strategy.schedule=Interleaved1F1B",
    "strategy=PipelineStrategy devices=2 strategy.schedule=Interleaved1F1B strategy.num_microbatches=5",
    "strategy=PipelineStrategy devices=5 strategy.num_microbatches=0",
    "strategy=PipelineStrategy devices=2 strategy.num_stages=3 strategy.schedule=Interleaved1F1B",
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
    "val_check_interval=0",
    "val_check_interval=3",  # longer than an epoch
    "limit_train_batches=0.1",  # less than a batch
    "overfit_batches=0.1",
    "--model.image_size=-1",
    f"--model.ghost_batchnorm.accumulation=2 --model.ghost_batchnorm.data_parallel_size={10**12}",
    "--data.val_size=-1",
]


@pytest.mark.parametrize("flags", SIZES)
def test_every_remedy_is_accepted(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)  # all that is found before processes are started
    command = [*TINY, *BATCHES, *(flag if flag.startswith("--") else f"--trainer.{flag}" for flag in flags.split())]
    remedy = refused("fit", *command).strip().splitlines()[-1]
    alternatives = [found for part in re.split(r"\bor\b", remedy) if (found := re.findall(r"--[\w.]+=\w+", part))]
    assert alternatives
    assert not re.search(r"--trainer\.strategy\.\w+(?![\w=])", remedy)  # a flag without a value cannot be pasted
    for pasted in alternatives:
        run_here("fit", *command, *pasted)


# Where each number of ours is bounded, and between what.
def augmentation(**settings: Any) -> object:
    return Augment(**settings).of_images(32, seed=0)


OWN_BOUNDS: dict[str, tuple[Callable[..., object], float, float]] = {
    "model.label_smoothing": (partial(LitResNet, "tiny"), 0, 1),
    "model.rate_scaling.base_batch_size": (RateScaling, 1, math.inf),
    "model.fine_tuning.head_lr": (FineTuning, 0, math.inf),
    "data.batch_size": (partial(CIFAR10DataModule, dataset="synthetic"), 1, 2**31),
    "data.eval_batch_size": (partial(CIFAR10DataModule, dataset="synthetic"), 1, 2**31),
    "data.seed": (partial(CIFAR10DataModule, dataset="synthetic"), 0, math.inf),
    "data.val_size": (partial(CIFAR10DataModule, dataset="synthetic"), 0, math.inf),
    "data.num_workers": (partial(CIFAR10DataModule, dataset="folder"), 0, 2**16),
    "data.augment.padding": (augmentation, 0, math.inf),
    "data.augment.cutout": (augmentation, 0, math.inf),
    "data.mixing.mixup": (Mixing, 0, 1000),
    "data.mixing.cutmix": (Mixing, 0, 1000),
    "data.memory_gb": (partial(CIFAR10DataModule, dataset="folder"), 0, math.inf),
    "figures.every_n_epochs": (EvaluationFigures, 0, math.inf),
    "watchdog.timeout_s": (Watchdog, 5, math.inf),  # there may be no beat in a shorter time
    "watchdog.hang_timeout_s": (Watchdog, 5, math.inf),
    "last_checkpoint.every_n_epochs": (LastCheckpoint, 0, math.inf),
    "last_checkpoint.every_n_steps": (LastCheckpoint, 1, math.inf),
}


def test_a_number_out_of_bounds_is_refused_with_one_within() -> None:
    """Of every flag that has bounds; a flag that was renamed would have none."""
    settings = yaml.safe_load(run_here("fit", *TINY, "--data.augment.cutout=1", "--print_config").stdout)
    of_trainer = {name: (check_bounds, *bounds) for name, bounds in BOUNDS.items()}
    for name, (make, least, most) in (of_trainer | OWN_BOUNDS).items():
        reduce(getitem, name.split("."), settings)  # a KeyError where there is no such flag
        for beyond in (least - 1, *([] if most == math.inf else [10**12])):
            given = {"arguments": Namespace({name: beyond})} if make is check_bounds else {name.split(".")[-1]: beyond}
            with pytest.raises(ConfigError, match=f"--{name}={beyond} must be ") as error:
                make(**given)
            (told,) = re.findall(rf"--{name}=(\d+)", error.value.remedy)
            assert least <= int(told) <= most
