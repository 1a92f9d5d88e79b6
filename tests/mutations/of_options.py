"""Mistakes in what only an option of `fit` asks for; all processes of a run make them."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor

from lit_cifar.data import loader
from lit_cifar.data.samplers import BatchIds, TrainSampler
from lit_cifar.models.fine_tuning import KeepFrozen
from tests.mutations.planting import Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)


_WEIGHTS = "--data.balance.class_weights=[1,2,3,4,5,1,2,3,4,5]"


@mutation("each process divides weighted losses by its own weights", "ddp", loader, "soft_targets", args=(_WEIGHTS,))
def _class_weights_of_a_part(site: Site, make: Any, mix: Any, labels: Tensor, *args: Any, **kwargs: Any) -> Any:
    return make(mix, labels, *args, **kwargs | {"whole": labels})


@mutation(
    "images are mixed with those of their own process",
    "ddp",
    TrainSampler,
    "__iter__",
    args=("--data.mixing.mixup=1.0", "--data.seed=1"),
)
def _partners_of_a_part(site: Site, iterate: Any, sampler: TrainSampler) -> Iterator[BatchIds]:
    for part in iterate(sampler):
        yield part._replace(keys=part.keys[part.place], place=slice(None))


@mutation("a frozen BatchNorm layer moves", "ddp", args=("--model.fine_tuning.freeze=['conv1.*','bn1.*']",))
def _moving_norm(site: Site) -> None:
    def move(start: Any, *args: Any) -> None:
        start(*args)
        site.module.network.bn1.training = True

    site.replace(KeepFrozen, "on_train_start", move)
