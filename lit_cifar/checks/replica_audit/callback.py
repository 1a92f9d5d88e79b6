"""The callback by which replicas compare their tensors in anyone's Lightning training.

A bit that flips in the memory of one rank, or a different step of one rank, leaves no trace in the loss. The gradients
are averaged, so all ranks go on together, each from weights of its own.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_cifar.errors import ReplicaAuditError, bounded
from lit_cifar.mode import mode_of

if TYPE_CHECKING:
    from lit_cifar.checks.replica_audit.replicas import HeldTensors

_MAX_LINES = 8


class ReplicaAudit(Callback):
    """Compares the copies of parameters, optimizer states, and buffers on all ranks.

    Ordinary steps do not wait for it. In an audit each rank sends two numbers; only if they differ are all digests
    gathered, and the majority is right. An audit comes before each checkpoint but those of weights alone.

    It works with `DistributedDataParallel` and with this package's strategies. For others it tells once why not.

    Args:
        every_n_steps: Optimizer steps between two audits; 0 for none.
        stop: End a training whose trained parameters or optimizer states differ, by a `ReplicaAuditError` on every
            rank. Without it rank 0 warns once. What nothing keeps equal, such as a buffer, ends no training.
    """

    def __init__(self, every_n_steps: int = 200, *, stop: bool = False) -> None:
        self.every_n_steps, self.stop = bounded("--replica_audit.every_n_steps", every_n_steps, 0), stop
        self._held: HeldTensors | None = None
        self._step = self._equal = 0  # steps of the last audit, and of the last without a difference

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._held = None
        self._step = self._equal = trainer.global_step
        if not self.every_n_steps or trainer.world_size == 1:
            return
        # One process needs none of it.
        from lit_cifar.checks.replica_audit.replicas import HeldTensors, why_not_compared

        if not (reason := why_not_compared(trainer)):
            self._held = HeldTensors(trainer, pl_module)
        elif not mode_of(trainer.strategy).is_own:  # the page says it of our own modes
            rank_zero_info(f"replicas are not compared: {reason}")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._held is not None and trainer.global_step // self.every_n_steps > self._step // self.every_n_steps:
            self._audit(trainer, self._held)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        # After an error of one rank the others would take the sum for one of their gradients.
        if self._held is not None and not trainer.interrupted and trainer.global_step > self._step:
            self._audit(trainer, self._held)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._held is not None and trainer.global_step > self._step:
            self._audit(trainer, self._held)

    def _audit(self, trainer: Trainer, held: "HeldTensors") -> None:
        from lit_cifar.checks.verdict import at_most

        self._step = trainer.global_step
        found, others = held.disagreements()
        if others:
            what = f"different on replicas after optimizer step {self._step}, and DDP does not keep them equal"
            rank_zero_info("\n".join([what, *at_most(_MAX_LINES, [f"  {each}" for each in others])]))
        if not found:
            self._equal = self._step
            return
        what = f"replicas differ after optimizer step {self._step}; after step {self._equal} they were equal"
        good = "checkpoints that were written until then are good: go on from the newest of them"
        message = "\n".join([what, *at_most(_MAX_LINES, [f"  {each}" for each in found]), good])
        if self.stop:
            raise ReplicaAuditError(message)
        rank_zero_warn(f"{message}\nThe training goes on, and replicas are not compared again")
        self._held = None
