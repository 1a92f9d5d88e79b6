"""The single-device computations that modes are compared with, and how far a mode may be from them."""

import shutil
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from functools import cached_property

import torch

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.tools.modes import in_words
from lit_cifar.tools.verify.comparison import (
    EXACT_BOUND,
    KINDS,
    SAME_BITS,
    Bounds,
    differences,
    largest,
    measured_bounds,
)
from lit_cifar.tools.verify.launcher import Launcher
from lit_cifar.tools.verify.record import Record

# Runs of one device in which only the rounding differs: arguments of `Trace`, and further flags.
_ROUNDINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "reversed": ({"order": "reversed"}, []),
    "plain kernels": ({"order": "plain_kernels"}, []),
    "float32": ({}, ["--trainer.precision=32-true"]),
}
# By which of them the tolerance is measured.
_USED: dict[str, list[str]] = {
    "64-true": [],
    "32-true": ["reversed", "plain kernels"],
    "bf16-mixed": ["reversed", "plain kernels", "float32"],
}


@dataclass(frozen=True)
class Reference:
    """A single-device run, and how far a mode may be from it after each step."""

    record: Record
    bounds: list[Bounds]


@dataclass(frozen=True)
class _Run:
    record: Record
    ended: Future[None]

    def wait(self) -> Record:
        self.ended.result()
        return self.record


@dataclass(frozen=True)
class _Tolerance:
    """Measured with one reference; it holds for every one that normalises as many samples at once."""

    reference: _Run
    others: Sequence[_Run]
    steps: int
    otherwise: Bounds  # the bounds where there are no others

    @cached_property
    def bounds(self) -> list[Bounds]:
        if not self.others:
            return [self.otherwise] * self.steps
        expected = self.reference.wait()
        noise = []
        for other in self.others:
            steps = range(1, self.steps + 1)
            noise.append([largest(differences(other.wait().step(k), expected.step(k))) for k in steps])
            shutil.rmtree(other.record.folder)
        dtype = next(iter(expected.step(1)["parameters"].values())).dtype
        return measured_bounds(noise, eps=torch.finfo(dtype).eps)


@dataclass(frozen=True)
class References:
    """Single-device runs, each made once and kept until it is forgotten."""

    launcher: Launcher
    _runs: dict[GhostBatches, _Run] = field(default_factory=dict)
    _tolerances: dict[str, _Tolerance] = field(default_factory=dict)

    def start(self, chunks: GhostBatches, pool: Executor) -> None:
        """Have `pool` run the device that normalises `chunks` apart, and what measures its tolerance."""
        if chunks in self._runs:
            return
        self._runs[chunks] = self._run(f"reference: {self.words(chunks)}", chunks, pool)
        if self.words(chunks) not in self._tolerances:
            settings = self.launcher.settings
            names = _USED[settings.precision] if settings.num_parts is None else []
            otherwise = dict.fromkeys(KINDS, EXACT_BOUND) if settings.num_parts is None else SAME_BITS
            others = [
                self._run(f"tolerance: {self.words(chunks)}, {name}", chunks, pool, *_ROUNDINGS[name]) for name in names
            ]
            self._tolerances[self.words(chunks)] = _Tolerance(
                self._runs[chunks], others, self.launcher.steps, otherwise
            )

    def get(self, chunks: GhostBatches) -> Reference:
        return Reference(self._runs[chunks].wait(), self._tolerances[self.words(chunks)].bounds)

    def forget(self, chunks: GhostBatches) -> None:
        shutil.rmtree(self._runs.pop(chunks).record.folder)

    def words(self, chunks: GhostBatches) -> str:
        """The computation, as the table names it."""
        if (num_parts := self.launcher.settings.num_parts) is not None:
            return f"one device, {num_parts} virtual replicas"
        return in_words(chunks, batch_size=self.launcher.settings.batch_size)

    def _run(
        self,
        title: str,
        chunks: GhostBatches,
        pool: Executor,
        trace: dict[str, str] | None = None,
        flags: Sequence[str] = (),
    ) -> _Run:
        record = Record(self.launcher.new_folder("reference"))
        return _Run(record, pool.submit(self.launcher.run_alone, title, record.folder, chunks, trace, flags))
