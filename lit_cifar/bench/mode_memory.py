"""What a mode keeps in memory: what `fsdp2` divides among processes, and what a pipeline's schedule holds back."""

import json
from pathlib import Path

from lit_cifar.bench.rows import Goal, Row
from lit_cifar.bench.settings import Report, Settings
from lit_cifar.bench.step import arch
from lit_cifar.bench.timing import Spread
from lit_cifar.reporting.memory import FILES
from lit_cifar.reporting.timeline import FILE as TIMELINE
from lit_cifar.reporting.timeline import kept_bytes, read_spans
from lit_cifar.verify.runs import run

_MICROBATCHES = 8


def measure(settings: Settings, report: Report) -> list[Row]:
    """The largest process of two in each mode, for ResNet34 in float32. The bytes are counted, so once is enough."""
    report("what ddp and fsdp2 keep")
    state = {mode: _state_mib(mode, settings) for mode in ("ddp", "fsdp2")}
    report("what GPipe and 1F1B keep")
    kept = {schedule: _activations_mib(schedule, settings) for schedule in ("GPipe", "1F1B")}
    return [
        Row(
            section="memory",
            name="parameters, gradients and momentum in a process, fsdp2 against ddp, 2 processes",
            unit="x",
            found=Spread((state["fsdp2"] / state["ddp"],)),
            goal=Goal(at_most=0.55),
            note=f"{state['fsdp2']:.0f} MiB against {state['ddp']:.0f}",
        ),
        Row(
            section="memory",
            name=f"activations kept for backward, 1F1B against GPipe, 2 stages, {_MICROBATCHES} microbatches",
            unit="x",
            found=Spread((kept["1F1B"] / kept["GPipe"],)),
            goal=Goal(at_most=0.35),
            note=f"{kept['1F1B']:.0f} MiB against {kept['GPipe']:.0f}, cifar stem, microbatches of 2 images",
        ),
    ]


def _state_mib(mode: str, settings: Settings) -> float:
    folder = _trained(
        mode, settings, "--model.stem=imagenet", "--trainer.callbacks+=lit_cifar.reporting.memory.TrainingMemory"
    )
    found = [json.loads(file.read_text())["state_bytes"] for file in folder.glob(FILES)]
    return float(max(found)) / 2**20


def _activations_mib(schedule: str, settings: Settings) -> float:
    """The most that a stage holds at a time of what autograd keeps for backward."""
    flags = [f"--trainer.strategy.schedule={schedule}", f"--trainer.strategy.num_microbatches={_MICROBATCHES}"]
    flags += ["--trainer.callbacks+=lit_cifar.reporting.timeline.Timeline", "--trainer.callbacks.first_step=1"]
    folder = _trained("PipelineStrategy", settings, "--model.stem=cifar", *flags, "--trainer.callbacks.num_steps=1")
    return kept_bytes(read_spans(folder / TIMELINE)) / 2**20


def _trained(strategy: str, settings: Settings, *flags: str) -> Path:
    """The run folder of two steps in two processes.

    Raises:
        RuntimeError: The fit failed.
    """
    folder = settings.folder / f"memory-{len(list(settings.folder.iterdir()))}"
    folder.mkdir()
    common = ["--data.dataset=synthetic", "--data.num_train=32", "--data.val_size=0", "--data.batch_size=16"]
    common += [f"--model.arch={arch(settings)}", "--trainer.accelerator=cpu", "--trainer.devices=2"]
    common += ["--trainer.max_epochs=1", f"--trainer.strategy={strategy}", "--trainer.enable_progress_bar=false"]
    outcome = run("fit", *common, *flags, f"--run_dir={folder / 'run'}", folder=folder, num_ranks=2)
    if outcome.status != 0:
        raise RuntimeError(f"fit with {strategy} failed: {outcome.last_words}")
    return folder / "run"
