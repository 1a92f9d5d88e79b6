"""Runs of modes, beside the runs of one device that they need, and their rows once they are judged."""

import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Lock

from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import EndedRun, workers
from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.models.ghost_batchnorm import normalises_batches
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.terminal import say
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.judge import VerifiedMode, judge
from lit_cifar.tools.verify.processes import own_problems
from lit_cifar.tools.verify.record import EXACT_BOUND, LOGITS, Bounds, Record, gaps_of_step, note_largest
from lit_cifar.tools.verify.runs import LIMIT_S, last_words, run

_SMALL = 1e-6  # larger differences are not taken for rounding, whatever it does

ILL_CONDITIONED = (
    "not judged: last bits of the weights change one device's steps so much that rounding explains differences up to "
    "{:.0e}, as where BatchNorm normalises few values; pass a larger --data.batch_size, or larger images"
)


@dataclass(frozen=True)
class Case:
    mode: SizedMode
    flags: tuple[str, ...] = ()  # further flags of `fit`, for the runs of the mode alone
    title: str | None = None  # title of its runs, if not the mode's name


@dataclass(frozen=True)
class Verifier:
    """Runs modes and one device under one configuration, with every step recorded, and compares them."""

    settings: Configuration
    steps: int  # optimizer steps of every run
    folder: Path  # an existing folder, in which each run gets its own

    def new_folder(self, name: str) -> Path:
        """Make a folder for one run. A step or checkpoint of ResNet34 takes 170 MB: remove it once it has been read."""
        return Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=self.folder))

    def run_mode(self, mode: SizedMode, folder: Path, *, title: str, more: Sequence[str] = ()) -> EndedRun:
        """Run the mode, then resume it before its last step. Return the first that failed, or the last."""
        flags = self.settings.length_flags(steps=self.steps, accumulation=self.settings.accumulation)
        flags += [*mode.flags, f"--trainer.sync_batchnorm={str(mode.sync_batchnorm).lower()}", *more]
        first = self._fit(title, folder, flags, mode)
        if first.status != 0:
            return first
        record = Record(folder)
        # The run folder is as before the last step, except for the logs.
        shutil.copytree(record.run, record.resumed.run, ignore=shutil.ignore_patterns("last.ckpt"), copy_function=_link)
        resumed = self._fit(f"{title}, resumed", record.resumed.folder, [*flags, "--resume=auto"], mode)
        # A second run may not refuse what the first one has accepted.
        status = 1 if resumed.status == EXIT_REFUSED else resumed.status
        return replace(resumed, status=status, seconds=first.seconds + resumed.seconds)

    def run_alone(self, title: str, chunks: GhostBatches, *, more: Sequence[str] = ()) -> Record:
        """The record of one device, which normalises `chunks` apart; `more` are further flags.

        Raises a `ConfigError` if it cannot train the configuration, or not to its last step, or not in time.
        """
        flags = self.settings.length_flags(steps=self.steps, accumulation=1)
        single = sized_modes(1)["single"]
        flags += [*single.flags, "--trainer.sync_batchnorm=false"]
        if self.settings.num_parts is None:  # otherwise the same kernels must run
            flags += ["--model.channels_last=false", "--model.compile=false"]  # modes may use these, and equal it
        if chunks != GhostBatches():
            flags += [f"--model.ghost_batchnorm.{name}={value}" for name, value in asdict(chunks).items()]
        record = Record(self.new_folder("reference"))
        ended = self._fit(title, record.folder, [*flags, *more], single)
        if ended.status is None:
            problem = f"one device is too slow for this configuration: {last_words(ended)}"
            raise ConfigError(problem, remedy="pass fewer --steps, or a smaller --data.batch_size or --model.arch")
        if ended.status != 0:
            problem = f"one device cannot train this configuration: {last_words(ended)}"
            remedy = "correct it until `fit --trainer.precision=64-true` runs with it, or pass --virtual_replicas=2"
            raise ConfigError(problem, remedy=remedy)
        if (num_steps := len(record.steps)) < self.steps:
            problem = f"the configuration ends a run after {num_steps} of {self.steps} steps"
            raise ConfigError(problem, remedy="leave out what does, e.g. --trainer.max_time")
        if others := own_problems(record):
            problem = f"one device itself evaluates or saves other weights than those of its steps: {others[0]}"
            raise ConfigError(problem, remedy="leave out the callback that averages weights, as EMA does")
        return record

    def _fit(self, title: str, folder: Path, flags: list[str], mode: SizedMode) -> EndedRun:
        (folder / "trace").mkdir()
        own = [f"--run_dir={folder / 'run'}", "--trainer.callbacks+=lit_cifar.tools.verify.recorder.Trace"]
        own.append(f"--trainer.callbacks.folder={folder / 'trace'}")
        # Bits depend on the threads, so that with virtual replicas all modes have as many.
        at_once = self.settings.num_at_once * (self.settings.num_parts or mode.num_processes)
        threads = max(1, len(os.sched_getaffinity(0)) // at_once)
        say(f"running  {title}\n", end="")
        words = ["fit", *self.settings.flags, *flags, *own]
        ended = run(words, num_ranks=mode.num_ranks, folder=folder, limit_s=LIMIT_S, threads=threads)
        say(f"{ended.seconds:5.0f} s  {title}\n", end="")
        return ended

    def compare(self, cases: Sequence[Case]) -> list[tuple[VerifiedMode, EndedRun]]:
        """Run and judge each case, and run the references that they need, several at a time.

        A worker judges what it has run before the next: records are large, and each reference goes with its last case.
        """
        chunks = [self.ghost_batches_of(case.mode) for case in cases]
        waiting = Counter(chunks)
        judging = Lock()  # all checkpoints are loaded into one network
        references: dict[GhostBatches, Future[Record]] = {}

        def compared(number: int) -> tuple[VerifiedMode, EndedRun]:
            case, key = cases[number], chunks[number]
            record = Record(self.new_folder(case.mode.name))
            title = case.title or case.mode.name
            ended = self.run_mode(case.mode, record.folder, title=title, more=case.flags)
            row = VerifiedMode(case.mode.name, self.settings.in_words(key))
            if ended.status == EXIT_REFUSED:  # so one device may not be able either to normalise such chunks
                waiting[key] -= 1
                return row, ended
            alone = references[key].result()
            with judging:
                self._judge(row, ended, record, alone, key)
                waiting[key] -= 1
                if not waiting[key]:
                    shutil.rmtree(alone.folder)
            shutil.rmtree(record.folder)
            return row, ended

        # Modes whose processes import everything anew come first: the last ones have nothing beside them.
        slowest_first = sorted(range(len(cases)), key=lambda number: cases[number].mode.name != "ddp_spawn")
        launched: dict[int, Future[tuple[VerifiedMode, EndedRun]]] = {}
        with workers(self.settings.num_at_once) as pool:
            for key in dict.fromkeys(chunks[number] for number in slowest_first):
                references[key] = pool.submit(self.run_alone, f"reference: {self.settings.in_words(key)}", key)
                numbers = [number for number in slowest_first if chunks[number] == key]
                launched |= {number: pool.submit(compared, number) for number in numbers}
            for done in as_completed(launched.values()):
                done.result()  # an error ends all others
        return [launched[number].result() for number in range(len(cases))]

    def _judge(self, row: VerifiedMode, ended: EndedRun, record: Record, alone: Record, chunks: GhostBatches) -> None:
        judge(row, ended, record, alone, self.settings)
        far = max((size for kind, size in row.differences.items() if kind != LOGITS), default=0.0)
        if row.outcome == "fail" and self.settings.num_parts is None and EXACT_BOUND < far < _SMALL:
            bounds = self._rounding(chunks, alone)
            wide = VerifiedMode(row.mode, row.equals, tolerance=bounds)
            judge(wide, ended, record, alone, self.settings)
            if not wide.problems:
                row.outcome, row.problems = "abstain", [ILL_CONDITIONED.format(max(wide.tolerance.values()))]

    def _rounding(self, chunks: GhostBatches, reference: Record) -> Bounds:
        """Bounds within which a difference could be rounding: what last bits of the weights change on one device."""
        more = ["--trainer.callbacks+=lit_cifar.tools.verify.recorder.LastBits"]
        record = self.run_alone(f"rounding: {self.settings.in_words(chunks)}", chunks, more=more)
        bounds = self.settings.bounds
        for number in reference.steps:
            note_largest(bounds, gaps_of_step(record.step(number), reference.step(number)))
            for process, evaluated in record.evaluated(number).items():
                sizes = (size for _, size in evaluated.gaps(reference.evaluated(number)[process]))
                bounds[LOGITS] = max(bounds[LOGITS], *sizes)
        shutil.rmtree(record.folder)
        return bounds

    def ghost_batches_of(self, mode: SizedMode) -> GhostBatches:
        """The chunks that the mode normalises together; equal for all without BatchNorm, or with virtual replicas."""
        if self.settings.num_parts is not None or not normalises_batches(self.settings.module.network):
            return GhostBatches()
        return mode.ghost_batches(accumulation=self.settings.accumulation)


def _link(source: str, target: str) -> None:
    """Link a checkpoint, which is large and replaced as a whole; copy any other file, which is written on."""
    (os.link if source.endswith(".ckpt") else shutil.copy2)(source, target)
