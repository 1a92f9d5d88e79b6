"""`python -m lit_cifar bench trace`: one training step, its time and its memory."""

import argparse
import json
import tempfile
from collections.abc import Iterable
from os import cpu_count
from pathlib import Path

import torch

from lit_cifar.errors import ConfigError
from lit_cifar.tools.bench.step_events import RankStep, chrome_trace, draw, read_ranks
from lit_cifar.tools.bench.step_trace import NUM_STEPS
from lit_cifar.tools.commands import terminal
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.verify.runs import REFUSED, run

_DESCRIPTION = """\
Train a few steps in a mode, and record one: a Chrome trace of all ranks (trace.json, for https://ui.perfetto.dev), a
picture (trace.png), and where time and memory go (summary.json, and the tables that are printed).
Every other argument is passed on to `fit`, e.g. --model.stem=strided, --trainer.strategy.num_microbatches=8.
Without --config the network is ResNet34, on synthetic images."""
_SYNTHETIC = ("--data.dataset=synthetic", "--data.num_train=4096", "--data.val_size=0")
_OWNED = ("--trainer.strategy", "--trainer.devices", "--trainer.max_steps", "--trainer.max_epochs", "--run_dir")
_LEFT_OUT = ("--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--figures.every_n_epochs=0")


def main(args: list[str]) -> int:
    """Record, print and write; return 0."""
    options, rest = trace_parser().parse_known_args(args)
    known = sized_modes(options.devices)
    if options.mode not in known:
        problem = f"there is no mode {options.mode!r} on {options.devices} devices"
        raise ConfigError(problem, remedy=f"pass --mode with one of {', '.join(known)}")
    if owned := [name for name in (arg.split("=")[0] for arg in rest) if name in _OWNED]:
        raise ConfigError(f"bench trace sets {owned[0]} itself", remedy="leave it out; see --mode and --devices")
    mode = known[options.mode]
    out = terminal.empty_folder(options.output, option="--output")
    record = terminal.about() | {"mode": mode.name, "devices": mode.devices}
    terminal.exit_orderly_when_terminated()
    with tempfile.TemporaryDirectory(prefix="lit_cifar-trace-") as folder:
        _train(mode, rest, Path(folder))
        ranks = read_ranks(Path(folder))
    _print(ranks)
    trace, picture, summary = (out / name for name in ("trace.json", "trace.png", "summary.json"))
    trace.write_text(json.dumps(chrome_trace(ranks)))
    draw(ranks, title=f"one training step, {mode.name} on {mode.devices} devices").savefig(picture, dpi=150)
    facts = [
        {"rank": rank.rank, "plain_ms": rank.plain_ms, "memory_bytes": rank.memory_bytes, "ms": rank.shares_ms}
        for rank in ranks
    ]
    terminal.write_json(summary, record | {"ranks": facts})
    terminal.say(f"wrote {trace} for https://ui.perfetto.dev, {picture} and {summary}")
    return 0


def _train(mode: SizedMode, flags: list[str], folder: Path) -> None:
    own = any(flag.split("=")[0] in ("--config", "-c") for flag in flags)
    # The user's sizes of a mode replace the ones that it comes with.
    sizes = [flag for flag in flags if flag.startswith("--trainer.strategy.")]
    others = [flag for flag in flags if flag not in sizes]
    asked = [*([] if own else _SYNTHETIC), *others, *mode.flags, *sizes, *_LEFT_OUT]
    if torch.cuda.device_count() < mode.devices and not any("--trainer.accelerator" in flag for flag in flags):
        asked.append("--trainer.accelerator=cpu")
    asked += [f"--trainer.max_steps={NUM_STEPS}", "--trainer.max_epochs=-1", f"--run_dir={folder / 'run'}"]
    asked += ["--trainer.callbacks+=lit_cifar.tools.bench.step_trace.StepTrace", f"--trainer.callbacks.folder={folder}"]
    terminal.say(f"training {NUM_STEPS} steps in the mode {mode.name}, of which the last is recorded")
    threads = max(1, (cpu_count() or 1) // mode.num_processes)
    outcome = run("fit", *asked, folder=folder, threads=threads, num_ranks=mode.num_ranks)
    if outcome.status == REFUSED:
        raise outcome.refusal
    if outcome.status != 0:
        raise RuntimeError(f"the training failed: {outcome.last_words}")


def _print(ranks: list[RankStep]) -> None:
    parts = ("compute", "compute and communication", "waiting", "host")
    times = []
    for rank in ranks:
        step = sum(rank.shares_ms.values())
        shares = (f"{part:,.1f}  {part / step:4.0%}" for part in rank.shares_ms.values())
        times.append([*shares, f"{step:,.1f}", f"{rank.plain_ms:,.1f}"])
    memory = ([f"{num_bytes / 2**20:,.2f}" for num_bytes in rank.memory_bytes.values()] for rank in ranks)
    _print_table("Time of the step, in ms and as a share", (*parts, "the step", "not recorded"), times)
    _print_table("Memory of a process, in MiB", ranks[0].memory_bytes, memory)


def _print_table(title: str, columns: Iterable[str], cells: Iterable[list[str]]) -> None:
    found = terminal.table(title)
    for name in ("rank", *columns):
        found.add_column(name, justify="right")
    for rank, own in enumerate(cells):
        found.add_row(str(rank), *own)
    terminal.console().print(found)


def trace_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("bench trace", description=_DESCRIPTION)
    parser.add_argument("--mode", default="ddp", metavar="NAME", help="A mode as `verify` calls it (default: ddp).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of the mode (default: 2).")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="Where to write; it must be empty.")
    return parser
