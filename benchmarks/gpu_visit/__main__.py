"""`python -m gpu_visit OUT`: takes the steps, round by round, until the time is used up."""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from types import FrameType

from gpu_visit import wheels
from gpu_visit.processes import end_all
from gpu_visit.report import Report, StepReport
from gpu_visit.step import Step, Visit
from gpu_visit.steps import PLANS, Plan

_MAX_JOBS = 8
_ROUNDS_AT_ONCE = 3  # steps of a round, each with processes of its own


def main(args: Sequence[str] | None = None) -> int:
    """Visit; 0 if every step that was taken found all right."""
    options = parser().parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="gpu-visit-", ignore_cleanup_errors=True) as work:
        visit = _visit(options, Path(work))
        about = {"command": " ".join(sys.argv[1:]), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
        numbered = [(number, plan) for number, plan in enumerate(PLANS, 1) if number in (options.steps or [number])]
        steps = [StepReport(number, plan.title) for number, plan in numbered]
        report = Report(options.out, steps, about=about)
        if options.wheels is not None:
            visit.site = _install(options.wheels, Path(work) / "site", report, visit)
        plans = [(plan, own) for (_, plan), own in zip(numbered, steps, strict=True)]
        take(plans, visit, report, limit_s=options.seconds)
        print(report.table())
    return 0 if all(step.status == "ok" for step in steps) else 1


def take(plans: Sequence[tuple[Plan, StepReport]], visit: Visit, report: Report, *, limit_s: float) -> None:
    """Take the steps; those of one round at the same time, if this machine has the cores.

    Args:
        plans: In order, each with the place for what it finds.
        visit: What they share.
        report: Written whenever something is found.
        limit_s: After which no step goes on.
    """
    end = time.monotonic() + limit_s
    report.write()
    workers = _ROUNDS_AT_ONCE if visit.jobs == _MAX_JOBS else 1
    for _, together in groupby(plans, key=lambda item: item[0].round):
        with ThreadPoolExecutor(workers) as pool:
            for plan, own in together:
                pool.submit(_take, plan, own, visit, report, end=end)


def _take(plan: Plan, own: StepReport, visit: Visit, report: Report, *, end: float) -> None:
    start = time.monotonic()
    limit_s = min(plan.limit_s, end - start)
    if limit_s <= 0:
        return
    own.begun = True
    print(f"{own.number} {own.title}: at most {limit_s:.0f} s", flush=True)
    step = Step(visit, report, own, limit_s=limit_s)
    step.take(plan.take)
    own.seconds = time.monotonic() - start
    report.write()


def _visit(options: argparse.Namespace, work: Path) -> Visit:
    environment = {**os.environ, "TMPDIR": str(work), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    if options.cpu:
        environment |= {"CUDA_VISIBLE_DEVICES": "", "LIT_CIFAR_GPU_TESTS": "cpu"}
    os.environ.update(environment)  # for the process from which others are forked
    jobs = options.jobs or min(_MAX_JOBS, os.cpu_count() or 1)
    data = [] if options.data is None else ["--data.dataset=cifar10", f"--data.root={options.data.absolute()}"]
    return Visit(
        work=work,
        out=options.out.absolute(),
        accelerator="cpu" if options.cpu else "cuda",
        data=[*data, "--data.download=false"] if data else [],
        jobs=jobs,
        environment=environment,
    )


def _install(folder: Path, site: Path, report: Report, visit: Visit) -> Path | None:
    """Where the wheels of what this machine lacks now are; None if it lacks nothing, or they cannot be installed."""
    lacking = wheels.missing(folder, wheels.floors())
    report.about["installed from wheels"] = ", ".join(wheel.name for wheel in lacking) or "nothing"
    if not lacking:
        return None
    done = wheels.install(lacking, site)
    report.log("installation of wheels", done.stdout + done.stderr)
    if done.returncode:
        report.about["installed from wheels"] = f"failed: {done.stderr[-300:]}"
        return None
    path = os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(site)])
    os.environ["PYTHONPATH"] = visit.environment["PYTHONPATH"] = path
    return site


def _leave(number: int, frame: FrameType | None) -> None:
    """What has been found is written down already."""
    end_all()
    raise SystemExit(128 + number)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    options = argparse.ArgumentParser(prog="gpu_visit", description=__doc__)
    options.add_argument("out", type=Path, help="folder for summary.md, results.json, log.txt and profiles")
    options.add_argument("--cpu", action="store_true", help="every step with its small size, on the CPU")
    options.add_argument("--data", type=Path, metavar="DIR", help="holds CIFAR-10; without it images are synthetic")
    options.add_argument("--wheels", type=Path, metavar="DIR", help="of packages that may be missing here")
    options.add_argument("--seconds", type=float, default=570, metavar="S", help="for all steps together (570)")
    options.add_argument("--steps", type=_numbers, metavar="N,M", help="only these, e.g. 1,4")
    options.add_argument("--jobs", type=int, metavar="N", help="processes at a time")
    return options


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not set(numbers) <= set(range(1, len(PLANS) + 1)):
        raise argparse.ArgumentTypeError(f"steps are numbered 1 to {len(PLANS)}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
