"""The modes to choose from, a row each. `lit_cifar.tools.modes` has the sizes with which `verify` runs them."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """A mode, as `python -m lit_cifar doctor` lists it."""

    name: str  # as in `--trainer.strategy` and `configs/modes/`; "single" is one device without a strategy
    splits: str  # what is divided, and over what
    processes: str  # number of processes, from N devices and S stages
    min_devices: int = 2  # the smallest number of devices among which the mode divides the work

    def flags(self, num_devices: int) -> list[str]:
        strategy = [] if self.name == "single" else [f"--trainer.strategy={self.name}"]
        return [*strategy, f"--trainer.devices={num_devices}"]


MODES = (
    Row(name="single", splits="nothing: the reference", processes="1", min_devices=1),
    Row(name="dp", splits="the batch, over devices of one process", processes="1"),
    Row(name="ddp", splits="the batch, over processes", processes="N"),
    Row(name="ddp_spawn", splits="the same, started by multiprocessing", processes="N"),
    Row(name="mp", splits="the layers, over devices of one process", processes="1"),
    Row(name="ddp_mp", splits="batch over processes, layers over devices of each", processes="N / S", min_devices=4),
    Row(name="pp", splits="the layers, over processes", processes="N"),
    Row(name="ddp_pp", splits="the batch over pipelines, the layers along each", processes="N", min_devices=4),
    Row(name="fsdp2", splits="parameters, gradients and optimizer state", processes="N"),
    Row(name="tp", splits="the tensors inside layers", processes="N"),
)
