"""Lightning's `Trainer` in a watched process: shorter, on as many CPU processes as the run has, and followed."""

import copy
import logging
import re
import sys
import warnings
from functools import partial
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, ClassVar

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, ModelSummary, ProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner.tuning import Tuner
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ReduceLROnPlateau

from lit_cifar.checks.relations.batches import sample_digests
from lit_cifar.checks.relations.evaluation import (
    AS_IT_IS,
    VALIDATED,
    WAYS,
    Evaluations,
    KeepValidated,
    Validate,
    ValidateInManyWays,
)
from lit_cifar.checks.relations.generators import seed_all
from lit_cifar.checks.relations.interruption import CHECKPOINT, Moment, StopAt
from lit_cifar.checks.relations.own_devices import of_trainer
from lit_cifar.checks.relations.patching import patched
from lit_cifar.checks.relations.plan import Script
from lit_cifar.checks.relations.remarks import FOLLOWS_EVALUATION, MANUAL
from lit_cifar.checks.relations.watching import Ended, Watched
from lit_cifar.errors import one_line
from lit_cifar.mode.table import MODES

_OWN = ("_", "trainer", "training", "fabric", "prepare_data_per_node", "allow_zero_length_dataloader", "example_input")
_DDP = "ddp_find_unused_parameters_true"  # of a script that names no strategy, such as one with two models
_STARTED = re.compile("_(spawn|fork|notebook)")  # ways to start the processes, which a run has already
_INSIDE = ("every_n_train_steps", "train_time_interval", "save_on_exception")  # what lets a `ModelCheckpoint` save so
_IN_ONE_PROCESS = {row.name for row in MODES if not row.has_processes}  # strategies with all devices in it


class Follower(Checkpoint):
    """Notes samples, saves where the plan says, ends there. A `Checkpoint`, so that it comes after other callbacks."""

    def __init__(self, watched: Watched) -> None:
        self._watched, self._trained = watched, 0

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._watched.continues()
        if not self._watched.trace.first:
            look_at(trainer, self._watched)
            self._watched.begins()
        self._save(trainer, "hooks", self._trained)
        self._watched.note_samples(sample_digests(batch))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._trained += 1
        reading = self._watched.trace.reading
        reading.batches_of_epoch, reading.epochs_begun = int(trainer.num_training_batches), trainer.current_epoch + 1
        self._save(trainer, "batch", self._trained)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._save(trainer, "epoch", trainer.current_epoch + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        look_at(trainer, self._watched)  # before a strategy puts the parts of a model together
        self._watched.trace.state = self._watched.parts.snapshot()

    def on_validation_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if not trainer.sanity_checking:
            self._watched.trace.logged.append((trainer.global_step, metrics_of(trainer)))
            if self._watched.plan.asked(KeepValidated):
                trainer.save_checkpoint(self._watched.folder / VALIDATED)

    def _save(self, trainer: pl.Trainer, after: Moment, number: int) -> None:
        if self._watched.stop == StopAt(number, after):
            trainer.save_checkpoint(self._watched.folder.parent / CHECKPOINT)
            look_at(trainer, self._watched)
            self._watched.has_saved()
            raise Ended


class _OneLightning(MetaPathFinder, Loader):
    """Gives `lightning` to a script that imports it by the names of its parts, which are other classes."""

    _parts: ClassVar = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if fullname.split(".")[0] in self._parts else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        part, *rest = spec.name.split(".")
        module = import_module(".".join([self._parts[part], *rest]))
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own


class _Logger(CSVLogger):
    """Takes the place of the script's own, which may send what it is told."""

    @property
    def experiment(self) -> Any:
        return _Experiment(super().experiment)

    def __getattr__(self, name: str) -> Any:
        """Such as `log_image`, of other loggers."""
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda *_, **__: None


class _Experiment:
    """Ignores what a file of numbers cannot do, such as adding a picture."""

    def __init__(self, own: Any) -> None:
        self._own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own, name, lambda *_, **__: None)


def patch(watched: Watched) -> None:
    """Follow the trainers of this process, up to the end of the first `fit`."""
    sys.meta_path.insert(0, _OneLightning())
    patched(pl.Trainer, "__init__", partial(_make, watched))
    patched(pl.Trainer, "fit", partial(_fit, watched))
    patched(pl.Trainer, "save_checkpoint", partial(_save, watched.trace.script))
    patched(ModelCheckpoint, "__init__", partial(_keep, watched.trace.script))
    for name in ("lr_find", "scale_batch_size"):
        patched(Tuner, name, _refuse)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


def _save(script: Script, save: Any, trainer: pl.Trainer, *args: Any, **own: Any) -> None:
    script.saves_inside |= not trainer.is_last_batch
    save(trainer, *args, **own)


def _keep(script: Script, make: Any, checkpoint: ModelCheckpoint, *args: Any, **own: Any) -> None:
    make(checkpoint, *args, **own)
    script.saves_inside |= any(own.get(name) for name in _INSIDE)


def _refuse(search: Any, *_: Any, **__: Any) -> None:
    raise RuntimeError(f"Tuner.{search.__name__} trains before the training: leave it out here")


def _make(watched: Watched, make: Any, trainer: pl.Trainer, *args: Any, **own: Any) -> None:
    make(trainer, *args, **_settings(watched, own))
    trainer.callbacks.append(Follower(watched))  # type: ignore[attr-defined]
    _follow(watched, trainer)


def _follow(watched: Watched, trainer: pl.Trainer) -> None:
    watched.phase = lambda: "train" if trainer.training else "evaluate"


def _fit(
    watched: Watched, fit: Any, trainer: pl.Trainer, model: pl.LightningModule, *args: Any, **settings: Any
) -> None:
    names = ("train_dataloaders", "val_dataloaders", "datamodule", "ckpt_path")
    settings |= dict(zip(names, args, strict=False))
    if isinstance(settings.get("train_dataloaders"), pl.LightningDataModule):  # as Lightning's own `fit` takes it
        settings["datamodule"] = settings.pop("train_dataloaders")
    plan = watched.plan
    _follow(watched, trainer)  # another may have been made since
    watched.trace.script.is_lightning = True
    watched.parts.roots[:] = [model]
    data = {"dataloaders": settings.get("val_dataloaders"), "datamodule": settings.get("datamodule")}
    if validate := plan.asked(Validate):
        _validate(trainer, watched, model, data, AS_IT_IS, validate.checkpoint)
        raise Ended
    if watched.go_on:
        settings["ckpt_path"] = watched.go_on.checkpoint
    else:
        seed_all("fit", plan.seed, watched.rank)
    fit(trainer, model, **settings)
    if plan.asked(ValidateInManyWays):
        _validate_in_many_ways(trainer, watched, model, data)
    raise Ended


def _settings(watched: Watched, own: dict[str, Any]) -> dict[str, Any]:
    """Arguments of the Trainer: the script's own, but for lengths, devices, precision and what prints."""
    plan, script = watched.plan, watched.trace.script
    devices, strategy = own.get("devices", "auto"), own.get("strategy", "auto")
    if isinstance(strategy, str):
        strategy = _STARTED.sub("", strategy)
    named = devices if isinstance(devices, list) else [*filter(None, str(devices).split(","))]
    if str(devices) in ("auto", "-1"):  # all that there are: several, if the strategy is one of several
        script.ranks = 2 if "ddp" in str(strategy).lower() else 1
    else:
        script.ranks = int(devices) if str(devices).isdigit() else len(named)
    script.accumulation = own.get("accumulate_grad_batches") or 1
    script.epochs, script.batches = own.get("max_epochs") or 0, own.get("limit_train_batches") or 1.0
    if (most := own.get("max_steps", -1)) >= 0:
        watched.most_steps = min(watched.most_steps, most - watched.steps_before)
    callbacks = own.get("callbacks") or []
    callbacks = [callbacks] if isinstance(callbacks, pl.Callback) else callbacks
    changed = {
        "accelerator": "cpu",
        "callbacks": [one for one in callbacks if not isinstance(one, ProgressBar | ModelSummary)],
        **{"devices": plan.ranks, "num_nodes": 1},
        "strategy": "auto" if plan.ranks == 1 else _DDP if strategy == "auto" else strategy,
        "max_epochs": _at_most(plan.limits.epochs, own.get("max_epochs")),
        "limit_train_batches": _at_most(plan.limits.batches, own.get("limit_train_batches")),
        "limit_val_batches": _at_most(plan.evaluated, own.get("limit_val_batches")),
        **{"max_steps": -1, "max_time": None, "min_epochs": None, "min_steps": None, "overfit_batches": 0.0},
        **{"fast_dev_run": False, "barebones": False, "profiler": None},
        "num_sanity_val_steps": 0,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "logger": own["logger"] if own.get("logger") is False else _Logger("logs"),
        "benchmark": None,
    }
    if isinstance(every := own.get("val_check_interval"), int):
        script.saves_inside = True
        changed["val_check_interval"] = min(every, plan.limits.batches)
    if isinstance(strategy, str) and strategy in _IN_ONE_PROCESS:
        script.ranks = 1
        changed |= {"devices": devices, "strategy": strategy}
    if plan.on_own_devices:
        changed |= of_trainer(plan, own)
    elif plan.double or "mixed" in str(own.get("precision")):
        changed |= {"precision": "64-true" if plan.double else "32-true", "plugins": None}
    return own | changed | dict(plan.trainer)


def _at_most(most: int, own: Any) -> int:
    """The script's own number, if it is one and small enough."""
    return min(most, own) if isinstance(own, int) and own >= 0 else most


def look_at(trainer: pl.Trainer, watched: Watched) -> None:
    """Note what the trainer holds."""
    module, trace = trainer.lightning_module, watched.trace
    watched.parts.roots[:] = [module]
    watched.parts.optimizers[:] = trainer.optimizers
    watched.parts.schedules[:] = [config.scheduler for config in trainer.lr_scheduler_configs]
    foreign = ("lightning.", "lit_cifar.")
    for number, callback in enumerate(trainer.callbacks):  # type: ignore[attr-defined]
        if not type(callback).__module__.startswith(foreign):
            watched.parts.kept[f"callback {number} {type(callback).__name__}"] = callback
    watched.parts.kept["module"] = {name: value for name, value in vars(module).items() if not name.startswith(_OWN)}
    watched.parts.kept["metric"] = metrics_of(trainer)
    parts = (*trainer.callbacks, *watched.parts.schedules)  # type: ignore[attr-defined]
    if any(isinstance(part, EarlyStopping | ReduceLROnPlateau) for part in parts):
        trace.remarks.add(FOLLOWS_EVALUATION)
    if not module.automatic_optimization:
        trace.remarks.add(MANUAL)


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def _validate(
    trainer: pl.Trainer, watched: Watched, model: pl.LightningModule, data: dict[str, Any], way: str, file: str | None
) -> None:
    has_data = any(given is not None for given in data.values()) or is_overridden("val_dataloader", model)
    if not has_data or not is_overridden("validation_step", model):
        return
    trainer.validate(model, verbose=False, ckpt_path=file, weights_only=False if file else None, **data)
    watched.trace.part(Evaluations).metrics[way] = metrics_of(trainer)


def _validate_in_many_ways(trainer: pl.Trainer, watched: Watched, model: pl.LightningModule, data: Any) -> None:
    """Validate the weights of the end: as it is, once more by the same module, and copies of it in other batches."""
    fresh, own_limit = copy.deepcopy(model), trainer.limit_val_batches
    for way, size in WAYS.items():
        watched.evaluation_batch = size
        trainer.limit_val_batches = 1.0 if size is not None else own_limit
        try:
            _validate(trainer, watched, model if size is None else copy.deepcopy(fresh), data, way, None)
        except Exception as error:  # such as of BatchNorm for a batch of one sample
            if size is None:
                raise
            watched.trace.part(Evaluations).failed[way] = f"{type(error).__name__}: {one_line(error)}"
