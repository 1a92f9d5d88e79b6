"""Mistakes in what only an option of `fit` asks for; all processes of a run make them."""

from functools import partial
from typing import Any

from torch import Tensor

from lit_cifar.models import recomputed
from lit_cifar.models.recomputed import FLAG, Recomputed
from tests.mutations.planting import Mutation, Site, planted

MUTATIONS: list[Mutation] = []
mutation = partial(planted, MUTATIONS)


@mutation("a recomputed BatchNorm moves its running statistics again", "ddp", recomputed, "run_again", args=(FLAG,))
def _recomputed_batchnorm_counted_twice(site: Site, right: Any, block: Any, state: Any, input: Tensor) -> Any:
    return super(Recomputed, block).forward(input)
