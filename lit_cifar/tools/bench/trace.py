"""`python -m lit_cifar bench trace`: one training step of all ranks on one clock, its kinds of work, and a picture."""

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from os import sched_getaffinity
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure

from lit_cifar.errors import ConfigError
from lit_cifar.tools import terminal
from lit_cifar.tools.bench import fit
from lit_cifar.tools.bench.step_trace import NUM_STEPS, STAGE, STEP
from lit_cifar.tools.modes import SizedMode, sized_modes

Interval = tuple[float, float]  # start and end
# An event of a Chrome trace ("Trace Event Format", Google), with "ts" and "dur" in microseconds.
Event = dict[str, Any]

_DESCRIPTION = """\
Train a few steps in a mode, and record one: a Chrome trace of all ranks (trace.json, for https://ui.perfetto.dev), a
picture (trace.png), and where the time goes (summary.json, and the table that is printed).
Every other argument is passed on to `fit`, e.g. --model.stem=strided, --trainer.strategy.num_microbatches=8.
Without --config the network is ResNet34, on synthetic images."""
_SYNTHETIC = ("--data.dataset=synthetic", "--data.num_train=4096", "--data.val_size=0")
_OWNED = ("trainer.strategy", "trainer.devices", "trainer.max_steps", "trainer.max_epochs", "run_dir")
_LEFT_OUT = ("--trainer.enable_progress_bar=false", "--trainer.num_sanity_val_steps=0", "--figures.every_n_epochs=0")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MESSAGES = ("gloo:send", "gloo:recv")  # the asking thread notes these; collectives have threads of their own


def main(args: list[str]) -> int:
    options, rest = trace_parser().parse_known_args(args)
    known = sized_modes(options.devices)
    if options.mode not in known:
        problem = f"there is no mode {options.mode!r} on {options.devices} devices"
        raise ConfigError(problem, remedy=f"pass --mode with one of {', '.join(known)}")
    terminal.refuse_owned(rest, _OWNED, command="bench trace")
    mode = known[options.mode]
    out = terminal.empty_folder(options.output)
    record = terminal.about() | {"mode": mode.name, "devices": mode.devices}
    terminal.exit_orderly_when_terminated()
    with tempfile.TemporaryDirectory(prefix="lit_cifar-trace-") as folder:
        _train(mode, rest, Path(folder))
        records = [json.loads(path.read_text()) for path in Path(folder).glob("rank*.json")]
    ranks = on_one_clock(sorted(records, key=lambda record: int(record["rank"])))
    _print(ranks)
    trace, picture, summary = (out / name for name in ("trace.json", "trace.png", "summary.json"))
    trace.write_text(json.dumps(chrome_trace(ranks)))
    draw(ranks, title=f"one training step, {mode.name} on {mode.devices} devices").savefig(picture, dpi=150)
    facts = [{"rank": rank.rank, "plain_ms": rank.plain_ms, "ms": rank.shares_ms} for rank in ranks]
    terminal.write_json(summary, record | {"ranks": facts})
    terminal.say(f"wrote {trace} for https://ui.perfetto.dev, {picture} and {summary}")
    return 0


def trace_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("bench trace", description=_DESCRIPTION)
    parser.add_argument("--mode", default="ddp", metavar="NAME", help="A mode as `verify` calls it (default: ddp).")
    parser.add_argument("--devices", type=int, default=2, metavar="N", help="Devices of the mode (default: 2).")
    parser.add_argument("--output", required=True, metavar="FOLDER", help="Where to write; it must be empty.")
    return parser


def _train(mode: SizedMode, flags: list[str], folder: Path) -> None:
    # The user's sizes of a mode replace its own.
    sizes = [flag for flag in flags if flag.startswith("--trainer.strategy.")]
    others = [flag for flag in flags if flag not in sizes]
    asked = [*(() if terminal.names_config(flags) else _SYNTHETIC), *others, *mode.flags, *sizes, *_LEFT_OUT]
    if torch.cuda.device_count() < mode.devices and not any("--trainer.accelerator" in flag for flag in flags):
        asked.append("--trainer.accelerator=cpu")
    asked += [f"--trainer.max_steps={NUM_STEPS}", "--trainer.max_epochs=-1", f"--run_dir={folder / 'run'}"]
    asked += ["--trainer.callbacks+=lit_cifar.tools.bench.step_trace.StepTrace", f"--trainer.callbacks.folder={folder}"]
    terminal.say(f"training {NUM_STEPS} steps in the mode {mode.name}, of which the last is recorded")
    fit(asked, folder=folder, threads=max(1, len(sched_getaffinity(0)) // mode.num_processes), num_ranks=mode.num_ranks)


def _print(ranks: Sequence["RankStep"]) -> None:
    parts = ("compute", "compute and communication", "waiting", "host", "the step", "not recorded")
    times = terminal.table("Time of the step, in ms and as a share", numbers=("rank", *parts))
    for rank in ranks:
        step = sum(rank.shares_ms.values())
        shares = (f"{part:,.1f}  {part / step:4.0%}" for part in rank.shares_ms.values())
        times.add_row(str(rank.rank), *shares, f"{step:,.1f}", f"{rank.plain_ms:,.1f}")
    terminal.console().print(times)


@dataclass(kw_only=True)
class RankStep:
    """A rank's work in the step; times are in microseconds since the first rank began its step."""

    rank: int
    start: float
    end: float
    events: list[Event]  # events that began within the step; "pid" is the rank
    plain_ms: float = 0.0  # duration of a step that was not recorded

    @cached_property
    def compute(self) -> list[Interval]:
        """Times of computation: of kernels, or of torch's operators where there are none.

        The operators with which a collective copies its messages belong to the collective.
        """
        if self._on_gpu:
            return self._within(event for event in self._on_gpu if not _is_communication(event))
        senders = {event["tid"] for event in self.events if _is_communication(event) and event["name"] not in _MESSAGES}
        found = (event for event in self.events if event["name"].startswith("aten::") and event["tid"] not in senders)
        return self._within(found)

    @cached_property
    def communication(self) -> list[Interval]:
        """Times of messages from or to other ranks or devices."""
        return self._within(event for event in self._on_gpu or self.events if _is_communication(event))

    @property
    def shares_ms(self) -> dict[str, float]:
        """The parts of the step's time; together they are the whole step."""
        of = (self.compute, self.communication, union([*self.compute, *self.communication]), [(self.start, self.end)])
        compute, communication, either, step = (sum(end - start for start, end in each) / 1e3 for each in of)
        overlapped = max(0.0, compute + communication - either)  # rounding could make it negative
        return {
            "compute": compute - overlapped,
            "overlapped": overlapped,
            "waiting": communication - overlapped,
            "host": step - either,
        }

    @property
    def _on_gpu(self) -> list[Event]:
        return [event for event in self.events if event.get("cat") in _ON_GPU]

    def _within(self, events: Iterable[Event]) -> list[Interval]:
        return union((event["ts"], min(event["ts"] + event["dur"], self.end)) for event in events)


def _is_communication(event: Event) -> bool:
    name = str(event["name"])
    between_gpus = event.get("cat") == "gpu_memcpy" and "PtoP" in name
    return name.startswith(("gloo:", "nccl")) or between_gpus


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The points of `intervals` as disjoint intervals, in order."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def on_one_clock(records: Sequence[dict[str, Any]]) -> list[RankStep]:
    """The records of all ranks, whose times are those of the machine's clock, since the first rank's step began."""
    # A GPU has a copy of the event, from its first kernel to its last.
    steps = [
        next(e for e in record["events"] if e["name"] == STEP and e.get("cat") == "user_annotation")
        for record in records
    ]
    origin = min(step["ts"] for step in steps)
    found = []
    for record, step in zip(records, steps, strict=True):
        start, end = step["ts"] - origin, step["ts"] - origin + step["dur"]
        moved = (event | {"ts": event["ts"] - origin, "pid": record["rank"]} for event in record["events"])
        events = [event for event in moved if start <= event["ts"] < end]
        found.append(RankStep(**record | {"start": start, "end": end, "events": events}))
    return found


def chrome_trace(ranks: Sequence[RankStep]) -> dict[str, Any]:
    """A process for each rank, with the rows of its threads, GPU streams and stages."""
    names = [
        {"ph": "M", "name": "process_name", "pid": rank.rank, "args": {"name": f"rank {rank.rank}"}} for rank in ranks
    ]
    return {"displayTimeUnit": "ms", "traceEvents": [*names, *(event for rank in ranks for event in rank.events)]}


def draw(ranks: Sequence[RankStep], *, title: str) -> Figure:
    """A row for each rank: compute above, communication below, its shares of the step on the right.

    Stages are named by their microbatches.
    """
    figure = Figure(figsize=(11, 1.6 + 1.0 * len(ranks)), layout="constrained")
    axes = figure.subplots()
    shortest = max(rank.end for rank in ranks) / 60
    for row, rank in enumerate(ranks):
        axes.broken_barh(_in_ms([(rank.start, rank.end)]), (row - 0.36, 0.72), facecolor="none", edgecolor="#999999")
        above = axes.broken_barh(_in_ms(rank.compute), (row - 0.36, 0.36), color="#2f6db5", linewidth=0)
        below = axes.broken_barh(_in_ms(rank.communication), (row, 0.36), color="#d98c1f", linewidth=0)
        stages = [event for event in rank.events if event.get("cat") == STAGE]
        spans = [(event["ts"], event["ts"] + event["dur"]) for event in stages]
        axes.broken_barh(_in_ms(spans), (row - 0.48, 0.1), color="#555555", edgecolor="white")
        for event, span in zip(stages, spans, strict=True):
            if event["dur"] >= shortest:
                axes.text(sum(span) / 2e3, row - 0.5, event["name"], ha="center", va="bottom", fontsize=8)
        step = (rank.end - rank.start) / 1e3
        words = "\n".join(f"{name} {part / step:.0%}" for name, part in rank.shares_ms.items())
        axes.text(1.01, row, words, transform=axes.get_yaxis_transform(), va="center", fontsize=8)
    axes.set_yticks(range(len(ranks)), [f"rank {rank.rank}" for rank in ranks])
    axes.set_ylim(len(ranks) - 0.5, -0.65)
    axes.set_xlabel("milliseconds since the first rank began the step")
    axes.set_title(title, fontsize=10, loc="left")
    axes.spines[["top", "right", "left"]].set_visible(False)
    names = ["compute", "communication; where nothing stands above it, waiting"]
    figure.legend([above, below], names, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return figure


def _in_ms(intervals: Iterable[Interval]) -> list[tuple[float, float]]:
    """Start and width of each interval, in milliseconds."""
    return [(start / 1e3, (end - start) / 1e3) for start, end in intervals]
