"""Judges a mode, also resumed, by comparing what its runs write with the single-device computation that it equals."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lit_cifar.checks.verdict import Outcome
from lit_cifar.launch.forked import EndedRun
from lit_cifar.tools.verify import record as records
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.files import OF_RESUME, entry_problems, file_problems, table_problems
from lit_cifar.tools.verify.processes import own_problems, sample_problems
from lit_cifar.tools.verify.record import LOGITS, Bounds, Logged, Record
from lit_cifar.tools.verify.runs import last_words

ONE_DEVICE, FIRST_RUN = "one device", "the undisturbed run"
RESUMED = "resumed"
_SAME_METRICS = dict.fromkeys(("train/", "val/", "lr-", "epoch"), 0.0)  # bounds by the beginnings of their names


@dataclass
class VerifiedMode:
    mode: str
    equals: str  # the single-device computation that it was compared with
    processes: int | None = None  # number of processes; None if the run failed before that was known
    differences: Bounds = field(default_factory=dict)  # the largest difference of each kind over all steps
    tolerance: Bounds = field(default_factory=dict)  # bound of each kind
    seconds: float = 0.0  # the duration of its run, without that of the reference
    outcome: Outcome = "abstain"  # until it has been compared
    # The mistakes, the first step first; the reason not to judge; the last words of a crash; empty if it passed.
    problems: list[str] = field(default_factory=list)


def judge(row: VerifiedMode, ended: EndedRun, record: Record, reference: Record, settings: Configuration) -> None:
    """Complete the mode's `row` with the results of its runs; it passes only if it was compared.

    `reference` is the run of one device. The bounds are the row's own, or else those of the settings.
    """
    row.tolerance, row.seconds = row.tolerance or dict(settings.bounds), ended.seconds
    if ended.status != 0 and not record.resumed.folder.exists():
        row.outcome = "crash"
        row.problems.append(last_words(ended))
        return
    if record.steps != reference.steps:
        row.outcome = "fail"
        row.problems.append(f"the run ended after {len(record.steps)} of {len(reference.steps)} steps")
        return
    row.processes = record.num_processes
    for number in reference.steps:
        gaps = records.gaps_of_step(record.step(number), reference.step(number))
        records.note_largest(row.differences, {key: size for key, size in gaps.items() if key[0] in row.tolerance})
        row.problems += records.step_problems(gaps, row.tolerance, step=number)
    row.problems += [*sample_problems(record, reference), *own_problems(record)]
    row.problems += _compare_metrics(row, record, reference, settings)
    row.problems += file_problems(record, reference, settings, source=ONE_DEVICE)
    crashed = ended.status != 0 and not row.problems
    row.problems += [f"{RESUMED}: {problem}" for problem in _resumed_problems(ended, record, settings)]
    row.outcome = "crash" if crashed else "fail" if row.problems else "pass"


def _resumed_problems(ended: EndedRun, record: Record, settings: Configuration) -> list[str]:
    """Differences of the process that has repeated the last step from the first one: of bits on the CPU."""
    last, resumed = max(record.steps), record.resumed
    if ended.status != 0:
        return [last_words(ended)]
    if resumed.steps != [last]:
        return [f"it has made the steps {resumed.steps}, not {last} alone"]
    bounds = {"loss": 0.0} | records.SAME_BITS if settings.on_cpu else settings.bounds
    problems = records.step_problems(records.gaps_of_step(resumed.step(last), record.step(last)), bounds, step=last)
    problems += own_problems(resumed)
    if settings.on_cpu:
        source = f"{FIRST_RUN} has"
        problems += logged_problems(resumed.logged, record.logged, bounds=_SAME_METRICS, source=source)
        problems += entry_problems(resumed, record, bound=0.0, source=FIRST_RUN, leave_out=OF_RESUME)
        problems += table_problems(resumed, record, source=FIRST_RUN)
    return problems


def _compare_metrics(row: VerifiedMode, record: Record, reference: Record, settings: Configuration) -> list[str]:
    bound = settings.metric_bound
    bounds = _SAME_METRICS | {"train/": bound, "val/": bound}
    problems = logged_problems(record.logged, reference.logged, bounds=bounds, source=f"{ONE_DEVICE} has")
    for number in record.steps:
        alone = reference.evaluated(number)  # without it a mode evaluates too often, which its samples say
        for process, evaluated in record.evaluated(number).items() if alone else ():
            gaps = evaluated.gaps(alone[0])
            problems += logits_problems(f"evaluation after step {number}", process, gaps, bound=row.tolerance[LOGITS])
            row.differences[LOGITS] = max([row.differences.get(LOGITS, 0.0), *(size for _, size in gaps)])
    return problems


def logits_problems(when: str, rank: int, gaps: Sequence[tuple[int, float]], *, bound: float) -> list[str]:
    """The first sample of process `rank` whose logits, or label, differ from one device's, and the number of others."""
    where, beyond = f"of process {rank} differ by", [found for found in gaps if found[1] > bound]
    return records.first_of([f"{when}: logits of sample {i} {where} {by:.1e}, allowed {bound:.1e}" for i, by in beyond])


def logged_problems(found: Logged, expected: Logged, *, bounds: Mapping[str, float], source: str) -> list[str]:
    """Logged values of a mode that are not as `expected`, name by name and step by step.

    `bounds` are those of their `gap`, by the beginning of a name; other names are left out.
    `source` names the origin of `expected` in words.
    """
    problems = []
    for name, step in sorted(found.keys() | expected.keys(), key=lambda key: (key[1], key[0])):
        bound = next((value for start, value in bounds.items() if name.startswith(start)), None)
        a, b = found.get((name, step)), expected.get((name, step))
        if bound is None or records.gap(a, b) <= bound:
            continue
        if a is None or b is None:
            problems.append(f"logged: {name} of step {step} is only in {source if a is None else 'the run'}")
        else:
            problems.append(f"logged: {name} of step {step} is {a:.9g}, {source} {b:.9g}")
    return problems
