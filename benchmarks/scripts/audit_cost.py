"""What an audit of replicas costs, in steps of the same run: `audit_cost.py OUTPUT [FLAGS]`; FLAGS go to `fit`."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import lightning as L
import psutil
from run_record import complete, run_script

from lit_cifar.tools.terminal import say

EVERY, STEPS = 4, 64
Row = dict[str, Any]


class Clock(L.Callback):
    """Seconds of every step of rank 0, with what callbacks do after it, and its memory at the end in MiB."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)
        self.times: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.times.append(perf_counter())

    def on_train_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.is_global_zero:
            peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
            seconds = [after - before for before, after in zip(self.times, self.times[1:], strict=False)]
            self.path.write_text(json.dumps({"seconds": seconds, "peak_mib": int(peak.split()[1]) / 1024}))


def trained(every: int, flags: list[str]) -> Row:
    """One training in `ddp` on two processes, with an audit after so many steps, 0 for none."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["fit", "--trainer.strategy=ddp", "--trainer.devices=2", "--trainer.accelerator=cpu", *flags]
        words += [f"--trainer.max_steps={STEPS}", "--trainer.max_epochs=-1", "--last_checkpoint.every_n_epochs=0"]
        words += [f"--replica_audit.every_n_steps={every}", "--trainer.enable_progress_bar=false"]
        words += ["--trainer.callbacks+=audit_cost.Clock", f"--trainer.callbacks.path={folder}/clock"]
        command = [sys.executable, "-m", "lit_cifar", *words, f"--run_dir={folder}/run"]
        subprocess.run(command, check=True, capture_output=True, cwd=Path(__file__).parent)
        found: Row = json.loads(Path(folder, "clock").read_text())
    return {
        "every": every,
        "cores": psutil.cpu_count(logical=False),
        **found,
        "audit_steps": audit_steps(found["seconds"]),
    }


def audit_steps(seconds: list[float]) -> list[float]:
    """Of each audit what it takes, in steps: two steps of every four have a part of it."""
    cycles = [seconds[start : start + EVERY] for start in range(2 * EVERY - 1, len(seconds) - EVERY + 1, EVERY)]
    return [(cycle[0] + cycle[1]) / median([*cycle[2:], *cycle[2:]]) - 2 for cycle in cycles]


def main(output: Path, flags: list[str]) -> None:
    rows = complete(
        output,
        [0, EVERY],
        lambda every: trained(every, flags),
        settings={"flags": flags},
        tell=lambda row: say(f"every {row['every']}: an audit takes {median(row['audit_steps']):.2f} steps"),
    )
    none, some = rows
    say(f"peak {none['peak_mib']:.0f} MiB without, {some['peak_mib']:.0f} MiB with audits")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="What an audit of replicas costs, in steps of the same run")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    run_script(parser(), main)
