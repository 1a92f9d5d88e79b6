"""Plants a mutation in a process of a run, and records whether its wrong code has run."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import getattr_static
from operator import attrgetter
from pathlib import Path
from typing import Any, TypeVar

import lightning as L

from lit_cifar.task.module import LitResNet

Wrong = TypeVar("Wrong", bound=Callable[..., Any])


@dataclass(frozen=True)
class Site:
    """A process in which a mutation is planted, before the strategy touches the network."""

    trainer: Any
    module: Any
    folder: Path  # folder for the files that record that the wrong code has run

    @property
    def rank(self) -> int:
        return int(self.trainer.global_rank)

    def replace(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Replace `owner.name(...)`, of an object or a class, by `wrong(original, ...)`, and record when it runs."""
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            (self.folder / f"acted{self.rank}").touch()
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


@dataclass(frozen=True)
class Mutation:
    """A mistake, and how it is planted."""

    name: str
    imitates: str  # what a programmer forgot or misunderstood
    mode: str  # the mode in which it is planted
    plant: Callable[[Site], None]
    args: tuple[str, ...] = ()  # further flags of `fit` without which it has no effect
    devices: int = 2  # devices of the mode; more than two if it needs several replicas of several devices


STRATEGY, MODULE = "trainer.strategy", "module"  # of a site


def planted(
    found: list[Mutation],
    imitates: str,
    mode: str,
    owner: Any = None,
    method: str = "",
    *,
    at: str = "",
    name: str | None = None,
    args: tuple[str, ...] = (),
    devices: int = 2,
    last: bool = False,
) -> Callable[[Wrong], Wrong]:
    """Add to `found` a mutation that the decorated function plants; its name is the function's, or `name`.

    The function is given the site. With an `owner`, a class, a module or the path of one of the site's own objects, it
    is itself the wrong code in place of the owner's `method`, and is also given the original and what that would be
    given. With `at` it runs when Lightning calls that hook. If `last`, only the last rank's process does it.
    """

    def add(wrong: Wrong) -> Wrong:
        def plant(site: Site) -> None:
            if last and site.rank != site.trainer.world_size - 1:
                return
            if at:
                site.at(at, partial(wrong, site))
            elif owner is None:
                wrong(site)
            else:
                found_owner = attrgetter(owner)(site) if isinstance(owner, str) else owner
                site.replace(found_owner, method, partial(wrong, site))

        place = LitResNet if owner == MODULE else owner
        if place is not None and not isinstance(place, str):
            getattr(place, method)  # a place that is gone is seen when this file is imported
        own_name = name or wrong.__name__.removeprefix("_").replace("_", "-")
        found.append(Mutation(own_name, imitates, mode, plant, args, devices))
        return wrong

    return add


# The ragged batch is too small for microbatches of two accumulated steps; clipped, so that the norm matters.
PIPELINE = ("--data.order.drop_last=true", "--trainer.gradient_clip_val=0.5")
