"""How a mistake is planted, so that it is known afterwards whether its wrong code has run."""

from collections.abc import Callable
from dataclasses import dataclass
from inspect import getattr_static
from pathlib import Path
from typing import Any

import lightning as L


@dataclass(frozen=True)
class Site:
    """A process in which a mistake is planted, before the strategy touches the network.

    Attributes:
        trainer: The process's.
        module: The LightningModule.
        folder: Where to note that the wrong code has run.
    """

    trainer: Any
    module: Any
    folder: Path

    @property
    def rank(self) -> int:
        """Of the process."""
        return int(self.trainer.global_rank)

    def acts(self) -> None:
        """Note that the wrong code runs now."""
        (self.folder / f"acted{self.rank}").touch()

    def replace(self, owner: Any, name: str, wrong: Callable[..., Any]) -> None:
        """Let `owner.name(...)`, of an object or a class, be `wrong(original, ...)`, which notes that it runs.

        Raises:
            AttributeError: It has no such name, as after a renaming.
        """
        original = getattr(owner, name)

        def replaced(*args: Any, **kwargs: Any) -> Any:
            self.acts()
            return wrong(original, *args, **kwargs)

        static = isinstance(getattr_static(owner, name), staticmethod)
        setattr(owner, name, staticmethod(replaced) if static else replaced)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Let `owner.name` be `value`; to be used where wrong code runs.

        Raises:
            AttributeError: It has no such name.
        """
        getattr(owner, name)
        setattr(owner, name, value)

    def at(self, hook: str, wrong: Callable[[], None]) -> None:
        """Run `wrong` where Lightning calls the hook of this name, after the hooks of all other callbacks.

        Raises:
            AttributeError: Callbacks have no such hook.
        """
        callback = L.Callback()
        self.replace(callback, hook, lambda original, *args: wrong())
        self.trainer.callbacks.append(callback)


@dataclass(frozen=True)
class Bug:
    """A mistake.

    Attributes:
        name: What `Trace` is told.
        imitates: What someone forgot or misunderstood.
        mode: The mode in which it is planted.
        plant: Makes it.
        args: Further flags of `fit` that it needs to show.
        devices: Of the mode; more than two where it takes several replicas of several devices.
    """

    name: str
    imitates: str
    mode: str
    plant: Callable[[Site], None]
    args: tuple[str, ...] = ()
    devices: int = 2


# Microbatches must be equal, so no ragged batch; clipped, so that the norm matters.
PIPELINE = ("--data.drop_last=true", "--trainer.gradient_clip_val=0.5")
