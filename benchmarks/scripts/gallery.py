"""Train with each planted mistake and without: `python benchmarks/scripts/gallery.py OUTPUT [FLAGS]`.

What would a user see of it in the curves of a training? FLAGS go to `fit`, e.g. `--data.root=/datasets`. Writes the
losses as JSON. `pages.py` fills the page of the record from them, and `figures.py` draws its figure.
"""

import argparse
import csv
import json
import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import deepcopy
from pathlib import Path
from typing import Any

import lightning as L
import notebooks_path  # noqa: F401  # for `analysis` and `tests.mutations`
import torch
from matplotlib.figure import Figure

from analysis.run_frames import RED
from lit_cifar.reporting.output import without_banners
from lit_cifar.tools.modes import sized_modes
from lit_cifar.tools.terminal import about
from lit_cifar.tools.verify.runs import run
from tests.mutations.catalogue import OF_MODES, on_python_path, planting_flags
from tests.mutations.planting import Mutation

EPOCHS = 3
SEEDS = 5
RELOAD_AFTER = 60  # steps: then weights, optimizer and schedule are read back from a checkpoint, as by a resumed run
SETTINGS = [
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--data.val_size=47496",  # 2,504 images to train on: the last batch of an epoch has 8
    "--data.batch_size=64",
    f"--trainer.max_epochs={EPOCHS}",
    "--trainer.accumulate_grad_batches=2",
    "--data.eval_batch_size=64",
    "--trainer.limit_val_batches=16",
    "--trainer.log_every_n_steps=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.accelerator=cpu",
    "--figures.every_n_epochs=0",
]
T_95 = 2.776  # 97.5 % quantile of Student's t with SEEDS - 1 degrees of freedom
COLUMNS = 8

Curves = dict[str, list[float]]


class Reload(L.Callback):
    """Reads everything back once, from a checkpoint in `folder`."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._schedules: list[dict[str, Any]] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember how the schedules begin."""
        self._schedules = [deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs]

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any) -> None:
        """Read everything back, once."""
        if trainer.global_step == RELOAD_AFTER and self._schedules is not None:
            reload_state(trainer, pl_module, self.folder / "reload.ckpt", schedules=self._schedules)
            self._schedules = None


def curves(run_folder: Path) -> Curves:
    """The training loss that rank 0 logs after every step, and the validation loss of every epoch."""
    with (run_folder / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows if row.get(key)] for key in ("train/loss_step", "val/loss")}


def trained(title: str, flags: list[str], *, num_ranks: int, mutation: Mutation | None = None) -> Curves | None:
    """The curves of one run; None if the trainer itself stopped it."""
    folder = Path(tempfile.mkdtemp(prefix="gallery-"))
    callbacks = ["--trainer.callbacks+=gallery.Reload", f"--trainer.callbacks.folder={folder}"]
    callbacks += [] if mutation is None else planting_flags(mutation, folder)
    words = [*SETTINGS, *flags, *callbacks, f"--run_dir={folder / 'run'}"]
    outcome = run("fit", *words, folder=folder, num_ranks=num_ranks)
    found = curves(folder / "run") if outcome.status == 0 else None
    print(f"{outcome.seconds:4.0f} s  {title}{'' if found else ': ' + outcome.last_words}", flush=True)
    shutil.rmtree(folder)
    return found


def main(output: Path, flags: list[str]) -> None:
    """Train everything, two runs at a time."""
    os.environ["PYTHONPATH"] = on_python_path(Path(__file__).parent)
    record: dict[str, Any] = about() | {"settings": SETTINGS, "epochs": EPOCHS, "seeds": SEEDS}
    with ThreadPoolExecutor(2) as pool:

        def start(
            mode: str, devices: int, more: tuple[str, ...], what: str, mutation: Mutation | None = None
        ) -> Future[Curves | None]:
            chosen = sized_modes(devices)[mode]
            words = [*flags, *chosen.flags, *more]
            return pool.submit(trained, f"{mode}, {what}", words, num_ranks=chosen.num_ranks, mutation=mutation)

        of_seeds = [
            start("ddp", 2, (f"--seed_everything={seed}", f"--data.seed={seed}"), f"seed {seed}")
            for seed in range(SEEDS)
        ]
        kinds = dict.fromkeys((it.mode, it.devices, it.args) for it in OF_MODES)
        without = {kind: start(*kind, "no mistake") for kind in kinds}
        planted = {it.name: start(it.mode, it.devices, it.args, it.name, it) for it in OF_MODES}
        rows = [
            {"mutation": it.name, "imitates": it.imitates, "mode": it.mode}
            | {"without": without[it.mode, it.devices, it.args].result(), "with": planted[it.name].result()}
            for it in OF_MODES
        ]
        record["of_seeds"] = [found.result() for found in of_seeds]
    output.write_text(json.dumps(record | {"rows": rows}) + "\n")


@torch.no_grad()
def reload_state(
    trainer: L.Trainer, pl_module: L.LightningModule, path: Path, *, schedules: Sequence[dict[str, Any]]
) -> None:
    """Save a checkpoint, wipe weights, optimizer and schedule, and restore them as Lightning does on resume.

    `schedules` is how the learning rates' schedules began.
    """
    trainer.save_checkpoint(path)
    for tensor in (*pl_module.parameters(), *pl_module.buffers()):
        tensor.zero_()
    for optimizer in trainer.optimizers:
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    for config, beginning in zip(trainer.lr_scheduler_configs, schedules, strict=True):
        numbers = {name: value for name, value in beginning.items() if isinstance(value, int | float)}
        vars(config.scheduler).update(numbers)  # past `load_state_dict`, which may be what is wrong
    checkpoint = trainer.strategy.load_checkpoint(path, weights_only=True)
    pl_module.on_load_checkpoint(checkpoint)
    trainer.strategy.load_model_state_dict(checkpoint, strict=True)
    trainer.strategy.load_optimizer_state_dict(checkpoint)
    for config, state in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(state)
    trainer.strategy.barrier()
    if trainer.is_global_zero:
        path.unlink()


def final(found: Curves) -> dict[str, float]:
    """Training loss, a mean over the last epoch, and the last validation loss."""
    steps = found["train/loss_step"]
    return {"training": statistics.fmean(steps[-len(steps) // EPOCHS :]), "validation": found["val/loss"][-1]}


def spread(of_seeds: list[Curves]) -> dict[str, float]:
    """By less than this two runs differ that differ in their seed alone, in 95 of 100 cases."""
    of_all = [final(found) for found in of_seeds]
    return {key: T_95 * math.sqrt(2) * statistics.stdev(found[key] for found in of_all) for key in of_all[0]}


def is_seen(row: dict[str, Any], noise: dict[str, float]) -> bool:
    """Whether a curve differs from the one without the mistake by more than another seed's would."""
    if row["with"] is None:
        return True
    wrong, right = final(row["with"]), final(row["without"])
    return any(not abs(wrong[key] - right[key]) <= noise[key] for key in right)


def in_words(row: dict[str, Any], noise: dict[str, float]) -> str:
    """What the curves show."""
    if row["with"] is None:
        return "the trainer stops the run"
    wrong, right = final(row["with"]), final(row["without"])
    differences = ", ".join(f"{key} {wrong[key] - right[key]:+.3f}" for key in right)
    return f"**another curve**: {differences}" if is_seen(row, noise) else f"nothing: {differences}"


def smooth(losses: list[float], width: int = 10) -> list[float]:
    """The mean of each step and those before it, `width` at most; nan and inf stay where they are."""
    return [statistics.fmean(losses[max(0, i + 1 - width) : i + 1]) for i in range(len(losses))]


def drawn(path: Path) -> Figure:
    """A panel for each mistake: the training loss without it and with it."""
    record = json.loads(path.read_text())
    noise, rows = spread(record["of_seeds"]), record["rows"]
    figure = Figure(figsize=(13, 1.55 * math.ceil(len(rows) / COLUMNS)), layout="constrained")
    panels = figure.subplots(math.ceil(len(rows) / COLUMNS), COLUMNS, sharex=True, sharey=True).flat
    for panel, row in zip(panels, rows, strict=False):
        panel.plot(smooth(row["without"]["train/loss_step"]), color="0.7", linewidth=3)
        if row["with"] is not None:
            panel.plot(smooth(row["with"]["train/loss_step"]), color=RED, linewidth=1)
        is_hidden = not is_seen(row, noise)
        panel.set_title(f"{row['mutation']}\n{row['mode']}", fontsize=8, color="black" if is_hidden else RED)
        panel.set_ylim(1.4, 2.8)
        panel.tick_params(labelsize=7)
        panel.spines[["top", "right"]].set_visible(False)
    for panel in list(figure.axes)[len(rows) :]:
        panel.set_axis_off()
    figure.supxlabel("optimizer step", fontsize=9)
    figure.supylabel("training loss of rank 0, mean over 10 steps", fontsize=9)
    return figure


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Train with each planted mistake and without.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    return parser


if __name__ == "__main__":
    options, rest = parser().parse_known_args()
    with without_banners():
        main(options.output, rest)
