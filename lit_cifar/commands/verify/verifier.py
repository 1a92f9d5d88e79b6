"""Runs modes and the single-device computations that they equal, and compares them step by step."""

import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from itertools import groupby
from os import cpu_count
from pathlib import Path

import torch

from lit_cifar.commands.verify.checkpoint import checkpoint_problems, evaluation_problems, quiet
from lit_cifar.commands.verify.compare import (
    EXACT_BOUND,
    KINDS,
    Bounds,
    differences,
    first_excess,
    largest,
    measured_bounds,
)
from lit_cifar.commands.verify.logged import METRIC_BOUND, logged_problems
from lit_cifar.commands.verify.modes import Mode, chosen, in_words
from lit_cifar.commands.verify.placing import placed
from lit_cifar.commands.verify.records import Record
from lit_cifar.commands.verify.rows import Row
from lit_cifar.commands.verify.runs import REFUSED, TIMEOUT_S, Outcome, refuse_if_invalid, run, workers
from lit_cifar.commands.verify.settings import Settings
from lit_cifar.errors import ConfigError
from lit_cifar.layout import Chunks

TRACE = "lit_cifar.commands.verify.trace.Trace"
# Runs on one device that differ by rounding only: arguments of `Trace`, and further flags.
_ROUNDINGS: dict[str, tuple[dict[str, str], list[str]]] = {
    "reversed": ({"order": "reversed"}, []),
    "plain kernels": ({"order": "plain_kernels"}, []),
    "float32": ({}, ["--trainer.precision=32-true"]),
}
_USED: dict[str, list[str]] = {
    "64-true": [],
    "32-true": ["reversed", "plain kernels"],
    "bf16-mixed": ["reversed", "plain kernels", "float32"],
}
"""By which of them the tolerance is measured."""

Report = Callable[[str], None]


@dataclass(frozen=True)
class Reference:
    """A single-device run, and how far a mode may be from it after each step."""

    record: Record
    bounds: list[Bounds]


@dataclass
class Verifier:
    """Compares modes under one configuration. References are kept in `folder` until they are forgotten.

    Attributes:
        settings: The configuration.
        steps: Optimizer steps of every run.
        folder: Exists; for everything that the runs write.
        report: Called with a line whenever a run begins, and when it has ended.
        timeout_s: After which a run is stopped, and has failed.
    """

    settings: Settings
    steps: int
    folder: Path
    report: Report
    timeout_s: float = TIMEOUT_S
    _references: dict[Chunks, Reference] = field(default_factory=dict)

    def chunks_of(self, mode: Mode) -> Chunks:
        """What the mode normalises together, as its strategy tells it."""
        with quiet():
            return mode.chunks(accumulation=self.settings.accumulation)

    def equals(self, mode: Mode) -> str:
        """The mode's single-device computation in words."""
        return in_words(self.chunks_of(mode), batch_size=self.settings.batch_size)

    def outcomes(self, cases: Sequence[tuple[Mode, str | None]]) -> Iterator[tuple[int, Outcome, Path]]:
        """Run each mode, with its planted mistake if it has one; several at a time, as `Settings.num_at_once` says.

        Yields:
            As they end: the case's number, how it ended, and its folder, which is removed afterwards.
        """
        with ExitStack() as stack, workers(self.settings.num_at_once) as pool:
            launched: dict[Future[Outcome], tuple[int, Path, ExitStack]] = {}
            for number, (mode, bug) in enumerate(cases):
                own = stack.enter_context(ExitStack())
                folder = own.enter_context(self.run_folder(mode.name))
                launched[pool.submit(self.launch, mode, folder, bug=bug)] = number, folder, own
            for future in as_completed(launched):
                number, folder, own = launched[future]
                with own:
                    yield number, future.result(), folder

    def launch(self, mode: Mode, folder: Path, *, bug: str | None = None) -> Outcome:
        """Run the mode in `folder`, with a planted mistake if `bug` names one."""
        flags = self.settings.length_flags(steps=self.steps, accumulation=self.settings.accumulation)
        trace = {"reload_after": str(self.steps - 1)} | ({} if bug is None else {"bug": bug})
        title = mode.name if bug is None else f"{mode.name} with {bug}"
        with quiet():
            processes, ranks = mode.num_processes, mode.num_ranks
        return self._fit(title, folder, [*flags, *mode.flags], trace, processes=processes, ranks=ranks)

    def judge(self, mode: Mode, outcome: Outcome, folder: Path, reference: Reference) -> Row:
        """Compare what `launch` left in `folder` with the reference."""
        row = Row(mode.name, self.equals(mode), tolerance=reference.bounds[-1], seconds=outcome.seconds)
        record = Record(folder)
        if outcome.status != 0:
            row.problems.append(outcome.last_words)
        elif record.num_steps < self.steps:
            row.problems.append(f"the run ended after {record.num_steps} of {self.steps} steps")
        else:
            self._compare(row, record, reference)
        return row

    def _compare(self, row: Row, record: Record, reference: Reference) -> None:
        row.processes = record.about["world_size"]
        self._compare_steps(row, record, reference)
        row.problems += record.sample_problems(reference.record)
        row.problems += record.own_problems()
        row.problems += checkpoint_problems(record.checkpoint, record.step(self.steps), config=self.settings.config)
        row.problems += record.count_problems()
        row.problems += logged_problems(
            record.logged, reference.record.logged, bounds=self._bounds_of_metrics(reference), source="one device has"
        )
        if self.settings.evaluates:
            self._compare_evaluation(row, record)

    def _bounds_of_metrics(self, reference: Reference) -> Bounds:
        """By the beginnings of their names."""
        # Rounding may turn two answers, in bfloat16 any number.
        turned = {"64-true": METRIC_BOUND, "32-true": 2 / self.settings.batch_size, "bf16-mixed": math.inf}
        return {
            "train/loss": reference.bounds[-1]["loss"] + METRIC_BOUND,
            "train/acc": turned[self.settings.precision],
            "val/": math.inf,  # that they are there; their values are those of the mode's own weights, see below
            "lr-": 0.0,
        }

    def _compare_evaluation(self, row: Row, record: Record) -> None:
        """With one device that has the same weights."""
        row.counts = record.counts
        row.problems += evaluation_problems(
            record.checkpoint, counts=row.counts, found=record.logged, config=self.settings.config
        )

    def _compare_steps(self, row: Row, record: Record, reference: Reference) -> None:
        for number, bounds in enumerate(reference.bounds, 1):
            step, expected = record.step(number), reference.record.step(number)
            row.losses.append(float(step["loss"]))
            row.expected_losses.append(float(expected["loss"]))
            found = differences(step, expected)
            for kind, value in largest(found).items():
                row.differences[kind] = max(row.differences.get(kind, 0.0), value)
            excess = first_excess(found, bounds, step=number)
            if excess is not None and not row.problems:
                row.problems.append(str(excess))

    def reference(self, chunks: Chunks) -> Reference:
        """The single-device run that normalises `chunks` by themselves, and the tolerance measured with it."""
        if chunks not in self._references:
            self._references[chunks] = self._measure(chunks)
        return self._references[chunks]

    def forget(self, chunks: Chunks) -> None:
        """Free the disk of a reference."""
        shutil.rmtree(self._references.pop(chunks).record.folder)

    def _measure(self, chunks: Chunks) -> Reference:
        name = in_words(chunks, batch_size=self.settings.batch_size)
        names = _USED[self.settings.precision]
        with ExitStack() as stack, workers(self.settings.num_at_once) as pool:
            record = Record(Path(tempfile.mkdtemp(prefix="reference-", dir=self.folder)))
            runs = [pool.submit(self._fit_alone, f"reference: {name}", record.folder, chunks)]
            others = [Record(stack.enter_context(self.run_folder(other.replace(" ", "-")))) for other in names]
            for other, run_of in zip(names, others, strict=True):
                title = f"tolerance: {name}, {other}"
                runs.append(pool.submit(self._fit_alone, title, run_of.folder, chunks, *_ROUNDINGS[other]))
            for run_alone in runs:
                run_alone.result()
            noise = [self._noise(other, record) for other in others]
        if not noise:
            return Reference(record, [dict.fromkeys(KINDS, EXACT_BOUND)] * self.steps)
        dtype = next(iter(record.step(1)["state"].values())).dtype
        return Reference(record, measured_bounds(noise, eps=torch.finfo(dtype).eps))

    def _noise(self, other: Record, reference: Record) -> list[Bounds]:
        """The largest differences from the reference of a run with other rounding, step by step."""
        return [largest(differences(other.step(k), reference.step(k))) for k in range(1, self.steps + 1)]

    def _fit_alone(
        self, title: str, folder: Path, chunks: Chunks, trace: Mapping[str, str] | None = None, more: Sequence[str] = ()
    ) -> None:
        flags = [*self.settings.length_flags(steps=self.steps, accumulation=1), *more]
        flags += ["--trainer.strategy=auto", "--trainer.devices=1", "--trainer.sync_batchnorm=false"]
        flags += ["--model.channels_last=false", "--model.compile=false"]  # which the modes are to show equal to it
        if chunks != Chunks():
            flags += [f"--model.batchnorm_chunks.{name}={value}" for name, value in asdict(chunks).items()]
        outcome = self._fit(title, folder, flags, dict(trace or {}))
        if outcome.status is None:
            raise ConfigError(
                f"one device is too slow for this configuration: {outcome.last_words}",
                remedy="pass fewer --steps, or a smaller --data.batch_size or --model.arch",
            )
        if outcome.status != 0:
            raise ConfigError(
                f"one device cannot train this configuration: {outcome.last_words}",
                remedy="correct it until `python -m lit_cifar fit` runs with it",
            )
        if (num_steps := Record(folder).num_steps) < self.steps:
            raise ConfigError(
                f"the configuration ends a run after {num_steps} of {self.steps} steps",
                remedy="leave out what does, e.g. --trainer.max_time or --trainer.fast_dev_run",
            )

    def _fit(
        self,
        title: str,
        folder: Path,
        flags: list[str],
        trace: dict[str, str],
        *,
        processes: int = 1,
        ranks: int = 1,
    ) -> Outcome:
        (folder / "trace").mkdir()
        arguments = {"folder": str(folder / "trace")} | trace
        recording = [f"--trainer.callbacks+={TRACE}"]
        recording += [f"--trainer.callbacks.{name}={value}" for name, value in arguments.items()]
        self.report(f"running  {title}")
        outcome = run(
            "fit",
            *self.settings.flags,
            *flags,
            f"--run_dir={folder / 'run'}",
            *recording,
            folder=folder,
            threads=max(1, (cpu_count() or 1) // (processes * self.settings.num_at_once)),
            timeout_s=self.timeout_s,
            num_ranks=ranks,
        )
        self.report(f"{outcome.seconds:5.0f} s  {title}")
        return outcome

    @contextmanager
    def run_folder(self, name: str) -> Iterator[Path]:
        """A new folder for one run, gone afterwards: the trace of a ResNet34 is 170 MB a step."""
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=self.folder))
        try:
            yield folder
        finally:
            shutil.rmtree(folder)


def verify(
    names: Sequence[str],
    *,
    devices: int = 2,
    steps: int = 3,
    args: Sequence[str] = (),
    report: Report = lambda line: None,
) -> list[Row]:
    """Compare modes with one device.

    Args:
        names: Of modes; "all" for every one.
        devices: Of each mode; on the CPU processes, or virtual devices of one process.
        steps: Optimizer steps; in float32, rounding is magnified from step to step.
        args: Flags of `fit`, `--config` among them; by default ResNet34 on synthetic images.
        report: Called with a line whenever a run begins, and when it has ended.

    Returns:
        A row for each mode.

    Raises:
        ConfigError: Unknown modes, flags that `fit` refuses, or a mode called by its name that cannot run on so many
            devices or with batches of this size; "all" leaves those out.
    """
    if steps < 2:
        raise ConfigError(f"--steps={steps} leaves no step after a resume", remedy="pass --steps 2 or more")
    wanted = chosen(list(names), devices=devices)
    with tempfile.TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        settings = Settings.of(list(args), devices=devices, folder=Path(folder))
        verifier = Verifier(settings, steps, Path(folder), report)
        return verify_modes(verifier, list(_possible(wanted, settings, report, leave_out="all" in names)))


def verify_modes(verifier: Verifier, wanted: Sequence[Mode]) -> list[Row]:
    """Rows in the order of `wanted`; the modes of one reference run together, then it is forgotten."""
    chunks = {mode.name: verifier.chunks_of(mode) for mode in wanted}
    rows: dict[str, Row] = {}
    for key, group in groupby(sorted(wanted, key=lambda mode: repr(chunks[mode.name])), lambda m: chunks[m.name]):
        reference, modes = verifier.reference(key), list(group)
        for number, outcome, folder in verifier.outcomes([(mode, None) for mode in modes]):
            if outcome.status == REFUSED:  # a mistake that only the mode could find, not a failed comparison
                refuse_if_invalid(outcome)
            rows[modes[number].name] = verifier.judge(modes[number], outcome, folder, reference)
        verifier.forget(key)
    return [rows[mode.name] for mode in wanted]


def _possible(wanted: Sequence[Mode], settings: Settings, report: Report, *, leave_out: bool) -> Iterator[Mode]:
    """Those that can run on so many devices with such batches: `tp`, say, must divide the channels.

    Of the others `report` says why they are left out.

    Raises:
        ConfigError: None may be left out, or not even one device can train the configuration.
    """
    module, sampler = settings.module(), settings.train_sampler()
    for mode in wanted:
        try:
            with quiet():
                on = placed(mode, num_gpus=settings.num_gpus)
                on.check(module, sampler)
        except ConfigError as error:
            if not leave_out:
                raise
            report(f"left out {mode.name}: {error.problem}")
        else:
            if on != mode:
                report(f"on one GPU: {mode.name}")
            yield on
