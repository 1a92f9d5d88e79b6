"""What `--virtual_replicas` costs a step, in time and in memory: `benchmarks/scripts/virtual_replicas.py OUTPUT`.

ResNet34 with torchvision's stem on synthetic images, in float32. One device with one thread, and `ddp` on two processes
with one thread each, without the option and with 1, 2, 4 and 8 parts. All take turns. Where there is a GPU they run on
it, and `ddp` where there are two. Other arguments go to `fit`.
Memory is that of the fullest process: the most by which it grows once the training begins; on a GPU, the most there.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from run_record import run_script

from lit_cifar.tools.bench import interleaved
from lit_cifar.tools.bench.memory import FILES
from lit_cifar.tools.bench.mode_speed import images_per_s
from lit_cifar.tools.terminal import about, say

ON_GPU = torch.cuda.is_available()
BATCH_SIZE, STEPS = 128, 30 if ON_GPU else 3
PARTS = {1: (None, 1, 2, 4, 8), 2: (None, 2, 4, 8)}  # by the number of processes
WHAT = ("time", "memory")


def flags_of(processes: int, parts: int | None) -> list[str]:
    flags = ["--model.stem=imagenet", "--data.eval_batch_size=8", f"--trainer.devices={processes}"]
    flags += ["--trainer.strategy=ddp"] if processes > 1 else []
    flags += ["--trainer.accelerator=gpu"] if ON_GPU else []
    if parts is None:
        return flags
    needed = ["--trainer.deterministic=true"] if ON_GPU else []
    return [*flags, *needed, f"--virtual_replicas={parts}"]


def step_s(processes: int, parts: int | None, more: list[str], *, folder: Path) -> float:
    """Seconds of a step, by a run of its own."""
    flags = [*flags_of(processes, parts), *more]
    return BATCH_SIZE / images_per_s(flags, batch_size=BATCH_SIZE, steps=STEPS, folder=folder, ranks=processes)


def peak_mib(processes: int, parts: int | None, more: list[str], *, folder: Path) -> float:
    """The peak of the fullest process in such a run."""
    step_s(processes, parts, [*more, "--trainer.callbacks+=lit_cifar.tools.bench.memory.TrainingMemory"], folder=folder)
    what = "gpu_peak_bytes" if ON_GPU else "resident_peak_bytes"
    found = [json.loads(file.read_text())[what] for file in (folder / "run").glob(FILES)]
    return round(max(found) / 2**20, 1)


def measured(
    processes: int, flags: list[str], *, what: tuple[str, ...], rounds: int
) -> dict[int | None, dict[str, list[float]]]:
    """By parts, a number for each round: time, that time over the one without the option, and memory."""

    def in_folder(measure: Any, parts: int | None) -> float:
        with tempfile.TemporaryDirectory(prefix="virtual-replicas-") as folder:
            return float(measure(processes, parts, flags, folder=Path(folder)))

    rows: dict[int | None, dict[str, list[float]]] = {parts: {} for parts in PARTS[processes]}
    for name, measure in {"time": step_s, "memory": peak_mib}.items():
        if name in what:
            calls = {str(parts): partial(in_folder, measure, parts) for parts in rows}
            found = interleaved(calls, rounds=rounds)
            for parts, row in rows.items():
                own = found[str(parts)]
                times = {"step_s": own.tolist(), "price": (own / found["None"]).tolist()}
                row |= times if name == "time" else {"peak_mib": own.tolist()}
    return rows


def main(output: Path, flags: list[str], *, only: str | None = None, rounds: int = 5) -> None:
    sizes = {"batch_size": BATCH_SIZE, "rounds": rounds, "steps_of_a_round": STEPS, "flags": flags}
    record: dict[str, Any] = about() | sizes | {"rows": []}
    for processes in PARTS if torch.cuda.device_count() != 1 else [1]:
        for parts, row in measured(processes, flags, what=(only,) if only else WHAT, rounds=rounds).items():
            record["rows"].append({"processes": processes, "parts": parts} | row)
            medians = ", ".join(f"{name} {median(values):.2f}" for name, values in row.items())
            say(f"{processes} processes, {parts} parts: {medians}")
    output.write_text(json.dumps(record, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Time steps with and without virtual replicas, and count memory.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--only", choices=WHAT, help="time needs a machine that does nothing else; memory does not")
    return parser


if __name__ == "__main__":
    run_script(parser(), main)
