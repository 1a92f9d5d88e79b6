"""Runs modes and the single-device computations that they equal, several at a time, and compares them step by step."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock

from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.models.ghost_batchnorm import normalises_batches
from lit_cifar.tools.modes import SizedMode, chosen
from lit_cifar.tools.verify.configuration import EXACT, Configuration
from lit_cifar.tools.verify.judge import RANDOM, ROUNDING, draws_random_numbers, judge, masks_of_one_device
from lit_cifar.tools.verify.launcher import Launcher, Report, placed
from lit_cifar.tools.verify.record import Record
from lit_cifar.tools.verify.reference import References
from lit_cifar.tools.verify.runs import REFUSED, Outcome, quiet, workers
from lit_cifar.tools.verify.verdict_table import VerifiedMode


@dataclass(frozen=True)
class Case:
    """A mode to compare."""

    mode: SizedMode
    flags: tuple[str, ...] = ()  # further ones of `fit`, for the runs of the mode alone
    title: str | None = None  # of its runs, where it is not the mode's name


@dataclass(frozen=True)
class Compared:
    """What came of the case of that number; the folder of its run is removed when the next one is asked for."""

    number: int
    row: VerifiedMode
    outcome: Outcome
    folder: Path


@dataclass(frozen=True)
class Verifier:
    """Compares modes under the launcher's configuration."""

    launcher: Launcher

    @cached_property
    def references(self) -> References:
        return References(self.launcher)

    @cached_property
    def normalises_batches(self) -> bool:
        """Whether it matters which images pass the network together."""
        return normalises_batches(self.launcher.settings.module().network)

    @cached_property
    def draws_random_numbers(self) -> bool:
        return draws_random_numbers(self.launcher.settings.module())

    def abstained(self, mode: SizedMode) -> VerifiedMode | None:
        """The row of a mode that draws other random numbers than one device, so that nothing would be known."""
        settings = self.launcher.settings
        if settings.num_parts is not None or not self.draws_random_numbers:
            return None
        with quiet():
            if masks_of_one_device(mode, accumulation=settings.accumulation):
                return None
        return VerifiedMode(mode.name, self.references.words(self.ghost_batches_of(mode)), problems=[RANDOM])

    def ghost_batches_of(self, mode: SizedMode) -> GhostBatches:
        """What the mode normalises together, as its strategy tells it; the same for all that have no BatchNorm.

        Virtual replicas normalise the same parts in every mode.
        """
        if not self.normalises_batches or self.launcher.settings.num_parts is not None:
            return GhostBatches()
        with quiet():
            return mode.ghost_batches(accumulation=self.launcher.settings.accumulation)

    def compare(self, cases: Sequence[Case]) -> Iterator[Compared]:
        """Run each case and the references that they need, several at a time; yields as they are judged.

        A worker judges what it has run before it runs the next: records are large, and must not pile up on the disk.
        """
        chunks = [self.ghost_batches_of(case.mode) for case in cases]
        judging = Lock()  # the precision in which an evaluation is repeated is set for all threads

        def compared(number: int, key: GhostBatches) -> Compared:
            case = cases[number]
            folder = self.launcher.new_folder(case.mode.name)
            outcome = self.launcher.run_mode(case.mode, folder, title=case.title or case.mode.name, more=case.flags)
            row = VerifiedMode(case.mode.name, self.references.words(key))
            with judging:
                judge(row, outcome, Record(folder), self.references.get(key), self.launcher.settings)
            return Compared(number, row, outcome, folder)

        # First those whose processes import everything anew: what comes last runs with nothing beside it.
        slowest_first = sorted(range(len(cases)), key=lambda number: cases[number].mode.name != "ddp_spawn")
        launched: list[Future[Compared]] = []
        with workers(self.launcher.settings.num_at_once) as pool:
            for key in dict.fromkeys(chunks[number] for number in slowest_first):
                self.references.start(key, pool)
                launched += [pool.submit(compared, number, key) for number in slowest_first if chunks[number] == key]
            for done in as_completed(launched):
                yield done.result()
                shutil.rmtree(done.result().folder)


def verify(
    names: Sequence[str],
    *,
    devices: int = 2,
    steps: int = 4,
    args: Sequence[str] = (),
    report: Report = lambda line: None,
) -> list[VerifiedMode]:
    """Compare modes, "all" for every one, with one device: a row for each.

    A mode has so many `devices`: GPUs, or on the CPU processes or virtual devices of one process. `args` are flags of
    `fit`; by default it is `tiny` on synthetic images, in float64. In float32 and bfloat16 rounding is magnified from
    step to step: a mode beyond the measured bounds fails only if it fails in float64 too, else nothing is known. A mode
    called by its name that cannot run so is a `ConfigError`; "all" leaves it out.
    """
    if steps < 2:
        raise ConfigError(f"--steps={steps} leaves no step before a resume", remedy="pass --steps 2 or more")
    rows = _verify(names, devices=devices, steps=steps, args=args, report=report)
    if doubted := {row.mode: row for row in rows if row.may_be_rounding}:
        report("once more in float64, where rounding is no excuse: " + ", ".join(doubted))
        in_float64 = [*args, f"--trainer.precision={EXACT}"]
        for again in _verify([*doubted], devices=devices, steps=steps, args=in_float64, report=report):
            if again.passed:
                doubted[again.mode].outcome = "abstained"
                doubted[again.mode].problems.insert(0, ROUNDING)
    return rows


def _verify(
    names: Sequence[str], *, devices: int, steps: int, args: Sequence[str], report: Report
) -> list[VerifiedMode]:
    wanted = chosen(list(names), devices=devices)
    with tempfile.TemporaryDirectory(prefix="lit_cifar-verify-") as folder:
        settings = Configuration.of(list(args), devices=devices, folder=Path(folder))
        verifier = Verifier(Launcher(settings, steps, Path(folder), report))
        possible = [*_possible(wanted, settings, report, leave_out="all" in names)]
        return verify_modes(verifier, possible, leave_out="all" in names)


def verify_modes(verifier: Verifier, wanted: Sequence[SizedMode], *, leave_out: bool = False) -> list[VerifiedMode]:
    """Rows in the order of `wanted`; each reference is forgotten as soon as its last mode has been compared.

    What only the run of a mode finds wrong with the user's flags is a `ConfigError`, no failed proof; or the mode is
    left out.
    """
    rows = {mode.name: row for mode in wanted if (row := verifier.abstained(mode))}
    judged = [mode for mode in wanted if mode.name not in rows]
    chunks = {mode.name: verifier.ghost_batches_of(mode) for mode in judged}
    waiting = Counter(chunks.values())
    for compared in verifier.compare([Case(mode) for mode in judged]):
        if compared.outcome.status != REFUSED:
            rows[compared.row.mode] = compared.row
        elif leave_out:
            verifier.launcher.report(f"left out {compared.row.mode}: {compared.outcome.refusal.problem}")
        else:
            raise compared.outcome.refusal
        key = chunks[compared.row.mode]
        waiting[key] -= 1
        if not waiting[key]:
            verifier.references.forget(key)
    return [rows[mode.name] for mode in wanted if mode.name in rows]


def _possible(
    wanted: Sequence[SizedMode], settings: Configuration, report: Report, *, leave_out: bool
) -> Iterator[SizedMode]:
    """Those that can run on so many devices with such batches: `tp`, say, must divide the channels.

    Of the others `report` says why they are left out, or the error is raised if none may be.
    """
    module, data = settings.module(), settings.data()
    sampler = settings.train_sampler(data)
    for mode in wanted if settings.num_parts is None else [mode.with_parts() for mode in wanted]:
        try:
            with quiet():
                on = placed(mode, num_gpus=settings.num_gpus)
                on.check(module, data, sampler, num_parts=settings.num_parts)
        except ConfigError as error:
            if not leave_out:
                raise
            report(f"left out {mode.name}: {error.problem}")
        else:
            if on != mode:
                report(f"on one GPU: {mode.name}")
            yield on
