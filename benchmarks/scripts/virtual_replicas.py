"""What `--virtual_replicas` costs a step, in time and in memory: `benchmarks/scripts/virtual_replicas.py OUTPUT`.

ResNet34 with torchvision's stem on synthetic images, in float32. One device with one thread, and `ddp` on two processes
with one thread each, without the option and with 1, 2, 4 and 8 parts. For the time all runs are alive and take turns.
Memory is that of the fullest process: the most by which it grows once the training begins.
"""

import argparse
import json
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from lit_cifar.tools.bench.measurements import interleaved
from lit_cifar.tools.bench.memory import FILES
from lit_cifar.tools.bench.timed_runs import TimedRun, interleaved_runs
from lit_cifar.tools.commands.terminal import about, say
from lit_cifar.tools.verify.runs import refuse_if_invalid, run

BATCH_SIZE, STEPS = 128, 3
PARTS = {1: (None, 1, 2, 4, 8), 2: (None, 2, 4, 8)}  # by the number of processes
WHAT = ("time", "memory")


def fit(processes: int, parts: int | None, *, rounds: int) -> TimedRun:
    """A run that is long enough for all turns."""
    num_train = BATCH_SIZE * (1 + STEPS) * (rounds + 1)
    flags = ["--model.stem=imagenet", "--data.dataset=synthetic", "--data.val_size=0", f"--data.num_train={num_train}"]
    flags += [f"--data.batch_size={BATCH_SIZE}", "--data.eval_batch_size=8", "--trainer.accelerator=cpu"]
    flags += ["--trainer.enable_progress_bar=false"]
    flags += [f"--trainer.devices={processes}"] + (["--trainer.strategy=ddp"] if processes > 1 else [])
    flags += [] if parts is None else [f"--virtual_replicas={parts}"]
    return TimedRun(flags=flags, num_ranks=processes)


def prices(fits: dict[str, TimedRun], folder: Path, *, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of a step, and how many times as long as without the option in the same round."""
    with interleaved_runs(fits, folder=folder) as seconds:
        for name in fits:
            seconds(name, steps=1, skip=1)
        times = {name: partial(seconds, name, steps=STEPS, skip=1) for name in fits}
        found = interleaved(times, rounds=rounds)
    return {name: {"step_s": own.tolist(), "price": (own / found["None"]).tolist()} for name, own in found.items()}


def peak_mib(fit: TimedRun, folder: Path) -> float:
    """The peak of the fullest process in a run of some steps."""
    flags = [*fit.flags, f"--trainer.max_steps={STEPS}", "--trainer.max_epochs=-1", f"--run_dir={folder / 'run'}"]
    flags += ["--trainer.callbacks+=lit_cifar.tools.bench.memory.TrainingMemory", "--figures.every_n_epochs=0"]
    refuse_if_invalid(run("fit", *flags, folder=folder, num_ranks=fit.num_ranks))
    found = [json.loads(file.read_text())["resident_peak_bytes"] for file in (folder / "run").glob(FILES)]
    return round(max(found) / 2**20, 1)


def peaks(fits: dict[str, TimedRun], folder: Path, *, rounds: int) -> dict[str, dict[str, Any]]:
    """MiB of each round."""
    found: dict[str, list[float]] = {name: [] for name in fits}
    for turn in range(rounds):
        for name, one in fits.items():
            with tempfile.TemporaryDirectory(prefix=f"{turn}-{name}-", dir=folder) as own:
                found[name].append(peak_mib(one, Path(own)))
    return {name: {"peak_mib": values} for name, values in found.items()}


def main(output: Path, *, what: tuple[str, ...] = WHAT, rounds: int = 5) -> None:
    sizes = {"batch_size": BATCH_SIZE, "rounds": rounds, "steps_of_a_round": STEPS}
    record: dict[str, Any] = about() | sizes | {"rows": []}
    for processes, all_parts in PARTS.items():
        fits = {str(parts): fit(processes, parts, rounds=rounds) for parts in all_parts}
        with tempfile.TemporaryDirectory(prefix="virtual-replicas-") as name:
            folders = {measure: Path(name) / measure for measure in what}
            for folder in folders.values():
                folder.mkdir()
            price = prices(fits, folders["time"], rounds=rounds) if "time" in what else {}
            peak = peaks(fits, folders["memory"], rounds=rounds) if "memory" in what else {}
        for parts in all_parts:
            row = price.get(str(parts), {}) | peak.get(str(parts), {})
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
    options = parser().parse_args()
    main(options.output, what=WHAT if options.only is None else (options.only,), rounds=options.rounds)
