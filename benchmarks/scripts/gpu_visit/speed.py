"""Steps that measure: `fit` beside a plain loop, images per second, several GPUs."""

import json
from collections.abc import Sequence
from functools import partial
from statistics import median
from typing import Any

from gpu_visit.compare import logged
from gpu_visit.step import Step

_FORWARD_AND_BACKWARD_GFLOP = 6.95  # of an image in ResNet34 with the CIFAR stem
_CHANNELS_LAST, _COMPILE = "--model.channels_last=true", "--model.compile=true"
_GRAPHS = "--model.compile=cuda_graphs"
_NETWORK = {
    "cuda": ["--model.arch=resnet34", "--trainer.precision=bf16-mixed", "--data.batch_size=512"],
    "cpu": ["--model.arch=tiny", "--model.stem=imagenet", "--data.batch_size=16"],
}
_EPOCHS = {
    "cuda": ["--trainer.max_epochs=4", "--data.num_train=50000", "--data.num_test=1000"],
    "cpu": ["--trainer.max_epochs=2", "--trainer.log_every_n_steps=5", "--data.num_train=288", "--data.num_test=32"],
}
_USUAL = ["--trainer.callbacks+=analysis.memory.TrainingMemory", "--trainer.enable_progress_bar=false"]
_USUAL += ["--trainer.benchmark=true", "--trainer.limit_val_batches=0", "--data.val_size=0"]
_USUAL += ["--data.order.drop_last=true", "--data.dataset=synthetic"]  # each shape of a batch is compiled anew


def plain_loop(step: Step) -> None:
    """A step of `fit`, in the precision and layout that it chooses, beside one of a plain loop, in turn."""
    kind = step.visit.accelerator
    flags = [f"--trainer.accelerator={kind}", *_NETWORK[kind][:2], _CHANNELS_LAST]
    if not step.visit.on_gpu:
        words = ["overhead", f"{step.work}/eager.json", "--turns=2", "--steps=3", "--batch_size=16", *flags]
        step.check("eager", partial(_ratio, step, "eager", words))
        return
    for way, own in {"eager": ["--trainer.benchmark=true"], "graphs": [_GRAPHS]}.items():
        for batch in (512, 128):
            name = f"{way}-{batch}"
            words = ["overhead", f"{step.work}/{name}.json", f"--batch_size={batch}", *flags, *own]
            step.check(name, partial(_ratio, step, name, words))


def _ratio(step: Step, name: str, words: Sequence[str]) -> tuple[str, dict[str, Any]]:
    text = step.output_of(name, *words, limit_s=120).splitlines()[-1]
    return text, json.loads((step.work / f"{name}.json").read_text())


def throughput(step: Step) -> None:
    """One after the other: they are timed."""
    step.check("channels_last", partial(_fit, step, "channels-last", [_CHANNELS_LAST]))
    if step.visit.on_gpu:
        step.check("channels_last, compiled", partial(_fit, step, "both", [_CHANNELS_LAST, _COMPILE]))
        step.check("compiled", partial(_fit, step, "compiled", [_COMPILE]))
        step.check("CUDA graphs", partial(_fit, step, "graphs", [_CHANNELS_LAST, _GRAPHS]))
        step.check("eager", partial(_fit, step, "eager", []))


def scaling(step: Step) -> None:
    """`ddp` with 1, 2, 4 ... GPUs, at a constant batch of each."""
    num_gpus = step.visit.several()
    counts = [2**power for power in range(num_gpus.bit_length())]
    for each in [512, 1024] if step.visit.on_gpu else [16]:
        for devices in counts if step.visit.on_gpu else [2]:
            mode = ["--trainer.strategy=ddp", f"--trainer.devices={devices}"] if devices > 1 else []
            flags = [_CHANNELS_LAST, *mode, f"--data.batch_size={devices * each}"]
            step.check(f"{devices} x {each}", partial(_fit, step, f"{devices}x{each}", flags))


def _fit(step: Step, name: str, flags: Sequence[str]) -> tuple[str, dict[str, Any]]:
    kind = step.visit.accelerator
    run = step.fit(name, *_NETWORK[kind], *_EPOCHS[kind], *_USUAL, *step.visit.data, *flags)
    speed = median(logged(run, "train/images_per_s").values())
    peaks = [json.loads(file.read_text())["gpu_peak_bytes"] or 0 for file in run.glob("memory-rank*.json")]
    tflop = f", {speed * _FORWARD_AND_BACKWARD_GFLOP / 1e3:.0f} TFLOP/s" if step.visit.on_gpu else ""
    return f"{speed:,.0f} images/s{tflop}, peak {max(peaks) / 2**20:.0f} MiB", {"images_per_s": speed}
