"""The callback by which replicas compare their tensors and gradients in anyone's Lightning training.

A bit that flips in the memory of one rank, or a different step of one rank, leaves no trace in the loss. The gradients
are averaged, so all ranks go on together, each from weights of its own. A wrong gradient of one rank is in the average,
and so in the weights of all.
"""

from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lit_cifar.errors import ConfigError, ReplicaAuditError
from lit_cifar.launch.restarts import exclude
from lit_cifar.mode import mode_of

if TYPE_CHECKING:
    from lit_cifar.checks.replica_audit.gradients import NeighborAudit
    from lit_cifar.checks.replica_audit.replicas import Difference, Held

_MAX_LINES = 8


class ReplicaAudit(Callback):
    """Compares the copies of parameters, optimizer states, and constant buffers on all ranks.

    Ordinary steps do not wait for it. In an audit each rank sends two numbers; only if they differ are all digests
    gathered, and the majority is right. A checkpoint is written after an audit, so checkpoints on the disk are of equal
    replicas. In the step after an audit each rank also repeats the next rank's batch, whose gradients must be the same
    bit for bit. If they are not, all ranks repeat that batch, and the majority is right. Where a rank does not get its
    own gradients again, or no majority agrees, a step depends on something that cannot be repeated: rank 0 says so
    once.

    It works with `DistributedDataParallel` and with this package's strategies; gradients are repeated with the former.
    For other strategies it tells once why not.

    Args:
        every_n_steps: Optimizer steps between two audits; 0 for none.
        stop: End the training where replicas differ, by a `ReplicaAuditError` on every rank. With false rank 0 warns.
        exclude: Where `fit --max_restarts` starts `ddp` again, go on without the rank that differs from most.
    """

    def __init__(self, every_n_steps: int = 200, *, stop: bool = True, exclude: bool = False) -> None:
        if every_n_steps < 0:
            problem = f"--replica_audit.every_n_steps={every_n_steps} is less than 0"
            raise ConfigError(problem, remedy="pass 200, or 0 for none")
        self.every_n_steps, self.stop, self.exclude = every_n_steps, stop, exclude
        self._held: Held | None = None
        self._gradients: NeighborAudit | None = None
        self._step = self._equal = 0  # steps of the last audit, and of the last without a difference
        self._repeated = 0  # the step before which gradients were repeated last
        self._has_told = False  # whether it was reported that some steps were not judged

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._held = self._gradients = None
        self._step = self._equal = self._repeated = trainer.global_step
        if not self.every_n_steps or trainer.world_size == 1:
            return
        # One process needs none of these.
        from lit_cifar.checks.replica_audit.gradients import NeighborAudit, why_not_repeated
        from lit_cifar.checks.replica_audit.replicas import Held, what_is_not_held_twice

        what, reason = "replicas", what_is_not_held_twice(trainer)
        if not reason:
            self._held = Held(trainer, pl_module)
            what, reason = "gradients", why_not_repeated(trainer)
        if not reason:
            self._gradients = NeighborAudit(trainer, pl_module)
        elif not mode_of(trainer.strategy).is_own:  # the page says it of our own modes
            rank_zero_info(f"{what} are not compared: {reason}")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._gradients is None or not self._is_due(trainer, since=self._repeated):
            return
        from lit_cifar.checks.repeated_step.lightning_view import is_written_down  # one process needs no repeats

        # `Replay` would take the gradients of a repeat for those of the step: an audit that is due waits for it.
        if not is_written_down(trainer):
            self._gradients.observe()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._gradients is None or (self._gradients.own is None and not self._gradients.failure):
            return
        before, self._repeated = self._repeated, trainer.global_step
        found, reason = self._gradients.compare()
        if self._gradients.failure:
            self._gradients = None
            rank_zero_warn(f"gradients are not compared any more: {reason}")
        elif reason and not self._has_told:
            self._has_told = True
            rank_zero_warn(f"gradients of step {self._repeated + 1} are not judged, which is said once: {reason}")
        if found:
            self._tell(f"ranks compute unlike gradients of one batch in step {self._repeated + 1}", found, equal=before)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if self._held is not None and self._is_due(trainer, since=self._step):
            self._audit(trainer, self._held)

    def _is_due(self, trainer: Trainer, *, since: int) -> bool:
        return trainer.global_step // self.every_n_steps > since // self.every_n_steps

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._held is not None and trainer.state.fn == TrainerFn.FITTING and trainer.global_step > self._step:
            self._audit(trainer, self._held)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._held is not None and trainer.global_step > self._step:
            self._audit(trainer, self._held)

    def _audit(self, trainer: Trainer, held: "Held") -> None:
        self._step = trainer.global_step
        if found := held.differences():
            self._tell(f"replicas differ after optimizer step {self._step}", found, equal=self._equal)
        else:
            self._equal = self._step

    def _tell(self, what: str, found: "list[Difference]", *, equal: int) -> None:
        more = [f"and {len(found) - _MAX_LINES} more"] if len(found) > _MAX_LINES else []
        good = "checkpoints that were written until then are good: go on from the newest of them"
        message = "\n".join([f"{what}; after step {equal} they were equal", *map(str, found[:_MAX_LINES]), *more, good])
        if self.exclude:
            for rank in {rank for difference in found if difference.num_others for rank in difference.ranks}:
                exclude(rank)
        if self.stop:
            raise ReplicaAuditError(message)
        rank_zero_warn(message)
