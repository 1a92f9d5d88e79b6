"""What the processes agree on between two steps: to stop where the loss is no number, and how often to ask."""

import logging
import signal
import time
from collections import Counter
from contextlib import nullcontext
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from commands import TINY, callback, graded, last_checkpoint, launch, mode_flags, run_here
from counting import Operators
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from recorder import global_steps

from lit_cifar.checkpoint.callbacks import StepBoundary
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.errors import Stopped
from lit_cifar.launch.signals import signals_to_spawned, stop_signals
from lit_cifar.reporting.run_report import RunReport

SETTINGS = [*TINY, "--trainer.num_sanity_val_steps=0", "--trainer.max_epochs=2"]


@pytest.mark.parametrize("step", [0, 2, 4])
def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(step: int, tmp_path: Path) -> None:
    """Step 4 is the last of its epoch: it is not validated and called the best."""
    run = tmp_path / "run"
    flags = ["--last_checkpoint.every_n_steps=1", *callback("stopping.NotANumber", step=step)]
    result = run_here("fit", *SETTINGS, *flags, f"--run_dir={run}", check=False)
    assert result.status == 1
    assert f"rank 0 is not finite in optimizer step {step} (counted from 0)" in result.stderr
    assert len(result.stderr.splitlines()) <= 5
    if step == 0:
        assert "no step had been taken before: look at the images and labels" in result.stderr
        assert not (run / "checkpoints").exists()
        return
    assert "the optimisation has diverged: try a lower --model.optimizer.lr" in result.stderr
    checkpoint = last_checkpoint(run)
    assert checkpoint["global_step"] == step
    assert all(tensor.isfinite().all() for tensor in checkpoint["state_dict"].values())


@pytest.mark.parametrize(
    ("mode", "rank", "num_samples"),
    graded(("ddp", 1, 8), slow=[("pp", 0, 16)], exhaustive=[("tp", 0, 16), ("fsdp2", 0, 8)]),
)
def test_all_processes_stop_and_name_rank_and_samples(mode: str, rank: int, num_samples: int, tmp_path: Path) -> None:
    (tmp_path / "ids").mkdir()
    flags = [*mode_flags(mode), f"--run_dir={tmp_path / 'run'}"]
    saving = ["--last_checkpoint.every_n_steps=1"]  # with which the processes agree at every step
    flags += [] if mode == "ddp" else saving
    flags += callback("recorder.RecordIds", folder=tmp_path / "ids")
    flags += callback("stopping.NotANumber", step=7, rank=rank)
    result = launch("fit", *SETTINGS, *flags, check=False, ranks=2)
    assert result.status == 1
    line = next(line for line in result.stderr.splitlines() if "not finite" in line)
    assert f"rank {rank} is not finite in optimizer step 7" in line
    named = {int(word) for word in line.partition("samples: ")[2].split(", ")}
    of_step = next(set(ids) for _, step, ids in global_steps(tmp_path / "ids") if step == 7)
    assert len(named) == num_samples
    assert named <= of_step
    assert mode == "ddp" or last_checkpoint(tmp_path / "run")["global_step"] == 7


@pytest.mark.parametrize("step", [3, 5, 10])
def test_weights_that_are_no_numbers_are_not_saved(step: int, tmp_path: Path) -> None:
    """The loss of the step that ruins them is still finite; 5 ends an epoch with validation, 10 one without."""
    run = tmp_path / "run"
    flags = ["--last_checkpoint.every_n_steps=1", f"--trainer.limit_val_batches={int(step < 10)}"]
    flags += callback("stopping.SpoilWeights", step=step)
    result = run_here("fit", *SETTINGS, *flags, f"--run_dir={run}", check=False)
    assert result.status == 1
    assert f"the weights are not finite after {step} optimizer steps" in result.stderr
    saved = {path.name: read_checkpoint(path)["global_step"] for path in (run / "checkpoints").iterdir()}
    assert saved == {"last.ckpt": step - 1, "previous.ckpt": step - 2}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_before_the_first_step_is_not_lost(number: signal.Signals, tmp_path: Path) -> None:
    """In the sanity check Lightning would end the run with status 0, as if it were done."""
    run = tmp_path / "run"
    asking = callback("stopping.SignalAfter", step=0, number=int(number))
    flags = [*TINY, *asking, "--last_checkpoint.every_n_steps=1"]
    before = signal.getsignal(number)
    result = run_here("fit", *flags, f"--run_dir={run}", check=False)
    assert result.status == 143
    assert f"stopped by {number.name} after 1 optimizer steps" in result.stderr
    assert last_checkpoint(run)["global_step"] == 1
    assert signal.getsignal(number) == before


def test_nohup_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGHUP in stop_signals()
    monkeypatch.setattr("signal.getsignal", lambda number: signal.SIG_IGN)
    assert signal.SIGHUP not in stop_signals()


@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start"])
def test_ctrl_c_that_ends_a_run_at_once_is_no_failure(hook: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning exits with status 1."""
    monkeypatch.setattr(RunReport, hook, Mock(side_effect=KeyboardInterrupt), raising=False)
    result = run_here("fit", *TINY, "--trainer.fast_dev_run=1", check=False)
    assert (result.status, result.stderr.splitlines()[-1]) == (130, "lit_cifar: interrupted")
    monkeypatch.setattr("lit_cifar.cli.main.CLI", Mock(side_effect=KeyboardInterrupt))
    assert run_here("fit", check=False).status == 130


BATCH: Any = SimpleNamespace(ids=torch.arange(4))


def alone(**attributes: Any) -> Any:
    """A trainer of one process."""
    strategy = SimpleNamespace(
        reduce=lambda tensor, **_: tensor,
        broadcast=lambda content, src=0: content,
        barrier=lambda _: None,
        launcher=None,
        checkpoint_io=None,
    )
    optimizers = [torch.optim.SGD([torch.ones(1)], lr=0.1)]
    ranks = {"world_size": 1, "global_rank": 0, "is_global_zero": True}
    return SimpleNamespace(**{"optimizers": optimizers, "strategy": strategy, "global_step": 3} | ranks | attributes)


class Strategy:
    """Of two processes, the other of which says `other`."""

    def __init__(self, other: list[float]) -> None:
        self.other, self.asked = torch.tensor(other, dtype=torch.float64), 0

    def reduce(self, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.asked += 1
        return torch.maximum(tensor, self.other)


@pytest.mark.parametrize(
    ("agree_every_s", "slowest_s", "expected"),
    [(1.0, 0.0, [1, 21, 41, 61, 81]), (1.0, 0.25, [1, *range(5, 98, 4)]), (0.0, 0.0, [*range(1, 100)])],
    ids=["once a second", "as the slowest process says", "at every step if wanted"],
)
def test_how_often_processes_agree(
    agree_every_s: float, slowest_s: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 100 steps of 0.05 s each."""
    now = [0.0]
    monkeypatch.setattr("lit_cifar.checkpoint.callbacks.time.monotonic", lambda: now[0])
    boundary, strategy = StepBoundary(agree_every_s=agree_every_s), Strategy([0.0, 0.0, slowest_s, -torch.inf])
    module: Any = SimpleNamespace(device=torch.device("cpu"))
    trainer = alone(callbacks=[], strategy=strategy, accumulate_grad_batches=1, global_step=0, world_size=2)
    boundary.on_train_start(trainer, module)
    asked = []
    for step in range(100):
        before = strategy.asked
        boundary.on_train_batch_start(trainer, module, None, step)
        asked += [step] * (strategy.asked - before)
        boundary.on_train_batch_end(trainer, module, {"loss": torch.tensor(1.0)}, BATCH, step)
        trainer.global_step += 1
        now[0] += 0.05
    assert asked == expected


@pytest.mark.parametrize(
    "sent",
    [
        [(signal.SIGINT, 0.0), (signal.SIGINT, 0.1), (signal.SIGINT, 2.0)],  # from the terminal and from the parent
        [(signal.SIGTERM, 0.0), (signal.SIGTERM, 0.0), (signal.SIGINT, 0.0), (signal.SIGINT, 2.0)],
        [(signal.SIGINT, 0.0), (signal.SIGTERM, 2.0), (signal.SIGINT, 0.0)],  # `ddp_spawn` hands every Ctrl-C on
    ],
)
def test_ctrl_c_asks_then_insists(sent: list[tuple[signal.Signals, float]], monkeypatch: pytest.MonkeyPatch) -> None:
    """One keystroke may arrive twice."""
    now, boundary = [100.0], StepBoundary()
    monkeypatch.setattr("lit_cifar.checkpoint.callbacks.time.monotonic", lambda: now[0])
    for number, later_s in sent[:-1]:
        now[0] += later_s
        boundary._note(number, None)
    now[0] += sent[-1][1]
    with pytest.raises(KeyboardInterrupt):
        boundary._note(sent[-1][0], None)


class Launcher(_MultiProcessingLauncher):
    """Notes what its processes are sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.procs: list[Any] = []

    def kill(self, signum: int) -> None:
        self.sent.append(signum)


def test_a_spawned_run_is_asked_and_the_next_ctrl_c_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("lit_cifar.checkpoint.callbacks.time.monotonic", lambda: now[0])
    launcher = Launcher()
    launcher.procs = [None]
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=launcher))
    torch_says = logging.getLogger("torch.multiprocessing.spawn")
    with signals_to_spawned(trainer):
        assert not torch_says.disabled
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
        assert launcher.sent == [signal.SIGTERM] * 2
        assert torch_says.disabled  # of each process that it ends
        now[0] += 2
        with pytest.raises(KeyboardInterrupt):  # which the command line says in a line, with status 130
            signal.raise_signal(signal.SIGINT)
    assert not torch_says.disabled


def test_a_signal_while_processes_are_spawned_ends_those_that_are() -> None:
    """The launcher would not reach them."""
    process = get_context("spawn").Process(target=time.sleep, args=(60,))
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(launcher=Launcher()))
    with signals_to_spawned(trainer):
        process.start()
        with pytest.raises(SystemExit) as caught:
            signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 128 + signal.SIGTERM
    process.join(5)
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.parametrize("spoiled", [(), (1.0, torch.nan), (-torch.inf,)])
def test_one_read_finds_every_bad_weight(spoiled: tuple[float, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Among large ones, whose squares are not finite, and an empty one, as a shard may be."""
    module: Any = torch.nn.ParameterList([torch.full((3,), -3e38) for _ in range(20)] + [torch.empty(0), torch.ones(4)])
    module[-1].data[: len(spoiled)] = torch.tensor(spoiled)
    with Operators() as operators, pytest.raises(Stopped) if spoiled else nullcontext():
        StepBoundary()._check_weights(alone(), module)
    assert ("the weights are not finite after 3" in capsys.readouterr().err) == bool(spoiled)
    assert spoiled or operators.waits == {"_local_scalar_dense": 1}


def test_a_step_is_noted_without_any_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    """Until the processes agree a loss only has to be kept."""
    boundary, trainer = StepBoundary(), alone(accumulate_grad_batches=1)
    losses = [torch.tensor(loss) for loss in (1.0, torch.nan, torch.inf, 2.0)]
    with Operators() as operators:
        for step, loss in enumerate(losses):
            trainer.global_step = 2**25 + step + 1  # more than a float32 tells apart
            boundary.on_train_batch_end(trainer, SimpleNamespace(), {"loss": loss}, BATCH, step)
    assert not operators.counts - Counter(detach=4)
    with pytest.raises(Stopped):
        boundary._agree(trainer)
    assert f"rank 0 is not finite in optimizer step {2**25 + 1} (counted from 0)" in capsys.readouterr().err
