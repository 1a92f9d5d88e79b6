"""What twenty minutes on a machine with GPUs can tell: `bash benchmarks/gpu_visit.sh OUT`.

The steps are taken until the time is used up; with the same folder again, those that it lacks. Everything runs in
processes of its own, each with a time limit, forked from one that has imported the package.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from gpu_visit.plans import PLANS, Plan
from gpu_visit.processes import end_all
from gpu_visit.report import Report, StepReport
from gpu_visit.step import Step, Visit
from lit_cifar.tools.terminal import about

_MAX_JOBS = 8  # processes at a time
_PATIENCE_ON_CPU = 10.0


def main(args: Sequence[str] | None = None) -> int:
    """Visit; 0 if every step that was taken found all right."""
    options = parser().parse_args(args)
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, _leave)
    with tempfile.TemporaryDirectory(prefix="gpu-visit-", ignore_cleanup_errors=True) as work:
        visit = _visit(options, Path(work))
        report = Report(options.out, [plan.title for plan in PLANS], about=about())
        steps = [s for s in report.steps if (s.number in options.steps if options.steps else s.status != "ok")]
        take([(PLANS[own.number - 1], own) for own in steps], visit, report, limit_s=options.seconds)
        print(report.table())
    return 0 if all(step.status in ("ok", "left out") for step in steps) else 1


def take(plans: Sequence[tuple[Plan, StepReport]], visit: Visit, report: Report, *, limit_s: float) -> None:
    """Take the steps, each with the place for what it finds; none goes on after `limit_s` seconds in all."""
    end = time.monotonic() + limit_s
    report.write()
    for plan, own in plans:
        start = time.monotonic()
        left_s = min(visit.patience * plan.limit_s, end - start)
        if left_s > 0:
            print(f"{own.number} {own.title}: at most {left_s:.0f} s", flush=True)
            own.ended = False
            Step(visit, report, own, limit_s=left_s).take(plan.take)
            own.seconds, own.ended = time.monotonic() - start, True
            report.write()


def _visit(options: argparse.Namespace, work: Path) -> Visit:
    os.environ.update({"TMPDIR": str(work), "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"})
    if options.cpu:
        os.environ.update({"CUDA_VISIBLE_DEVICES": "", "LIT_CIFAR_GPU_TESTS": "cpu"})
    data = ["--data.dataset=cifar10", f"--data.root={options.data}", "--data.download=false"] if options.data else []
    return Visit(
        work=work,
        out=options.out.absolute(),
        accelerator="cpu" if options.cpu else "cuda",
        num_gpus=0 if options.cpu else torch.cuda.device_count(),
        data=data,
        jobs=min(_MAX_JOBS, len(os.sched_getaffinity(0))),
        environment=dict(os.environ),
        patience=_PATIENCE_ON_CPU if options.cpu else 1.0,
    )


def _leave(number: int, frame: object) -> None:
    """What has been found is written down already."""
    end_all()
    raise SystemExit(128 + number)


def parser() -> argparse.ArgumentParser:
    """Of the command line."""
    options = argparse.ArgumentParser(prog="gpu_visit.sh", description=__doc__)
    options.add_argument("out", type=Path, help="folder for all that is found; an earlier visit's is continued")
    options.add_argument("--cpu", action="store_true", help="every step with its small size, on the CPU")
    options.add_argument("--data", type=Path, metavar="DIR", help="holds CIFAR-10; without it images are synthetic")
    options.add_argument("--wheels", type=Path, metavar="DIR", help="of packages to install if they are missing")
    options.add_argument("--seconds", type=float, default=1200, metavar="S", help="for all steps together (1200)")
    options.add_argument("--steps", type=_numbers, metavar="N,M", help="only these, e.g. 1,4, even if OUT has them")
    return options


def _numbers(text: str) -> list[int]:
    numbers = [int(number) for number in text.split(",")]
    if not set(numbers) <= set(range(1, len(PLANS) + 1)):
        raise argparse.ArgumentTypeError(f"steps are numbered 1 to {len(PLANS)}")
    return numbers


if __name__ == "__main__":
    sys.exit(main())
