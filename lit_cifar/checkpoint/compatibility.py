"""Whether a checkpoint belongs to the same network, classes and optimizer as a run that starts from it."""

import shlex
from collections.abc import Mapping
from itertools import zip_longest
from typing import Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checkpoint.format import OPTIMIZER, SCHEDULE, Header, TrainedOn, class_path
from lit_cifar.data.dataset import Dataset
from lit_cifar.errors import CheckpointError, DataError

_MAX_NAMES = 5


def check_header(checkpoint: dict[str, Any], own: Header) -> None:
    """Raise a `CheckpointError` if `checkpoint` is of a different network."""
    found = Header.read(checkpoint)
    if found != own:
        raise CheckpointError(
            f"the checkpoint holds {found}, the model is {own}",
            remedy=f"to use this checkpoint pass {_flags(found, own)}",
        )


def _flags(found: Header, own: Header) -> str:
    """The flags that ask for the network `found` where `own` was asked for."""
    if found.num_classes != own.num_classes:  # the data set decides it on the command line
        return "the --data.dataset and --data.root of its training, which RUN_FOLDER/config.yaml has"
    flags = {"--model.arch": found.arch, "--model.stem": found.stem, "--model.network": found.network}
    if found.image_size != own.image_size:
        flags["--data.image_size"] = str(found.image_size)
    return " ".join(f"{name}={value}" for name, value in flags.items() if value is not None)


def check_shapes(network: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Raise a `CheckpointError` unless `weights` have the names and shapes of this network's."""
    own = {name: tuple(tensor.shape) for name, tensor in network.state_dict().items()}
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in (*own, *found):
        if own.get(name) != found.get(name):
            here, there = (shapes.get(name, "missing") for shapes in (own, found))
            raise CheckpointError(
                f"the weights do not fit this {type(network).__name__}: {name} is {there} in the checkpoint, {here} in "
                "the model",
                remedy="pass the flags of their training, --config RUN_FOLDER/config.yaml, or of their network, e.g. "
                "--model.arch=resnet18 --model.stem=imagenet",
            )


def name_classes(data: Dataset, checkpoint: Mapping[str, Any]) -> None:
    """Give `data` the checkpoint's classes if its folders of pictures are gone."""
    try:
        _ = data.classes
    except DataError as error:
        trained = TrainedOn.read(checkpoint)
        if trained is None:
            raise
        data.classes = trained.classes
        rank_zero_info(f"{error.problem}: the names of the classes are those in the checkpoint")


def check_classes(checkpoint: Mapping[str, Any], own: TrainedOn, *, normalised: bool) -> None:
    """Raise a `CheckpointError` unless a run's `own` data have the same classes in the same order.

    If only the data sets differ, that is an error where images must be `normalised` alike, and otherwise a warning.
    """
    found = TrainedOn.read(checkpoint)
    if found is None:
        rank_zero_warn("the checkpoint does not say which classes it was trained on: they are not compared")
    elif found.classes != own.classes:
        kept = found.dataset == own.dataset
        flag = "another --data.root" if kept else shlex.quote(f"--data.dataset={found.dataset}")
        pairs = enumerate(zip_longest(found.classes, own.classes, fillvalue="nothing"))
        label, (there, here) = next((label, pair) for label, pair in pairs if pair[0] != pair[1])
        raise CheckpointError(
            f"class {label} is {there} in the checkpoint and {here} in these data; it was trained on "
            f"{_listed(found.classes)}, and these are {_listed(own.classes)}",
            remedy=f"pass {flag}, as its training had it: RUN_FOLDER/config.yaml",
        )
    elif found.dataset != own.dataset:
        problem = f"the checkpoint was trained on {found.dataset}, which is normalised otherwise than {own.dataset}"
        if normalised:
            raise CheckpointError(problem, remedy="pass " + shlex.quote(f"--data.dataset={found.dataset}"))
        rank_zero_warn(f"{problem}: that may cost accuracy")


def _listed(classes: tuple[str, ...]) -> str:
    names = [*classes[:_MAX_NAMES], *(["..."] if len(classes) > _MAX_NAMES else [])]
    return f"{len(classes)} classes ({', '.join(names)})"


def check_optimizer(checkpoint: Mapping[str, Any], optimizer: Optimizer, scheduler: Any) -> None:
    """Raise a `CheckpointError` if a training had a different optimizer, parameter groups or schedule."""
    for key, own in {OPTIMIZER: class_path(optimizer), SCHEDULE: class_path(scheduler)}.items():
        if (found := checkpoint.get(key)) not in (None, own):
            raise CheckpointError(
                f"the checkpoint continues a training with {found}; this one has {own}",
                remedy=f"pass --model.{key}={found}" + (" and its arguments" if key == SCHEDULE else ""),
            )
    states = checkpoint.get("optimizer_states") or [{"param_groups": optimizer.param_groups}]
    then, now = (
        [len(group["params"]) for group in groups] for groups in (states[0]["param_groups"], optimizer.param_groups)
    )
    if then != now:
        raise CheckpointError(
            f"the checkpoint continues a training whose optimizer had groups of {then} parameters; this one has {now}",
            remedy="pass --model.fine_tuning.head_lr, and arguments of --model.optimizer, as its training had them: "
            "RUN_FOLDER/config.yaml",
        )
