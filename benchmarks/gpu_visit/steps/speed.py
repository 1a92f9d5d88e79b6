"""Step 9: images per second at a batch of 512, and where the time of a step and of an epoch goes."""

import json
import shutil
from collections.abc import Sequence
from functools import partial
from typing import Any

from gpu_visit.step import FailedError, Step

_FORWARD_AND_BACKWARD_GFLOP = 6.95  # of an image in ResNet34 with the CIFAR stem
_CHANNELS_LAST, _COMPILE = "--model.channels_last=true", "--model.compile=true"
_COMMON = (
    *("--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--trainer.benchmark=true"),
    "--data.drop_last=true",  # each shape of a batch is compiled anew
)
_TRAINING_ALONE = "--trainer.limit_val_batches=0"
_SIZES = {
    "cuda": (
        *("--model.arch=resnet34", "--data.batch_size=512", "--trainer.max_epochs=4"),
        "--trainer.precision=bf16-mixed",
    ),
    "cpu": (
        *("--model.stem=imagenet", "--data.batch_size=16", "--data.val_size=32"),
        *("--trainer.max_epochs=2", "--figures.every_n_epochs=0"),
    ),
}
_SYNTHETIC = {
    "cuda": ("--data.dataset=synthetic", "--data.num_train=50000", "--data.num_test=1000"),
    "cpu": ("--data.dataset=synthetic", "--data.num_train=288", "--data.num_test=32"),
}


def take(step: Step) -> None:
    """One after the other: they are timed."""
    step.check("eager", partial(_fit, step, "eager", []))
    step.check("channels_last", partial(_fit, step, "channels-last", [_CHANNELS_LAST]))
    step.check("where the time goes", partial(_profile, step, [_CHANNELS_LAST]))
    step.check("plain loop, channels_last", partial(_plain, step, "plain", ["--channels-last"]))
    if step.visit.on_gpu:  # on a CPU it takes minutes, for nothing
        both = [_CHANNELS_LAST, _COMPILE, _TRAINING_ALONE]
        step.check("channels_last, compiled", partial(_fit, step, "channels-last-compiled", both))
        step.check(
            "plain loop, channels_last, compiled",
            partial(_plain, step, "plain-compiled", ["--channels-last", "--compile"]),
        )
        step.check("compiled", partial(_fit, step, "compiled", [_COMPILE, _TRAINING_ALONE]))


def _flags(step: Step) -> list[str]:
    kind = step.visit.accelerator
    return [*_COMMON, *_SIZES[kind], *(step.visit.data or _SYNTHETIC[kind])]


def _fit(step: Step, name: str, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    clock = step.work / f"{name}.json"
    watch = ("--trainer.callbacks+=gpu_visit.clocks.EpochClock", f"--trainer.callbacks.path={clock}")
    folder = step.fit(name, *_flags(step), *watch, *flags)
    content = json.loads(clock.read_text())
    epoch = content["median"]
    speed = content["images"] / epoch["training_s"]
    parts = ", ".join(f"{key.removesuffix('_s')} {value:.2f}" for key, value in epoch.items())
    text = f"{speed:,.0f} images/s; seconds of an epoch: {parts}; peak {content['peak_mib']:.0f} MiB"
    if step.visit.on_gpu:
        text += f"; {speed * _FORWARD_AND_BACKWARD_GFLOP / 1e3:.0f} TFLOP/s"
    return text, {"images_per_s": speed, **content, "run": str(folder)}


def _profile(step: Step, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """Three steps by torch's profiler, and whole epochs by Lightning's, whose table is in the log."""
    folder = step.work / "profile"
    folder.mkdir()
    watch = ["--trainer.callbacks+=gpu_visit.clocks.StepProfile", f"--trainer.callbacks.folder={folder}"]
    step.fit("profiled", *_flags(step), *watch, *flags, "--trainer.profiler=simple")
    content = json.loads((folder / "step.json").read_text())
    for name in ("profile.txt", "trace.json.gz"):
        shutil.copy(folder / name, step.visit.out / name)
    per_step = {name: 1e3 * content[f"{name}_s"] / content["steps"] for name in ("host", "device", "done")}
    if step.visit.on_gpu and not per_step["device"]:
        raise FailedError("the profiler has seen nothing of the GPU")
    text = (
        f"a step: host {per_step['host']:.1f} ms, device busy {per_step['device']:.1f} ms, both {per_step['done']:.1f}"
    )
    return f"{text} (with the profiler); tables in profile.txt, chrome trace in trace.json.gz", content


def _plain(step: Step, name: str, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    size = [] if step.visit.on_gpu else ["--arch=tiny", "--batch=8", "--steps=3"]
    output = step.output_of(name, "gpu_visit.plain_loop", *size, *flags)
    figures: dict[str, Any] = json.loads(output.splitlines()[-1])
    return f"{figures['images_per_s']:,.0f} images/s", figures
