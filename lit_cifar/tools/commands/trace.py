"""`python -m lit_cifar bench trace`: one training step, its time and its memory."""

import argparse
import json
import tempfile
from dataclasses import asdict
from os import cpu_count
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table

from lit_cifar.errors import ConfigError, nearest
from lit_cifar.strategies.modes import Variant, variants
from lit_cifar.tools.bench import step_figure
from lit_cifar.tools.bench.step_events import RankStep, chrome_trace, read_ranks
from lit_cifar.tools.bench.step_trace import NUM_STEPS, STEP
from lit_cifar.tools.commands.terminal import (
    CommandParser,
    about,
    console,
    empty_folder,
    exit_orderly_when_terminated,
    say,
    write_json,
)
from lit_cifar.tools.verify.runs import refuse_if_invalid, run

_DESCRIPTION = """\
Train a few steps in a mode, and record one: a Chrome trace of all ranks (trace.json, for https://ui.perfetto.dev), a
picture (trace.png), and where time and memory go (summary.json, and the tables that are printed).
Every other argument is passed on to `fit`, e.g. --model.stem=strided, --trainer.strategy.num_microbatches=8.
Without --config the network is ResNet34, on synthetic images."""
_SYNTHETIC = ("--data.dataset=synthetic", "--data.num_train=4096", "--data.val_size=0")
_OWNED = ("--trainer.strategy", "--trainer.devices", "--trainer.max_steps", "--trainer.max_epochs", "--run_dir")
_LEFT_OUT = ("--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--figures.every_n_epochs=0")


def main(args: list[str]) -> int:
    """Record, print and write; return 0.

    Raises:
        ConfigError: A mode that does not exist, a folder that is not empty, or flags that `fit` refuses.
        RuntimeError: The run failed.
    """
    options, rest = trace_parser().parse_known_args(args)
    mode = _mode(options.mode, devices=options.devices)
    if owned := [arg for arg in rest if arg.split("=")[0] in _OWNED]:
        name = owned[0].split("=")[0]
        raise ConfigError(f"bench trace sets {name} itself", remedy="leave it out; see --mode and --devices")
    out = empty_folder(options.out, option="--out")
    record = about() | {"mode": mode.name, "devices": mode.devices}
    exit_orderly_when_terminated()
    with tempfile.TemporaryDirectory(prefix="lit_cifar-trace-") as name:
        folder = Path(name)
        _train(mode, rest, folder)
        ranks = read_ranks(folder, step=STEP)
        facts = [json.loads((folder / f"facts{rank.rank}.json").read_text()) for rank in ranks]
    console().print(_time_table(ranks, facts))
    console().print(_memory_table(facts))
    _write(out, record, ranks, facts)
    return 0


def _train(mode: Variant, flags: list[str], folder: Path) -> None:
    own = any(flag.split("=")[0] in ("--config", "-c") for flag in flags)
    # The user's sizes of a mode replace the ones that it comes with.
    sizes = [flag for flag in flags if flag.startswith("--trainer.strategy.")]
    others = [flag for flag in flags if flag not in sizes]
    asked = [*([] if own else _SYNTHETIC), *others, *mode.flags, *sizes, *_LEFT_OUT]
    if torch.cuda.device_count() < mode.devices and not any("--trainer.accelerator" in flag for flag in flags):
        asked.append("--trainer.accelerator=cpu")
    asked += [f"--trainer.max_steps={NUM_STEPS}", "--trainer.max_epochs=-1", f"--run_dir={folder / 'run'}"]
    asked += ["--trainer.callbacks+=lit_cifar.tools.bench.step_trace.StepTrace", f"--trainer.callbacks.folder={folder}"]
    say(f"training {NUM_STEPS} steps in the mode {mode.name}, of which the last is recorded")
    threads = max(1, (cpu_count() or 1) // mode.num_processes)
    outcome = run("fit", *asked, folder=folder, threads=threads, num_ranks=mode.num_ranks)
    if outcome.status == 2:
        refuse_if_invalid(outcome)
    if outcome.status != 0:
        raise RuntimeError(f"the training failed: {outcome.last_words}")


def _mode(name: str, *, devices: int) -> Variant:
    if devices < 2 and name != "single":
        raise ConfigError(f"--devices={devices} leaves nothing to divide", remedy="pass --devices 2, or --mode single")
    known = variants(devices)
    if name not in known:
        guess = nearest(name, known)
        remedy = f"did you mean --mode {guess}? " if guess else ""
        remedy += f"The modes are {', '.join(known)}"
        raise ConfigError(f"there is no mode {name!r} on {devices} devices", remedy=remedy)
    return known[name]


# What is shown -------------------------------------------------------------------------------------------------------


def _time_table(ranks: list[RankStep], facts: list[dict[str, Any]]) -> Table:
    table = _table("Time of the step, in ms and as a share")
    for title in ("rank", "compute", "compute and communication", "waiting", "host", "the step", "not recorded"):
        table.add_column(title, justify="right")
    for rank, fact in zip(ranks, facts, strict=True):
        parts = asdict(rank.shares).values()
        cells = [f"{part:,.1f}  {part / rank.shares.step:4.0%}" for part in parts]
        table.add_row(str(rank.rank), *cells, f"{rank.shares.step:,.1f}", f"{fact['plain_ms']:,.1f}")
    return table


def _memory_table(facts: list[dict[str, Any]]) -> Table:
    table = _table("Memory of a process, in MiB")
    for title in ("rank", *facts[0]["memory_bytes"]):
        table.add_column(title, justify="right")
    for fact in facts:
        table.add_row(str(fact["rank"]), *(f"{num_bytes / 2**20:,.2f}" for num_bytes in fact["memory_bytes"].values()))
    return table


def _table(title: str) -> Table:
    return Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title_justify="left")


def _write(out: Path, record: dict[str, Any], ranks: list[RankStep], facts: list[dict[str, Any]]) -> None:
    title = f"one training step, {record['mode']} on {record['devices']} devices"
    step_figure.draw(ranks, title=title).savefig(out / "trace.png", dpi=150)
    (out / "trace.json").write_text(json.dumps(chrome_trace(ranks)))
    rows = [
        {name: fact[name] for name in ("rank", "plain_ms", "memory_bytes")} | {"ms": asdict(rank.shares)}
        for rank, fact in zip(ranks, facts, strict=True)
    ]
    write_json(out / "summary.json", record | {"ranks": rows})
    say(f"wrote {out / 'trace.json'} for https://ui.perfetto.dev, {out / 'trace.png'} and {out / 'summary.json'}")


def trace_parser() -> argparse.ArgumentParser:
    """The command's options; all others are `fit`'s."""
    parser = CommandParser("bench trace", description=_DESCRIPTION)
    parser.add_argument("--mode", default="ddp", metavar="NAME", help="A mode as `verify` calls it (default: ddp).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of the mode (default: 2).")
    parser.add_argument("--out", required=True, metavar="FOLDER", help="Where to write; it must be empty.")
    return parser
