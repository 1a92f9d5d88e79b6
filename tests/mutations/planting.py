"""Plants a mutation in a process of a run, and records whether its wrong code has run."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from pathlib import Path
from typing import Any

import lightning as L


@dataclass(frozen=True)
class Site:
    """A process in which a mutation is planted, before the strategy touches the network."""

    trainer: Any
    module: Any
    folder: Path  # folder for the files that record that the wrong code has run

    @property
    def rank(self) -> int:
        return int(self.trainer.global_rank)

    def acts(self) -> None:
        (self.folder / f"acted{self.rank}").touch()

    def replace(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace `owner.name(...)`, of an object or a class, by `wrong(original, ...)`, and record when it runs."""
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            self.acts()
            return wrong(original, *args, **kwargs)

        static = isinstance(getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if static else replaced)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name`, which must exist, to `value`; to be called in wrong code."""
        getattr(owner, name)
        setattr(owner, name, value)

    def at(self, hook: str, wrong: Callable[[], None]) -> None:
        """Run `wrong` when Lightning calls this hook of callbacks, after all other callbacks."""
        callback = L.Callback()
        self.replace(callback, hook, lambda original, *args: wrong())
        self.trainer.callbacks.append(callback)


Plant = Callable[[Site], None]


@dataclass(frozen=True)
class Mutation:
    """A mistake, and how it is planted."""

    name: str
    imitates: str  # what a programmer forgot or misunderstood
    mode: str  # the mode in which it is planted
    plant: Plant
    args: tuple[str, ...] = ()  # further flags of `fit` without which it has no effect
    devices: int = 2  # devices of the mode; more than two if it needs several replicas of several devices


def by_name(mutations: Iterable[Mutation]) -> dict[str, Mutation]:
    """The mutations by their names, of which each must be another."""
    found: dict[str, Mutation] = {}
    for mutation in mutations:
        if mutation.name in found:
            raise ValueError(f"two mutations have the name {mutation.name!r}")
        found[mutation.name] = mutation
    return found


def in_last(plant: Plant) -> Plant:
    """The mistake in the process of the last rank alone; `ddp_spawn` sends it to that process."""
    return partial(_plant_in_last, plant)


def _plant_in_last(plant: Plant, site: Site) -> None:
    if site.rank == site.trainer.world_size - 1:
        plant(site)


# The ragged batch is too small for microbatches of two accumulated steps; clipped, so that the norm matters.
PIPELINE = ("--data.drop_last=true", "--trainer.gradient_clip_val=0.5")
