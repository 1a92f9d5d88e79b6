"""What NCCL refuses, refused on a machine without a GPU, in runs over gloo; as `--trainer.callbacks+=nccl_double.NAME`.

Every process calls its devices `cpu:0`, `cpu:1` and so on, which all are the host's memory to torch. A tensor is said
to be on one of them if it was made there or moved there by name, or computed from such a tensor; all others are on the
host. On CUDA the same code has the same devices with another name.
"""

import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lit_cifar import internals

Label = torch.device | None  # None: the host

# For callers in these packages every group is NCCL's: evaluation is then in inference mode, and barriers name a device.
_DECEIVED = ("lit_cifar.", "lightning.pytorch.")
_MAKES_TENSOR = (torch.tensor, torch.as_tensor)
# Functions of torch below which C++ makes what it sends itself, where the parameters are: sizes, buckets, their order.
_SENDS_ITS_OWN = ("_verify_param_shape_across_processes", "_engine_run_backward", "_pre_forward")


class RefusedError(RuntimeError):
    """NCCL would refuse it, or guess."""


class NCCLDouble(L.Callback):
    """Lets this process and those that it spawns run as if on GPUs; must be made before the Trainer."""

    def __init__(self) -> None:
        _install()

    def __reduce__(self) -> Any:
        return type(self), ()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave a proof that this process was watched."""
        folder = Path(trainer.loggers[0].log_dir or "")
        (folder / f"collectives{trainer.global_rank}").write_text(str(_state.num_collectives))


class Misbehaves(L.Callback):
    """Does what NCCL refuses before the first step, on all processes alike, and fails if it was not refused."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        here = trainer.strategy.root_device
        there = torch.device("cpu", 7)
        of_all = [torch.ones(1, device=here) for _ in range(trainer.world_size)]
        habits: dict[str, Callable[[], Any]] = {
            "a tensor of the host": lambda: dist.all_reduce(torch.ones(1)),
            "one that was brought there": lambda: dist.broadcast(torch.ones(1, device=here).cpu(), 0),
            "one that was computed there": lambda: trainer.strategy.reduce(torch.ones(1).mul(2).sum(), reduce_op="sum"),
            "results on the host": lambda: dist.all_gather([torch.ones(1) for _ in of_all], torch.ones(1, device=here)),
            "part of the host": lambda: dist.reduce_scatter(torch.ones(1), of_all),
            "two devices": lambda: dist.all_gather(of_all, torch.ones(1, device=there)),
            "gloo's own barrier": lambda: dist.monitored_barrier(),
            "numbers of a device": lambda: torch.ones(1, device=here).numpy(),
            "objects before the device is set": _before_it_is_set(lambda: dist.broadcast_object_list([0])),
            "a barrier before the device is set": _before_it_is_set(dist.barrier),
        }
        for name, habit in habits.items():
            with suppress(RefusedError):
                habit()
                raise AssertionError(f"not refused: {name}")


def _before_it_is_set(habit: Callable[[], Any]) -> Callable[[], None]:
    def call() -> None:
        with patch.object(_state, "current", None), patch.object(_state, "bound", False):
            habit()

    return call


_state = SimpleNamespace(  # of this process
    installed=False,
    current=None,  # set_device
    bound=False,  # whether the process group is tied to the current device
    num_collectives=0,
    host_groups=set(),  # names of those with gloo of their own
)


def label_of(tensor: Tensor) -> Label:
    """The device that a tensor is said to be on."""
    if isinstance(tensor, DTensor):
        tensor = tensor._local_tensor
    try:
        return getattr(tensor.untyped_storage(), "label", None)
    except RuntimeError:  # it has none
        return None


def _put(tensor: Tensor, label: Label) -> None:
    tensor.untyped_storage().label = label  # type: ignore[attr-defined]


class _Labels(TorchDispatchMode):
    """Hands labels on from the inputs of operators to their outputs, and looks at collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if FakeTensor in types:  # with these DTensor finds out about shapes
            return func(*args, **kwargs)
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # of a DTensor: what its parts are asked for comes here next
        leaves = tree_leaves((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if func.namespace in ("c10d", "_c10d_functional"):
            _look_at(func, tensors, leaves)
        named = [leaf for leaf in leaves if isinstance(leaf, torch.device) and leaf.index is not None]
        found = [label for tensor in tensors if (label := label_of(tensor)) is not None]
        output = func(*args, **kwargs)
        label = next(iter((*named, *found)), None)
        if label is not None and not func._schema.is_mutable:  # what is written to stays where it is
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor):
                    _put(tensor, label)
        return output


class _Devices(TorchFunctionMode):
    """Says of every tensor on which device it is, and makes what crosses to the host a copy, as on CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        own = label_of(args[0]) if args and isinstance(args[0], Tensor) else None
        if func == _GET_DEVICE:
            return func(*args, **kwargs) if own is None else own
        if own is not None and func is Tensor.numpy:
            raise RefusedError("can't convert a tensor on a device to numpy: use Tensor.cpu() first")
        if own is not None and (func is Tensor.cpu or (func is Tensor.to and _to_host(args[1:], kwargs))):
            copy = func(args[0].clone(), *args[1:], **kwargs)
            _put(copy, None)
            return copy
        output = func(*args, **kwargs)
        if func is Tensor.__deepcopy__ and own is not None:
            _put(output, own)
        if func in _MAKES_TENSOR and kwargs.get("device") is not None:
            _put(output, torch.device(kwargs["device"]))
        return output


_GET_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]


def _to_host(args: Any, kwargs: Any) -> bool:
    wanted = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device | str)]
    return any(torch.device(value) == torch.device("cpu") for value in wanted)


def _look_at(func: Any, tensors: list[Tensor], leaves: list[Any]) -> None:
    """Refuse a collective on tensors of the host, or of several devices; a group may be made for the host, by name."""
    name = func.overloadpacket.__name__
    groups = [leaf for leaf in leaves if isinstance(leaf, torch.ScriptObject) and leaf._type().name() == "ProcessGroup"]
    on_host = _state.host_groups.intersection(dist.ProcessGroup.unbox(group).group_name for group in groups)
    if on_host or name in ("barrier", "wait_tensor", "wait_tensors"):
        return
    _state.num_collectives += 1
    if name == "monitored_barrier_":
        raise RefusedError("NCCL has no monitored_barrier")
    if _caller() in _SENDS_ITS_OWN:
        return
    labels = {label_of(tensor) for tensor in tensors}
    if None in labels:
        raise RefusedError(f"{name} of a tensor on the host: {[tuple(tensor.shape) for tensor in tensors]}")
    if len(labels) > 1:
        raise RefusedError(f"{name} of tensors on several devices: {labels}")


def _caller() -> str:
    """The Python function that is at work, not counting what torch puts around a mode."""
    frame = sys._getframe(3)
    while frame.f_code.co_filename.endswith(("_compile.py", "eval_frame.py", "_ops.py", "nccl_double.py")):
        frame = frame.f_back
    return frame.f_code.co_name


def _install() -> None:
    if _state.installed:
        return
    _state.installed = True
    CPUAccelerator.get_parallel_devices = staticmethod(  # type: ignore[method-assign]
        lambda devices: [torch.device("cpu", index) for index in range(int(devices))]
    )
    _replace(CPUAccelerator, "setup_device", lambda _, accelerator, device: setattr(_state, "current", device))
    _replace(sys.modules[DDPStrategy.__module__], "_init_dist_connection", _connect)
    _replace(internals, "init_dist_connection", _connect)
    for module in (dist, distributed_c10d):  # each has the functions by name
        _replace(module, "barrier", _barrier)
        _replace(module, "get_backend", _backend)
        _replace(module, "new_group", _new_group)
    _replace(distributed_c10d, "_get_object_coll_device", _device_of_objects)
    # Neither CUDA's name nor its own for a device: the plain "cpu" of the mesh is the host here.
    _replace(_fully_shard, "_get_device_from_mesh", lambda _, mesh: _state.current)
    _Labels().__enter__()
    _Devices().__enter__()


def _replace(owner: Any, name: str, function: Callable[..., Any]) -> None:
    """`function` gets what it replaces as its first argument."""
    former = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: function(former, *args, **kwargs))


def _connect(connect: Any, *args: Any, device_id: Any = "none is named", **kwargs: Any) -> None:
    _state.bound = device_id != "none is named"  # of a device that is no CPU Lightning hands on more than None
    connect(*args, **kwargs)


def _device_of_objects(_: Any, group: Any = None) -> torch.device:
    if _state.current is None:
        raise RefusedError("a collective of objects before torch.cuda.set_device")
    return _state.current


def _barrier(barrier: Any, group: Any = None, async_op: bool = False, device_ids: Any = None, **kwargs: Any) -> Any:
    if not (device_ids or _state.bound or _state.current):  # without the first two it takes the current device
        raise RefusedError("a barrier has to guess the device")
    return barrier(group, async_op, **kwargs)


def _new_group(
    new_group: Any, ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **kwargs: Any
) -> Any:
    group = new_group(ranks, timeout, backend, *args, **kwargs)
    if backend == "gloo" and isinstance(group, dist.ProcessGroup):
        _state.host_groups.add(group.group_name)
    return group


def _backend(get_backend: Any, *args: Any, **kwargs: Any) -> str:
    caller = sys._getframe(2).f_globals["__name__"]
    return "nccl" if caller.startswith(_DECEIVED) else get_backend(*args, **kwargs)
