"""Checkpoints of a plain script: what it writes between two batches or steps, if the weights that train are in it."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from numbers import Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lit_cifar.checks.relations.interruption import Checkpoints, StopAt, Written
from lit_cifar.checks.relations.parts import TrainedParts
from lit_cifar.checks.relations.patching import before, patched
from lit_cifar.checks.relations.plan import GoOn, RunPlan, Trace
from lit_cifar.checks.relations.trained import digest_of, owned_by

_ENOUGH = 0.5  # of the weights that are trained; fewer may be a part that is kept for another use
_SUFFIXES = (".pt", ".pth", ".ckpt", ".safetensors", ".pth.tar")  # as checkpoints of earlier trainings have
_OF_TORCH = (b"PK\x03\x04", b"\x80")  # how its files begin, and pickled ones


class Writes:
    """Follows what the script writes beside its training, and whether it reads that again."""

    def __init__(self, plan: RunPlan, trace: Trace, parts: TrainedParts, has_saved: Callable[[], None]) -> None:
        self._trace, self._parts, self._has_saved = trace, parts, has_saved
        stop, go_on = plan.asked(StopAt), plan.asked(GoOn)
        self._stop = (stop.number, stop.batches) if stop and stop.after == "write" else None
        self._awaited = {os.path.realpath(file) for file in go_on.files} if go_on else set()
        self._noted, self._folder = trace.part(Checkpoints), Path.cwd()
        self._opened: dict[Path, None] = {}  # files for writing since the last batch, in their order
        self._now: Written | None = None  # what is being written

    def patch(self) -> None:
        for owner, name in ((torch, "save"), ("safetensors.torch", "save_file")):
            patched(owner, name, before(self._note))
        patched("safetensors", "safe_open", before(lambda filename, *_, **__: self._audit("open", (filename, None, 0))))
        sys.addaudithook(self._audit)

    @property
    def lacks_reading(self) -> bool:
        """Whether the files to go on from were not read."""
        return bool(self._awaited) and not self._noted.read

    def close(self) -> None:
        """What is written from now on is no part of what was written before."""
        now, self._now = self._now, None
        opened, self._opened = self._opened, {}
        if now is None:
            return
        optimizers, schedules = self._parts.optimizers, self._parts.schedules
        states = (value for each in optimizers for state in each.state.values() for value in state.values())
        moments = [value for value in states if isinstance(value, Tensor) and value.dim()]
        weights = [parameter for parameter in owned_by(optimizers) if parameter.requires_grad]
        for kind, sizes in (("weights", _sizes(weights)), ("optimizer state", _sizes(moments))):
            found = sum(size for digest, size in sizes.items() if digest in self._digests)
            now.held |= {kind: found / sizes.total()} if sizes else {}
        now.held |= {"schedule": len(self._schedules) / len(schedules)} if schedules else {}
        fullest = sorted(filter(_holds_tensors, opened), key=lambda path: -path.stat().st_size)
        now.files = [os.path.relpath(path, self._folder) for path in fullest]
        if now.held.get("weights", 0.0) >= _ENOUGH:
            self._noted.written.append(now)

    def _note(self, *args: Any, **settings: Any) -> None:
        """Note what an object holds that is about to be written, to the file behind it or one that is opened later."""
        if not self._trace.steps or self._trace.script.is_lightning:
            return
        obj, file, *_ = *args, *(settings[name] for name in ("obj", "tensors", "f", "filename") if name in settings)
        place = (self._trace.steps, self._trace.reading.batches)
        if self._now is None:
            self._now = Written(*place)
            self._digests: set[int] = set()
            self._schedules: set[int] = set()  # by their places
        live = [_numbers(schedule.state_dict()) for schedule in self._parts.schedules]
        for part in _parts_of(obj):
            if isinstance(part, Tensor):
                self._digests.add(digest_of(part))
            elif isinstance(part, Mapping):
                numbers = _numbers(part)
                self._schedules |= {number for number, own in enumerate(live) if own.items() <= numbers.items()}
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if isinstance(name, str | os.PathLike):
            self._opened[self._place_of(name)] = None
        if place == self._stop:
            self._stop = None
            self._has_saved()

    def _audit(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | os.PathLike):
            if isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR):  # it writes
                self._opened[self._place_of(args[0])] = None
            elif self._awaited and not self._trace.steps and os.path.realpath(args[0]) in self._awaited:
                self._noted.read = True
                self._parts.spoil_all()
            elif not self._trace.steps and os.fsdecode(args[0]).endswith(_SUFFIXES) and not self._noted.earlier:
                path = self._place_of(args[0])
                is_of_user = path.is_relative_to(self._folder) and path.is_symlink()  # as all of theirs are here
                self._noted.earlier = os.path.relpath(path, self._folder) if is_of_user else ""
        elif event == "os.rename" and self._place_of(args[0]) in self._opened:
            self._opened[self._place_of(args[1])] = None

    def _place_of(self, name: str | bytes | os.PathLike[Any]) -> Path:
        """Where a file is, also if the working folder has been removed."""
        with suppress(OSError):
            return Path(os.fsdecode(name)).absolute()
        return self._folder / os.fsdecode(name)


def _sizes(tensors: Iterable[Tensor]) -> Counter[int]:
    """Numbers of values by the digests of tensors."""
    found: Counter[int] = Counter()
    for tensor in tensors:
        found[digest_of(tensor)] += tensor.numel()
    return found


def _numbers(values: Mapping[Any, Any]) -> dict[Any, float]:
    return {name: float(value) for name, value in values.items() if isinstance(value, Real)}


def _parts_of(value: Any) -> Iterator[Any]:
    """The object itself and all that is in it, of modules and optimizers their states."""
    yield value
    if isinstance(value, nn.Module | Optimizer):
        value = value.state_dict()
    for part in value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ():
        yield from _parts_of(part)


def _holds_tensors(path: Path) -> bool:
    begin = b""
    with suppress(OSError, ValueError):
        if path.is_file():  # a pipe would wait for whoever writes into it
            with path.open("rb") as file:
                begin = file.read(9)
    return begin.startswith(_OF_TORCH) or begin[8:] == b"{"  # that of safetensors
