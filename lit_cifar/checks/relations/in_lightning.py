"""Lightning's `Trainer` in a watched process: shorter, on as many CPU processes as the run has, and followed."""

import copy
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_cifar.checks.relations import evaluation, remarks
from lit_cifar.checks.relations.batches import sample_digests
from lit_cifar.checks.relations.generators import seed_all
from lit_cifar.checks.relations.interruption import CHECKPOINT, Moment, StopAt
from lit_cifar.checks.relations.own_devices import of_trainer
from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.watching import Ended, Watched
from lit_cifar.errors import one_line
from lit_cifar.mode.table import MODES

_OWN = ("_", "trainer", "training", "fabric", "prepare_data_per_node", "allow_zero_length_dataloader", "example_input")
_DDP = "ddp_find_unused_parameters_true"  # of a script that names no strategy, such as one with two models
_STARTED = re.compile("_(spawn|fork|notebook)")  # ways to start the processes, which a run has already
_INSIDE = ("every_n_train_steps", "train_time_interval", "save_on_exception")  # what lets a `ModelCheckpoint` save so
_IN_ONE_PROCESS = {row.name for row in MODES if row.processes == "1"}  # strategies with all devices in it


class _Logger(DummyLogger):
    """Takes the place of the script's own, which may send what it is told."""

    save_dir = log_dir = "logs"


class InLightning(Checkpoint):
    """Follows the trainers of a process, up to the end of the first `fit`: notes samples, saves where the plan says.

    A `Checkpoint`, so that it comes after other callbacks.
    """

    def __init__(self, watched: Watched) -> None:
        self._watched, self._plan, self._trace = watched, watched.plan, watched.trace
        self._trained, self._most = 0, -1  # batches; the script's own limit of steps

    def patch(self) -> None:
        for name, module in [*sys.modules.items()]:  # a script may import parts of Lightning by names of their own
            for own, part in (("pytorch_lightning", "lightning.pytorch"), ("lightning_fabric", "lightning.fabric")):
                if name == part or name.startswith(f"{part}."):
                    sys.modules[own + name.removeprefix(part)] = module
        patched(pl.Trainer, "__init__", self._make)
        patched(pl.Trainer, "fit", self._fit)
        patched(Strategy, "setup_optimizers", self._set_up)
        patched(pl.Trainer, "save_checkpoint", before(self._note_place))
        patched(ModelCheckpoint, "__init__", before(self._note_places))
        for name in ("lr_find", "scale_batch_size"):
            patched(Tuner, name, self._refuse)
        warnings.filterwarnings("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    def _note_place(self, trainer: pl.Trainer, *_: Any, **__: Any) -> None:
        self._trace.script.saves_inside |= not trainer.is_last_batch

    def _note_places(self, *_: Any, **own: Any) -> None:
        self._trace.script.saves_inside |= any(own.get(name) for name in _INSIDE)

    def _set_up(self, set_up: Any, strategy: Strategy, trainer: pl.Trainer) -> None:
        """A schedule may ask for the limit of steps, with which Lightning itself would resume an epoch otherwise."""
        trainer.fit_loop.epoch_loop.max_steps = self._most
        set_up(strategy, trainer)
        trainer.fit_loop.epoch_loop.max_steps = -1

    def _refuse(self, search: Any, *_: Any, **__: Any) -> None:
        raise RuntimeError(f"Tuner.{search.__name__} trains before the training: leave it out here")

    def _make(self, make: Any, trainer: pl.Trainer, *args: Any, **own: Any) -> None:
        make(trainer, *args, **self.settings(own))
        trainer.callbacks.append(self)  # type: ignore[attr-defined]
        Path(_Logger.save_dir).mkdir(exist_ok=True)  # as the script's own logger would
        self._follow(trainer)

    def _follow(self, trainer: pl.Trainer) -> None:
        self._watched.phase = lambda: "train" if trainer.training else "evaluate"

    def _fit(self, fit: Any, trainer: pl.Trainer, model: pl.LightningModule, *args: Any, **settings: Any) -> None:
        names = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
        settings |= dict(zip(names, args, strict=False))
        if isinstance(settings.get("train_dataloaders"), pl.LightningDataModule):  # as Lightning's own `fit` takes it
            settings["datamodule"] = settings.pop("train_dataloaders")
        self._follow(trainer)  # another may have been made since
        self._trace.script.is_lightning = True
        self._watched.parts.roots[:] = [model]
        data = {"dataloaders": settings.get("val_dataloaders"), "datamodule": settings.get("datamodule")}
        if validate := self._plan.asked(evaluation.Validate):
            self._validate(trainer, model, data, evaluation.AS_IT_IS, validate.checkpoint)
            raise Ended
        if self._watched.go_on:
            settings["ckpt_path"] = self._watched.go_on.checkpoint
        else:
            seed_all("fit", self._plan.seed, self._watched.rank)
        fit(trainer, model, **settings)
        if self._plan.asks == evaluation.VALIDATE_IN_MANY_WAYS:
            self._validate_in_many_ways(trainer, model, data)
        raise Ended

    def settings(self, own: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the Trainer: the script's own, but for lengths, devices, precision and what prints."""
        plan, script, limits = self._plan, self._trace.script, self._plan.limits
        devices, strategy = own.get("devices", "auto"), own.get("strategy", "auto")
        if isinstance(strategy, str):
            strategy = _STARTED.sub("", strategy)
        if str(devices) in ("auto", "-1"):  # all that there are: several, if the strategy is one of several
            script.ranks = 2 if "ddp" in str(strategy).lower() else 1
        else:  # a number, or the numbers of devices
            script.ranks = int(devices) if str(devices).isdigit() else 1 + str(devices).strip("[],").count(",")
        script.calls["accumulate"] = own.get("accumulate_grad_batches") or 1
        script.epochs, script.batches = own.get("max_epochs") or 0, own.get("limit_train_batches") or 1.0
        if (most := own.get("max_steps", -1)) >= 0:
            self._most = most
            self._watched.most_steps = min(self._watched.most_steps, most - self._watched.steps_before)
        callbacks = own.get("callbacks") or []
        callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else callbacks
        changed = {
            "accelerator": "cpu",
            "callbacks": [one for one in callbacks if not isinstance(one, ProgressBar | ModelSummary)],
            **{"devices": plan.ranks, "num_nodes": 1},
            "accumulate_grad_batches": dict(plan.knobs).get("accumulate", script.window),
            "strategy": "auto" if plan.ranks == 1 else _DDP if strategy == "auto" else strategy,
            "max_epochs": _at_most(limits.epochs, own.get("max_epochs")),
            "limit_train_batches": _at_most(limits.batches, own.get("limit_train_batches")),
            "limit_val_batches": plan.evaluated if own.get("limit_val_batches") != 0 else 0,  # a few are other samples
            **{"max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None, "overfit_batches": 0.0},
            **{"fast_dev_run": False, "barebones": False, "profiler": None, "benchmark": None},
            **{"enable_progress_bar": False, "enable_model_summary": False, "num_sanity_val_steps": 0},
            "logger": own["logger"] if own.get("logger") is False else _Logger(),
        }
        if isinstance(every := own.get("val_check_interval"), int):
            script.saves_inside = True
            changed["val_check_interval"] = min(every, limits.batches)
        if isinstance(strategy, str) and strategy in _IN_ONE_PROCESS:
            script.ranks = 1
            changed |= {"devices": devices, "strategy": strategy}
        if plan.on_own_devices:
            changed |= of_trainer(plan, own)
        elif plan.double or "mixed" in str(own.get("precision")):
            changed |= {"precision": "64-true" if plan.double else "32-true", "plugins": None}
        return own | changed | dict(plan.trainer)

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._watched.continues()
        if not self._trace.first:
            self._look_at(trainer)
            self._watched.begins()
        self._save(trainer, "hooks", self._trained)
        self._watched.note_samples(sample_digests(batch))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._trained += 1
        reading = self._trace.reading
        reading.batches_of_epoch, reading.epochs_begun = int(trainer.num_training_batches), trainer.current_epoch + 1
        self._save(trainer, "batch", self._trained)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "epoch", trainer.current_epoch + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._look_at(trainer)  # before a strategy puts the parts of a model together
        self._trace.state = self._watched.parts.snapshot()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._trace.logged.append((trainer.global_step, _metrics_of(trainer)))
            if self._plan.asks == evaluation.KEEP_VALIDATED:
                trainer.save_checkpoint(self._watched.folder / evaluation.VALIDATED)

    def _save(self, trainer: pl.Trainer, after: Moment, number: int) -> None:
        if self._watched.stop == StopAt(number, after):
            trainer.save_checkpoint(self._watched.folder.parent / CHECKPOINT)
            self._look_at(trainer)
            self._watched.has_saved()
            raise Ended

    def _look_at(self, trainer: pl.Trainer) -> None:
        """Note what the trainer holds."""
        module, parts, callbacks = trainer.lightning_module, self._watched.parts, trainer.callbacks  # type: ignore[attr-defined]
        parts.roots[:], parts.optimizers[:] = [module], trainer.optimizers
        parts.schedules[:] = [config.scheduler for config in trainer.lr_scheduler_configs]
        for number, callback in enumerate(callbacks):
            if not type(callback).__module__.startswith(("lightning.", "lit_cifar.")):
                parts.kept[f"callback {number} {type(callback).__name__}"] = callback
        parts.kept["module"] = {name: value for name, value in vars(module).items() if not name.startswith(_OWN)}
        parts.kept["metric"] = _metrics_of(trainer)
        if any(isinstance(part, EarlyStopping | ReduceLROnPlateau) for part in (*callbacks, *parts.schedules)):
            self._trace.remarks.add(remarks.FOLLOWS_EVALUATION)
        if not module.automatic_optimization:
            self._trace.remarks.add(remarks.MANUAL)

    def _validate(self, trainer: pl.Trainer, model: Any, data: dict[str, Any], way: str, file: str | None) -> None:
        has_data = any(given is not None for given in data.values()) or is_overridden("val_dataloader", model)
        if has_data and is_overridden("validation_step", model):
            trainer.validate(model, verbose=False, ckpt_path=file, weights_only=False if file else None, **data)
            self._trace.part(evaluation.Evaluations).metrics[way] = _metrics_of(trainer)

    def _validate_in_many_ways(self, trainer: pl.Trainer, model: pl.LightningModule, data: dict[str, Any]) -> None:
        """Validate the weights of the end: as it is, again by the same module, and copies of it in other batches."""
        fresh, own_limit = copy.deepcopy(model), trainer.limit_val_batches
        for way, size in evaluation.WAYS.items():
            self._watched.evaluation_batch = size
            trainer.limit_val_batches = 1.0 if size is not None else own_limit
            try:
                self._validate(trainer, model if size is None else copy.deepcopy(fresh), data, way, None)
            except Exception as error:  # such as of BatchNorm for a batch of one sample
                if size is None:
                    raise
                self._trace.part(evaluation.Evaluations).failed[way] = f"{type(error).__name__}: {one_line(error)}"


def _at_most(most: int, own: Any) -> int:
    """The script's own number, if it is one and small enough."""
    return min(most, own) if isinstance(own, int) and own >= 0 else most


def _metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}
