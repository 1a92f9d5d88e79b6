"""Step 9: images per second at a batch of 512, and where the time of a step goes."""

import gzip
import json
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from gpu_visit.compare import logged
from gpu_visit.step import Step

_FORWARD_AND_BACKWARD_GFLOP = 6.95  # of an image in ResNet34 with the CIFAR stem
_CHANNELS_LAST, _COMPILE = "--model.channels_last=true", "--model.compile=true"
_TRAINING_ALONE = "--trainer.limit_val_batches=0"
_SYNTHETIC = "--data.dataset=synthetic"
_SIZES = {
    "cuda": ["--model.arch=resnet34", "--data.batch_size=512", "--trainer.precision=bf16-mixed"],
    "cpu": ["--model.stem=imagenet", "--data.batch_size=16"],
}
_EPOCHS = {
    "cuda": ["--trainer.max_epochs=4", _SYNTHETIC, "--data.num_train=50000", "--data.num_test=1000"],
    "cpu": [
        "--trainer.max_epochs=2",
        "--trainer.log_every_n_steps=5",
        _SYNTHETIC,
        "--data.num_train=288",
        "--data.num_test=32",
        "--data.val_size=32",
    ],
}


def take(step: Step) -> None:
    """One after the other: they are timed."""
    step.check("eager", partial(_fit, step, "eager", []))
    step.check("channels_last", partial(_fit, step, "channels-last", [_CHANNELS_LAST]))
    step.check("where the time goes", partial(_trace, step))
    step.check("fit beside a plain loop", partial(_plain, step))
    if step.visit.on_gpu:  # on a CPU it takes minutes, for nothing
        both = [_CHANNELS_LAST, _COMPILE, _TRAINING_ALONE]
        step.check("channels_last, compiled", partial(_fit, step, "channels-last-compiled", both))
        step.check("compiled", partial(_fit, step, "compiled", [_COMPILE, _TRAINING_ALONE]))


def _fit(step: Step, name: str, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    kind = step.visit.accelerator
    usual = ["--trainer.callbacks+=lit_cifar.tools.bench.memory.TrainingMemory", "--trainer.enable_progress_bar=false"]
    usual += ["--data.drop_last=true", "--trainer.benchmark=true"]  # each shape of a batch is compiled anew
    run = step.fit(name, *_SIZES[kind], *_EPOCHS[kind], *step.visit.data, *usual, *flags)
    speed = median(logged(run, "train/images_per_s").values())
    peak_mib = (json.loads((run / "memory-rank0.json").read_text())["gpu_peak_bytes"] or 0) / 2**20
    tflop = f", {speed * _FORWARD_AND_BACKWARD_GFLOP / 1e3:.0f} TFLOP/s" if step.visit.on_gpu else ""
    return f"{speed:,.0f} images/s{tflop}, peak {peak_mib:.0f} MiB", {"images_per_s": speed}


def _trace(step: Step) -> tuple[str, dict[str, Any]]:
    folder, kind = step.work / "trace", step.visit.accelerator
    words = ["--mode=single", f"--output={folder}", f"--trainer.accelerator={kind}", *_SIZES[kind], _CHANNELS_LAST]
    words += [] if step.visit.on_gpu else ["--model.arch=tiny"]
    step.output_of("trace", "lit_cifar", "bench", "trace", *words)
    (step.visit.out / "trace.json.gz").write_bytes(gzip.compress((folder / "trace.json").read_bytes()))
    (rank,) = json.loads((folder / "summary.json").read_text())["ranks"]
    parts = ", ".join(f"{name} {part:.1f}" for name, part in rank["ms"].items())
    return f"ms of a step: {parts}; {rank['plain_ms']:.1f} in all without the profiler", rank


def _plain(step: Step) -> tuple[str, dict[str, Any]]:
    file = step.work / "overhead.json"
    size = [] if step.visit.on_gpu else ["--small", "--rounds=1"]
    step.output_of("overhead", "lit_cifar", "bench", "overhead", f"--json={file}", *size)
    rows = json.loads(file.read_text())["rows"]
    return "; ".join(f"{row['name']}: {row['median']:.3g} {row['unit']}, {row['note']}" for row in rows), {"rows": rows}
