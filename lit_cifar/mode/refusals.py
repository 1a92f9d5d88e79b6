"""What a mode refuses: one table, option by mode. The command line, the tests and docs/gpu-options.md read it.

What depends on sizes, on the network or on a library is refused where it is known; Lightning's messages cover the rest.
"""

from dataclasses import dataclass

from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.errors import ConfigError, clash
from lit_cifar.mode import Mode, mode_of
from lit_cifar.mode.table import MODES

NAMES = tuple("single_device" if row.name == "single" else row.name for row in MODES)
NEED_GPU = ("--model.compile=cuda_graphs", "--trainer.precision=16-mixed")
_DDP = "leave it out, or use --trainer.strategy=ddp"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    option: str  # as a user types it
    modes: tuple[str, ...] = ()  # names of the modes that refuse it
    all_but: tuple[str, ...] = ()  # or of those that alone take it; any other strategy refuses it then
    problem: str  # what is said; "{option}", "{mode}" and other names in braces are filled in
    remedy: str = _DDP


_SHARDED = ("fsdp2", "tp")
TABLE = (
    Refusal(
        option="--model.compile=true",
        modes=("dp", "tp"),
        problem="{option} traces neither copies of a network in threads nor messages of its layers, as of {mode}",
    ),
    Refusal(
        option="--model.compile=cuda_graphs",
        all_but=("single_device", "ddp", "ddp_flat"),
        problem="{option} is for one GPU and ddp: no message can be part of a graph",
        remedy="pass --model.compile=true",
    ),
    Refusal(
        option="--model.optimizer.fused=true",
        modes=_SHARDED,
        problem="{option}: a fused {optimizer} cannot step parts of tensors, as {mode} makes",
        remedy="pass --model.optimizer.fused=false, or --model.optimizer=AdamW --model.optimizer.lr=0.001, which can",
    ),
    Refusal(
        option="--model.optimizer=lit_cifar.MuonSGD",
        modes=_SHARDED,
        problem="--model.optimizer={optimizer} needs whole tensors, and {mode} has parts",
        remedy="pass another optimizer, or --trainer.strategy=ddp",
    ),
    Refusal(
        option="--trainer.sync_batchnorm=true",
        modes=("dp", "pp", "ddp_pp", "tp"),
        problem="{option} has no effect on {mode}: what a replica sees at once, it normalises by itself",
    ),
    Refusal(
        option="--virtual_replicas=4",
        modes=("tp",),
        problem="--virtual_replicas={parts}: how {mode} rounds depends on the number of processes",
        remedy="leave it out, or pass --trainer.strategy=fsdp2",
    ),
    Refusal(
        option="--trainer.callbacks+=EMAWeightAveraging",
        modes=("ddp_spawn", "ddp_flat", "pp", "ddp_pp", *_SHARDED),
        problem="a callback averages weights, of which a process has parts, or cannot be sent to spawned processes",
        remedy="leave it out, or pass --trainer.strategy=ddp, without --model.compile=cuda_graphs",
    ),
)


def refusal_of(option: str, name: str) -> Refusal | None:
    """The row of the table by which the mode of this name refuses `option`."""
    rows = (row for row in TABLE if row.option == option)
    return next((row for row in rows if (name not in row.all_but if row.all_but else name in row.modes)), None)


def refuse(option: str, mode: Mode, **names: object) -> None:
    """Raise the `ConfigError` of the table if `mode` refuses `option`; `names` fill in the text.

    What `ddp_spawn` refuses, any mode refuses whose processes are spawned.
    """
    row = refusal_of(option, mode.name) or (refusal_of(option, "ddp_spawn") if mode.is_spawned else None)
    if row is not None:
        shown = {"option": option, "mode": f"--trainer.strategy={mode.name}", **names}
        raise ConfigError(row.problem.format(**shown), remedy=row.remedy)


def check_cuda_graphs(trainer: Trainer, *, has_parts: bool) -> None:
    """Refuse CUDA graphs where there is no GPU, and where gradients are kept while the next batch passes."""
    flag = "--model.compile=cuda_graphs"
    refuse(flag, mode_of(trainer.strategy))
    if type(trainer.strategy) is DDPStrategy:  # which Lightning chooses for several devices, or a user by its class
        raise ConfigError(f"{flag} needs a mode by name", remedy="pass --trainer.strategy=ddp, or --trainer.devices=1")
    batches = trainer.accumulate_grad_batches
    if batches > 1 or has_parts:
        other = f"--trainer.accumulate_grad_batches={batches}" if batches > 1 else "--virtual_replicas"
        raise clash(flag, other, "gradients are added up, and a graph overwrites those of the batch before")
    if trainer.strategy.root_device.type != "cuda":
        raise ConfigError(f"{flag} needs a GPU", remedy="pass --model.compile=true, or leave it out")


def check_sync_batchnorm(trainer: Trainer, *, compiles: bool) -> None:
    """Refuse statistics of all processes in a compiled network, and warn where one process has the whole batch."""
    if trainer.world_size == 1:
        rank_zero_warn("--trainer.sync_batchnorm=true has no effect with one process, which sees the whole batch")
    elif compiles:
        why = "it cannot be traced how each BatchNorm communicates"
        raise clash("--model.compile=true", "--trainer.sync_batchnorm=true", why)
