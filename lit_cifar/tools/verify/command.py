"""`python -m lit_cifar verify`: arguments, table and exit status."""

import argparse
from dataclasses import asdict
from typing import Any

import torch

from lit_cifar.errors import ConfigError
from lit_cifar.reporting.run_folder import process_rank
from lit_cifar.tools.terminal import (
    CommandParser,
    about,
    console,
    exit_orderly_when_terminated,
    say,
    writable,
    write_json,
)
from lit_cifar.tools.verify.comparison import EXACT_BOUND, FLOOR_ULP, NOISE_FACTOR
from lit_cifar.tools.verify.verdict_table import NO_VERDICT, exit_status, verdict_table
from lit_cifar.tools.verify.verifier import verify

_DESCRIPTION = """\
Train a configuration for a few steps in each mode, and compare it step by step with the single-device computation that
the mode equals. Compared are losses, parameters, BatchNorm buffers, optimizer state, sample ids, logged metrics, the
logits of evaluations, checkpoints, and the same run resumed before its last step. Processes that must hold the same
values are compared bit for bit.
Every other argument is passed on to `fit`, e.g. --config FILE, --model.arch=resnet34, --trainer.precision=bf16-mixed.
Without --config it is `tiny`, a narrow ResNet, on synthetic images in float64, where nothing may differ by more than
1e-9. In float32 and bfloat16 the bound is measured by the same run with sums in another order, and steps are replayed
on one device; a mode beyond its bound is judged in float64.

With --module, a training of your own: its first steps are replayed on one device, and compared bit for bit. Every other
argument is then one of LightningCLI, e.g. --trainer.strategy=ddp --trainer.devices=2 --model.width=64."""

RULES = {"noise_factor": NOISE_FACTOR, "floor_ulp": FLOOR_ULP, "float64": EXACT_BOUND}
_SHOWN = 5  # findings of a mode


def main(args: list[str]) -> int:
    """Verify, print, and return the exit status, which docs/verify.md lists."""
    options, rest = verify_parser().parse_known_args(args)
    if options.self_test:
        raise ConfigError(
            "--self-test plants mistakes in this package's own code, and is not installed with it",
            remedy="in a clone of the repository: python -m tests.mutations",
        )
    target = writable(options.json) if process_rank() == 0 else None  # with --module every rank comes here
    record = about() | {"rules": RULES}
    exit_orderly_when_terminated()
    if options.module is not None:
        from lit_cifar.tools.replay.command import replayed  # a training of others

        report = replayed(options.module, options.data, steps=options.steps, args=rest)
        status = {"pass": 0, "fail": 1}.get(report["outcome"], NO_VERDICT)
        write_json(target, record | report | {"exit_status": status})
        return status
    torch.set_num_threads(1)  # the other cores belong to the runs, beside which this process compares
    content = _verify(options, rest)
    write_json(target, record | content)
    return int(content["exit_status"])


def _verify(options: argparse.Namespace, rest: list[str]) -> dict[str, Any]:
    names = options.modes.split(",")
    if options.virtual_replicas is not None:
        rest = [*rest, f"--virtual_replicas={options.virtual_replicas}"]
    rows = verify(names, devices=options.devices, steps=options.steps, args=rest, report=say)
    out = console()
    out.print(verdict_table(rows, title=f"{options.steps} steps, compared one by one"))
    for row in rows:
        for problem in row.problems[:_SHOWN]:
            out.print(f"{row.mode}: {problem}", markup=False)
        if len(row.problems) > _SHOWN:
            out.print(f"{row.mode}: {len(row.problems) - _SHOWN} more findings: see --json FILE", markup=False)
    found = [asdict(row) | {"passed": row.passed} for row in rows]
    content = {"devices": options.devices, "steps": options.steps, "rows": found}
    return content | {"passed": not exit_status(rows), "exit_status": exit_status(rows)}


def verify_parser() -> argparse.ArgumentParser:
    parser = CommandParser("verify", description=_DESCRIPTION)
    parser.add_argument("--modes", default="all", metavar="A,B", help="Modes to verify (default: all).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of each mode (default: 2).")
    parser.add_argument("--steps", type=int, default=4, metavar="K", help="Optimizer steps of each run (default: 4).")
    parser.add_argument(
        "--virtual_replicas", type=int, metavar="V", help="Compare bit for bit: V parts of a batch in every mode."
    )
    parser.add_argument("--module", metavar="CLASS", help="Replay your own LightningModule, e.g. my_package.MyModule.")
    parser.add_argument("--data", metavar="CLASS", help="Its LightningDataModule, if it has one.")
    parser.add_argument("--json", metavar="FILE", help="Write all results, versions and hardware to this file.")
    parser.add_argument("--self-test", action="store_true", help="Where mistakes are planted that it must find.")
    return parser
