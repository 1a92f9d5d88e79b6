"""Names inside torch and Lightning on which this package relies, and which a release may change without a word.

All of them stand here, with who needs them. Functions and classes are attributes of this module, without their leading
underscore, and looked up when they are first used. Attributes of classes and their objects are used where they are
needed, and looked up before by `require` or `missing`: nobody would read or call one that has another name since.
"""

import inspect
from collections.abc import Iterator
from importlib import metadata
from pkgutil import resolve_name
from typing import Any

from lit_cifar.errors import ConfigError

# The newest releases with which the tests ran.
_TRIED = "pip install torch==2.15.0 torchvision==0.29.2 lightning==2.6.6 torchmetrics==1.9.0 jsonargparse==4.53.0"
RUN, MODES, WATCHDOG, AUDIT = "every run", "every mode of lit_cifar", "the watchdog", "the replica audit"
RELATIONS = "relations"
# By who needs them, in a user's words. Those that begin with a dot are where the one before them is.
NAMES = {
    RUN: """jsonargparse.DefaultHelpFormatter._format_action_invocation ._get_help_string
        jsonargparse._common.parser_context lightning.pytorch.LightningModule._trainer
        lightning.pytorch.Trainer._signal_connector
        lightning.pytorch.callbacks.ModelCheckpoint._save_checkpoint ._save_topk_checkpoint
        lightning.pytorch.callbacks.WeightAveraging._copy_average_to_current ._swap_models
        lightning.pytorch.cli.LightningCLI._get ._instantiate_trainer ._parse_ckpt_path ._prepare_subcommand_parser
        ._run_subcommand lightning.pytorch.loggers.CSVLogger._experiment
        lightning.pytorch.loggers.csv_logs.ExperimentWriter._check_log_dir_exists
        lightning.pytorch.loops.evaluation_loop._EvaluationLoop._has_run
        lightning.pytorch.loops.fit_loop._FitLoop._restarting
        lightning.pytorch.loops.training_epoch_loop._TrainingEpochLoop._batches_that_stepped ._broadcast_sigterm_tensor
        lightning.pytorch.plugins.precision.Precision.clip_grad_by_norm
        lightning.pytorch.strategies.DDPStrategy._ddp_kwargs ._layer_sync ._start_method
        lightning.pytorch.strategies.launchers._MultiProcessingLauncher ._SubprocessScriptLauncher
        lightning.pytorch.strategies.launchers._SubprocessScriptLauncher._call_children_scripts
        lightning.pytorch.trainer.connectors.signal_connector._SignalConnector.register_signal_handlers
        torch._C._current_graph_task_id torch.optim.lr_scheduler.LRScheduler._last_lr
        torch.utils._pytree.tree_leaves .tree_map_only
        torchmetrics.Metric._apply ._defaults ._reductions ._update_count""",
    WATCHDOG: """lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver
        lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver._child_processes ._terminate_all
        lightning.pytorch.Trainer._run_stage lightning.pytorch.strategies.launchers._SubprocessScriptLauncher""",
    MODES: """lightning.pytorch.overrides.distributed._sync_module_states
        lightning.pytorch.strategies.DDPStrategy._configure_launcher ._timeout
        torch.Tensor._backward_hooks ._post_accumulate_grad_hooks torch.amp.GradScaler._unscale_grads_
        torch.autograd.Variable._execution_engine torch.nn.Module._buffers ._parameters""",
    "--trainer.strategy=ddp_mp": """lightning.fabric.utilities.distributed._init_dist_connection
        lightning.pytorch.strategies.DDPStrategy._get_process_group_backend ._setup_model""",
    "--trainer.strategy=pp": """torch._subclasses.FakeTensorMode
        torch.distributed.pipelining.PipelineStage.backward_one_chunk .forward_one_chunk""",
    "--trainer.strategy=fsdp2": "torch.nn.Module._forward_pre_hooks torch.nn.modules.conv._ConvNd",
    "host_gloo": "torch.distributed.ProcessGroup._allgather_base ._reduce_scatter_base ._register_backend",
    "synchronised BatchNorm": """torch.nn.modules.batchnorm._BatchNorm
        torch.nn.modules.batchnorm._BatchNorm._check_input_dim""",
    "averaging, and MuonSGD,": "torch._foreach_add ._foreach_add_ ._foreach_copy_ ._foreach_mul_",
    AUDIT: """lightning.pytorch.strategies.DDPStrategy._model_averager
        torch.nn.modules.batchnorm._NormBase torch.nn.parallel.DistributedDataParallel._comm_hooks""",
    RELATIONS: """torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
        torch.cuda._lazy_init torch.nn.Module._buffers ._non_persistent_buffers_set
        torch.nn.parallel.DistributedDataParallel._passing_sync_batchnorm_handle
        torch.utils._pytree.register_pytree_node .tree_flatten .tree_leaves .tree_map .tree_unflatten""",
    "--model.arch=tiny": "torchvision.models.resnet.ResNet._make_layer",
}
NAMES["--trainer.strategy=ddp_pp"] = NAMES["--trainer.strategy=pp"]


def __getattr__(name: str) -> Any:
    """The function or class of torch or Lightning that has this name, or the same with an underscore before it."""
    for place, private, needs in each():
        if name in (private, private[1:]) and not inspect.isclass(owner := _found(place)):
            if not hasattr(owner, private):
                raise _refusal(place, private, needs)
            return globals().setdefault(name, getattr(owner, private))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require(*needs: str) -> None:
    """Raise a `ConfigError` if there is no name that one of these needs."""
    for error in missing(*needs):
        raise error


def missing(*needs: str) -> Iterator[ConfigError]:
    """An error for each name that is not there, of those that these need, or of all."""
    for place, name, needed_by in each():
        if (not needs or needed_by in needs) and not _has(_found(place), name):
            yield _refusal(place, name, needed_by)


def each() -> Iterator[tuple[str, str, str]]:
    """The place and name of each, and who needs it."""
    for needs, names in NAMES.items():
        place = ""
        for path in names.split():
            before, _, name = path.rpartition(".")
            place = before or place
            yield place, name, needs


def _found(place: str) -> Any:
    """The module or class; None if it is not there."""
    try:
        return resolve_name(place)
    except (ImportError, AttributeError):
        return None


def _has(owner: Any, name: str) -> bool:
    """Whether a module or class has that attribute, or objects of the class, of which then its code speaks."""
    spoken_of: set[str] = set()
    for kind in owner.__mro__ if inspect.isclass(owner) else ():
        members = (getattr(its, "fget", its) for its in vars(kind).values())
        functions = filter(inspect.isfunction, [inspect.unwrap(its) for its in members if callable(its)])
        spoken_of.update(inspect.get_annotations(kind), *(its.__code__.co_names for its in functions))
    return hasattr(owner, name) or name in spoken_of


def _refusal(place: str, name: str, needs: str) -> ConfigError:
    package = place.partition(".")[0]
    problem = f"{package} {metadata.version(package)} has no {place}.{name}, which {needs} needs"
    return ConfigError(problem, remedy=_TRIED)
