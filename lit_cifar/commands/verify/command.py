"""`python -m lit_cifar verify`: arguments, table and exit status."""

import argparse
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console

from lit_cifar.callbacks.environment import command_line, cpu_model, versions
from lit_cifar.commands.verify.compare import EXACT_BOUND, FLOOR_ULP, NOISE_FACTOR
from lit_cifar.commands.verify.rows import Row
from lit_cifar.commands.verify.selftest import Finding, findings_table, self_test
from lit_cifar.commands.verify.table import COLUMNS, problem_lines, verdict_table
from lit_cifar.commands.verify.verifier import verify
from lit_cifar.errors import ConfigError

_DESCRIPTION = """\
Train a configuration for a few steps in each mode, and compare it step by step with the single-device computation that
the mode is equal to: losses, parameters, BatchNorm buffers, optimizer state, sample ids, evaluation counts, and the
checkpoint loaded back. The tolerance is measured: the same run with sums in another order, in the same precision.
Every other argument is passed on to `fit`, e.g. --config FILE, --model.stem=strided, --trainer.precision=64-true.
Without --config: ResNet34 on synthetic images."""


def main(args: list[str]) -> int:
    """Verify, print, and return 0 if every mode passed, or every planted mistake was caught; else 1.

    Raises:
        ConfigError: Arguments that cannot work.
        SystemExit: After --help; with status 143 when terminated. Ctrl-C returns 130.
    """
    options, rest = verify_parser().parse_known_args(args)
    if options.self_test and rest:
        raise ConfigError(f"--self-test has a configuration of its own, not {rest[0]}", remedy="leave it out")
    target = None if options.json is None else _writable(Path(options.json))
    about = _about()
    _exit_orderly_when_terminated()
    try:
        content = _self_test() if options.self_test else _verify(options, rest)
    except KeyboardInterrupt:
        print("interrupted; every run was ended and its files removed", file=sys.stderr)
        return 130
    if target is not None:
        target.write_text(json.dumps(about | content, indent=2) + "\n")
    return 0 if content["passed"] else 1


def _verify(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    names = options.modes.split(",")
    rows = verify(names, devices=options.devices, steps=options.steps, args=rest, report=_say)
    console = _console()
    console.print(verdict_table(rows, title=f"{options.steps} steps, compared one by one"))
    for line in problem_lines(rows):
        console.print(line, markup=False)
    content = {"devices": options.devices, "steps": options.steps, "rows": [_of_row(row) for row in rows]}
    return content | {"passed": all(row.passed for row in rows)}


def _self_test() -> dict[str, Any]:
    findings = self_test(report=_say)
    _console().print(findings_table(findings, title="Planted mistakes"))
    content = {"findings": [_of_finding(finding) for finding in findings]}
    return content | {"passed": all(finding.right for finding in findings)}


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else COLUMNS, highlight=False)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, remedy="see python -m lit_cifar verify --help")


def verify_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m lit_cifar verify",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--modes", default="all", metavar="A,B", help="modes to verify; all of them by default")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="devices of each mode (default: 2)")
    parser.add_argument("--steps", type=int, default=3, metavar="K", help="optimizer steps of each run (default: 3)")
    parser.add_argument("--json", metavar="FILE", help="write every figure, versions and hardware there")
    parser.add_argument("--self-test", action="store_true", help="plant mistakes one by one: each must be caught")
    return parser


def _say(line: str) -> None:
    print(line, flush=True)


def _exit_orderly_when_terminated() -> None:
    """Turn SIGTERM and SIGHUP into an exception, so that runs are ended and folders removed as after Ctrl-C."""

    def leave(number: int, frame: object) -> NoReturn:
        raise SystemExit(128 + number)

    with suppress(ValueError):  # not in the main thread: whoever runs us there deals with signals
        signal.signal(signal.SIGTERM, leave)
        signal.signal(signal.SIGHUP, leave)


def _writable(path: Path) -> Path:
    """`path`, once it is known that a file can be written there: not after ten minutes.

    Raises:
        ConfigError: It cannot.
    """
    existed = path.exists()
    try:
        path.touch()
        if not existed:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"--json={path} cannot be written: {error.strerror}", remedy="choose another file") from error
    return path


def _about() -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "versions": versions(),
        "cpu": {"model": cpu_model(), "cores": os.cpu_count()},
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())],
        "rules": {"noise_factor": NOISE_FACTOR, "floor_ulp": FLOOR_ULP, "float64": EXACT_BOUND},
    }


def _of_row(row: Row) -> dict[str, Any]:
    return asdict(row) | {"passed": row.passed}


def _of_finding(finding: Finding) -> dict[str, Any]:
    bug = finding.bug
    return {
        "bug": None if bug is None else bug.name,
        "imitates": None if bug is None else bug.imitates,
        "mode": finding.mode,
        "problems": finding.problems,
        "right": finding.right,
    }
