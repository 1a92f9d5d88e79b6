"""Where the time of a step of `fit` goes: beside a plain loop, and with one thing switched off at a time.

    python benchmarks/scripts/step_parts.py parts.json --trainer.accelerator=gpu --model.channels_last=true

The flags go to `fit`. All ways take turns in one process; the plain loop takes a process of its own, too, in which
there is no Trainer. With `--alone` each takes one of its own. Then some steps of both are recorded by torch's profiler.
"""

import argparse
import gc
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from copy import deepcopy
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch import Callback
from torch.profiler import ProfilerActivity, profile

from lit_cifar.checkpoint.sample_audit import SampleAudit
from lit_cifar.cli.main import main as command_line
from lit_cifar.tools.bench.overhead import PlainLoop
from lit_cifar.tools.terminal import about, say

_SKIPPED = 1  # rounds at the start: memory is allocated, kernels are chosen
_RECORDED = 3  # steps, by the profiler
_TURNS_OF_EPOCH = 4  # and a step behind them, which is not timed: after it an epoch ends
_TOP = 25

Switch = Callable[["Turns"], Any]  # a context in which something of `fit` is off


@contextmanager
def _without_callbacks(turns: "Turns") -> Iterator[None]:
    callbacks = turns.trainer.callbacks
    turns.trainer.callbacks = [turns]
    yield
    turns.trainer.callbacks = callbacks


@contextmanager
def _without_metrics(turns: "Turns") -> Iterator[None]:
    metrics = turns.module.train_loss, turns.module.train_acc
    for metric in metrics:
        metric.update = lambda *_: None
    yield
    for metric in metrics:
        del metric.update


@contextmanager
def _one_batch(turns: "Turns") -> Iterator[None]:
    """The first batch of the turn again and again: nothing is normalised."""
    strategy, kept = turns.trainer.strategy, []
    made = strategy.batch_to_device

    def keep(batch: Any, *args: Any, **kwargs: Any) -> Any:
        kept[:] = kept or [made(batch, *args, **kwargs)]
        return kept[0]

    strategy.batch_to_device = keep
    yield
    del strategy.batch_to_device


@contextmanager
def _without_collector(turns: "Turns") -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextmanager
def _all_off(turns: "Turns") -> Iterator[None]:
    with _without_callbacks(turns), _without_metrics(turns), _one_batch(turns):
        yield


SWITCHES: dict[str, Switch] = {
    "fit": lambda _: nullcontext(),
    "fit, no callbacks": _without_callbacks,
    "fit, no metrics": _without_metrics,
    "fit, one batch": _one_batch,
    "fit, no garbage collection": _without_collector,
    "fit, all of these off": _all_off,
}
PLAIN = "plain loop"


class DoneError(Exception):
    """All turns are taken."""


class Turns(Callback):
    """Lets each way in `ways` take `steps` steps, round after round, and writes to `file` what each took.

    Of each turn: `wall`, the milliseconds of a step when the device has done its work; `cpu`, those of this thread's
    processor time; `forward`, `backward`, `optimizer`, those in which the host was inside; `waits` and `preempted`, how
    often the thread left its processor in a step by itself and by force.
    """

    def __init__(self, file: str, *, steps: int, rounds: int, ways: list[str], record: bool) -> None:
        self.file, self.steps, self.rounds, self.ways, self.record = Path(file), steps, rounds, ways, record
        self.found: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        self.profiles: dict[str, Any] = {}
        self._undo, self._parts = ExitStack(), dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
        self._plain: PlainLoop | None = None
        self._profile: Any = None
        self._left: int | None = None  # steps, when all turns are taken

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.trainer, self.module = trainer, pl_module
        SampleAudit._prove = lambda *_, **__: None  # type: ignore[method-assign]  # it would find what is switched off
        if PLAIN in self.ways:
            self._plain = PlainLoop(deepcopy(pl_module.network), trainer, pl_module)
        self._instrument()
        trained = [way for way in self.ways if way != PLAIN]
        # The Trainer's steps, in the order in which the ways take them; the plain loop goes between two of them.
        self._queue = [way for turn in range(self.rounds) for way in (trained if turn % 2 == 0 else trained[::-1])]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % self.steps:
            return
        turn = trainer.current_epoch * _TURNS_OF_EPOCH + batch_idx // self.steps
        num_ways = len(self.found) - (self._plain is not None)
        if batch_idx:
            self._close(self._queue[turn - 1], (turn - 1) // num_ways)
        if batch_idx == _TURNS_OF_EPOCH * self.steps and turn < len(self._queue):
            return
        if turn >= len(self._queue):
            if self._left is None:
                self._left = _RECORDED if self.record else 1
                if self.record:
                    self._record_plain()
                    self._profile = self._profiler().__enter__()
            return
        if self._plain is not None and turn % num_ways == 0:
            self._open()
            self._plain.run(self.steps)
            self._close(PLAIN, turn // num_ways)
        self._open(SWITCHES[self._queue[turn]](self))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._left is None:
            return
        self._left -= 1
        if self._left == 0:
            if self._profile is not None:
                self._end_profile("fit")
            self.write()
            raise DoneError  # a training that was tampered with is not to be saved

    def alone(self) -> None:
        """The plain loop in a process without a Trainer."""
        assert self._plain is not None
        self._instrument()
        for turn in range(self.rounds):
            self._open()
            self._plain.run(self.steps)
            self._close(PLAIN, turn)
        if self.record:
            self._record_plain()
        self.write()

    def write(self) -> None:
        self.file.write_text(json.dumps({"turns": self.found, "profiles": self.profiles}))

    def _instrument(self) -> None:
        """Read the clock around forward, backward and the optimizer's step of both loops alike."""
        kind, add = type(self.module.network), self._timed
        if not self.module.compiles:  # the compiler would see the clock
            kind.forward = add("forward", kind.forward)
        torch.Tensor.backward = add("backward", torch.Tensor.backward)  # type: ignore[method-assign]
        trained = self.trainer.optimizers if self.trainer else []
        for optimizer in [*trained, *([self._plain.optimizer] if self._plain else [])]:
            optimizer.step = add("optimizer", optimizer.step)

    def _timed(self, part: str, call: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            before, start = sum(self._parts.values()), perf_counter()
            try:
                return call(*args, **kwargs)
            finally:  # the Trainer's optimizer step has the other two within it
                inside = sum(self._parts.values()) - before
                self._parts[part] += perf_counter() - start - inside

        timed._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
        return timed

    def _open(self, switch: Any = None) -> None:
        if switch is not None:
            self._undo.enter_context(switch)
        _finish()
        self._parts.update(dict.fromkeys(self._parts, 0.0))
        self._since = perf_counter(), thread_time(), *_switched()

    def _close(self, way: str, turn: int) -> None:
        issued = perf_counter()
        _finish()
        (start, cpu, waits, preempted), now = self._since, _switched()
        self._undo.close()
        if turn < _SKIPPED:
            return
        found = {name: 1e3 * seconds for name, seconds in self._parts.items()}
        found |= {
            "wall": 1e3 * (perf_counter() - start),
            "issued": 1e3 * (issued - start),
            "cpu": 1e3 * (thread_time() - cpu),
        }
        found |= {"waits": now[0] - waits, "preempted": now[1] - preempted}
        self.found[way].append({name: value / self.steps for name, value in found.items()})

    def _profiler(self) -> Any:
        _finish()
        on_gpu = torch.cuda.is_available()
        return profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])])

    def _record_plain(self) -> None:
        if self._plain is not None:
            self._profile = self._profiler().__enter__()
            self._plain.run(_RECORDED)
            self._end_profile(PLAIN)

    def _end_profile(self, way: str) -> None:
        _finish()
        self._profile.__exit__(None, None, None)
        self.profiles[way] = _summary(self._profile)
        self._profile.export_chrome_trace(str(self.file.with_suffix(f".{way.split()[0]}.json.gz")))
        self._profile = None


def _summary(recorded: Any) -> dict[str, Any]:
    """Per step: kernels and their time, and the operators and calls that took the host the longest."""
    events = recorded.key_averages()
    device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    host = sorted(events, key=lambda event: -event.self_cpu_time_total)[:_TOP]
    kernels = sorted(device, key=lambda event: -event.self_device_time_total)[:_TOP]
    return {
        "kernels": sum(event.count for event in device) / _RECORDED,
        "kernels_ms": sum(event.self_device_time_total for event in device) / 1e3 / _RECORDED,
        "by_host": [[e.key, e.count / _RECORDED, e.self_cpu_time_total / 1e3 / _RECORDED] for e in host],
        "by_kernel": [[e.key[:120], e.count / _RECORDED, e.self_device_time_total / 1e3 / _RECORDED] for e in kernels],
    }


def _finish() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _switched() -> tuple[int, int]:
    lines = dict(
        line.split(":\t") for line in Path("/proc/thread-self/status").read_text().splitlines() if "ctxt" in line
    )
    return int(lines["voluntary_ctxt_switches"]), int(lines["nonvoluntary_ctxt_switches"])


def train(file: Path, flags: list[str], *, ways: list[str], steps: int, rounds: int, record: bool, batch: int) -> None:
    """`fit` with `Turns`."""
    import step_parts  # the command line imports this file once more, by its name

    num_steps = steps * _TURNS_OF_EPOCH + 1
    last = ["--last_checkpoint.every_n_epochs=0", "--figures.every_n_epochs=0"]
    with tempfile.TemporaryDirectory(prefix="step-parts-") as folder:
        options = {
            "file": file,
            "steps": steps,
            "rounds": rounds,
            "ways": json.dumps(ways),
            "record": str(record).lower(),
        }
        words = [
            *last,
            "--trainer.max_epochs=1000",
            f"--trainer.log_every_n_steps={steps}",
            "--trainer.enable_progress_bar=false",
        ]
        words += ["--data.dataset=synthetic", "--data.val_size=0", f"--data.batch_size={batch}", "--trainer.devices=1"]
        words += [f"--data.num_train={batch * num_steps}", "--trainer.callbacks+=step_parts.Turns"]
        words += [f"--trainer.callbacks.{name}={value}" for name, value in options.items()]
        with suppress(step_parts.DoneError):
            command_line(["fit", *words, *flags, f"--run_dir={folder}/run"])


def plain_alone(file: Path, flags: list[str], *, steps: int, rounds: int, record: bool, batch: int) -> None:
    """The plain loop in a process without a Trainer, from the same flags."""
    from lightning.pytorch.plugins import MixedPrecision

    from lit_cifar.data import CIFAR10DataModule
    from lit_cifar.task.module import LitResNet

    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cudnn.benchmark = given.get("trainer.benchmark") == "true"
    model = {name.removeprefix("model."): value for name, value in given.items() if name.startswith("model.")}
    compiled = model.get("compile", "false")
    module = LitResNet(
        model.get("arch", "resnet34"),  # type: ignore[arg-type]
        stem=model.get("stem"),  # type: ignore[arg-type]
        channels_last=model.get("channels_last") == "true",
        compile="cuda_graphs" if compiled == "cuda_graphs" else compiled == "true",
    ).to(device)
    data = CIFAR10DataModule(
        dataset="synthetic", num_train=batch * (steps * _TURNS_OF_EPOCH + 1), val_size=0, batch_size=batch
    )
    data.prepare_data()
    data.setup("fit")
    data.sets["train"] = data.sets["train"].to(device)
    bf16 = given.get("trainer.precision") == "bf16-mixed"
    precision = MixedPrecision("bf16-mixed", device.type) if bf16 else SimpleNamespace(forward_context=nullcontext)
    turns = Turns(str(file), steps=steps, rounds=rounds, ways=[PLAIN], record=record)
    turns.trainer, turns.module = None, module
    trainer = SimpleNamespace(precision_plugin=precision, log_every_n_steps=steps, datamodule=data)
    turns._plain = PlainLoop(module.network, trainer, module)
    turns.alone()


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """In Markdown: medians over the turns, and the smallest and largest step."""
    columns = ("wall", "issued", "cpu", "forward", "backward", "optimizer", "waits", "preempted")
    lines = ["| way | " + " | ".join(columns) + " | least to most | n |", "|---" * (len(columns) + 3) + "|"]
    for way, turns in found.items():
        if turns:
            cells = [f"{median(turn[name] for turn in turns):.2f}" for name in columns]
            walls = sorted(turn["wall"] for turn in turns)
            lines.append(f"| {way} | {' | '.join(cells)} | {walls[0]:.2f} to {walls[-1]:.2f} | {len(turns)} |")
    return "\n".join(lines)


def parser() -> argparse.ArgumentParser:
    """The flags that it does not know go to `fit`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--ways", type=json.loads, default=[*SWITCHES, PLAIN], help="a list in JSON")
    parser.add_argument("--alone", action="store_true", help="the plain loop in a process without a Trainer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--record", action="store_true", help="also record some steps by torch's profiler")
    return parser


def main() -> None:
    options, flags = parser().parse_known_args()
    file = options.output.absolute()
    sizes = {"steps": options.steps, "rounds": options.rounds, "batch": options.batch, "record": options.record}
    if options.alone:
        plain_alone(file, flags, **sizes)
    else:
        train(file, flags, ways=options.ways, **sizes)
    content = json.loads(file.read_text())
    file.write_text(json.dumps(about() | {"flags": flags, **sizes, **content}, indent=1) + "\n")
    say(table(content["turns"]))
    for way, recorded in content["profiles"].items():
        say(f"{way}: {recorded['kernels']:.0f} kernels, {recorded['kernels_ms']:.2f} ms")


if __name__ == "__main__":
    main()
