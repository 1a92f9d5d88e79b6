"""A run that is stopped and resumed ends where the undisturbed one ends, bit for bit on as many processes.

In other modes `pytest -m exhaustive` has what any mode wrote in the middle of an epoch, and any resumes. Every mode
is stopped in the second of two epochs. Every mode then resumes each of the checkpoints, and must end where one device
ends that resumes the same checkpoint and normalises as the mode does; and where one device ends that was never stopped,
if both modes normalise alike. In float64, so that the bound is sharp.
"""

import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import yaml
from checkpoints import assert_same_checkpoint
from commands import (
    TINY,
    TRANSFORMS,
    callback,
    graded,
    last_checkpoint,
    launch,
    logged,
    losses,
    mode_flags,
    own_network,
    refused,
    run_here,
)
from library_fits import Watch, ends_alike, make
from lightning.pytorch.callbacks import Checkpoint, EMAWeightAveraging, LambdaCallback, Timer
from short_fits import data, short
from short_fits import fit as fit_script
from threads import on_ranks
from tiny_task import read_events
from torchmetrics import CatMetric, MaxMetric

from lit_cifar import LitResNet
from lit_cifar.checkpoint.compatibility import check_optimizer
from lit_cifar.checkpoint.exact_resume import ExactResume, SameStart, StartingPoint, _collect, _metrics
from lit_cifar.checkpoint.files import DIGESTS, weights_digest
from lit_cifar.checkpoint.format import OPTIMIZER, class_path
from lit_cifar.cli.main import CLI
from lit_cifar.data import CIFAR10DataModule, Order
from lit_cifar.errors import CheckpointError
from lit_cifar.launch.forked import EndedRun
from lit_cifar.launch.signals import Stopped
from lit_cifar.reporting.run_folder import LOCK
from lit_cifar.task.metrics import MeanLoss

# 79 images in batches of 16: four steps and a ragged one of 15 an epoch, ten steps in all.
SETTINGS = [*TINY, "--data.num_train=95", "--trainer.max_epochs=2", "--trainer.devices=1"]
SETTINGS += ["--trainer.num_sanity_val_steps=0", "--last_checkpoint.every_n_epochs=1"]
EVERY_STEP = "--last_checkpoint.every_n_steps=1"


def fit(run: Path, *flags: str, status: int = 0) -> EndedRun:
    return fit_in(0, run, *SETTINGS, *flags, status=status)


def fit_in(ranks: int, run: Path, *flags: str, status: int = 0) -> EndedRun:
    """In so many processes; in this one for 0."""
    command = ["fit", *flags, f"--run_dir={run}"]
    result = launch(*command, ranks=ranks, check=False) if ranks else run_here(*command, check=False)
    assert result.status == status, result.stderr
    return result


def refused_fit(run: Path, *flags: str) -> str:
    return refused("fit", *SETTINGS, f"--run_dir={run}", *flags)


def stop_after(step: int, *, rank: int = 0) -> list[str]:
    """Ask to stop then; as a checkpoint is due at every step, the processes agree at every step too."""
    return ["--resume=auto", *callback("stopping.SignalAfter", step=step, rank=rank)]


def metrics(run: Path) -> list[dict[str, str]]:
    """Every line of `metrics.csv`, without what the clock says."""
    rows = [{name: cell for name, cell in row.items() if "images_per_s" not in name} for row in logged(run)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def assert_same_end(run: Path, undisturbed: Path) -> None:
    """The last checkpoints have the same weights, optimizer, schedule, position and counts, and the metrics agree."""
    found, expected = map(last_checkpoint, (run, undisturbed))
    assert_same_checkpoint(found, expected, tolerance=0)
    for key in ("lr_schedulers", "position", "sample_audit", "loops"):
        assert found[key] == expected[key], key
    for key in ("metrics", "current_model_state", "averaging_state"):  # the last two of averaged weights
        torch.testing.assert_close(found.get(key), expected.get(key), rtol=0, atol=0)
    assert metrics(run) == metrics(undisturbed)
    digests, position = (run / DIGESTS).read_text(), found["position"]
    assert digests == (undisturbed / DIGESTS).read_text()
    if not position["step"]:  # it ended with an epoch
        assert digests.endswith(f"{weights_digest(found['state_dict'])}  epoch {position['epoch'] - 1}\n")


@pytest.mark.parametrize(
    ("first", "other", "differ"),
    [
        (StartingPoint("a", "ten"), StartingPoint("a", "ten"), False),
        (StartingPoint("a", "ten"), StartingPoint("b", "nine"), True),
        (StartingPoint("a", "ten"), StartingPoint(None, "nine"), True),
        (StartingPoint(None, "ten"), StartingPoint("a", "nine"), True),
    ],
)
def test_all_processes_start_alike(
    first: StartingPoint, other: StartingPoint, differ: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a network file system shows one of them an older file."""

    def meet(rank: int) -> bool:
        strategy = SimpleNamespace(barrier=dist.barrier, launcher=None)
        trainer: Any = SimpleNamespace(world_size=2, is_global_zero=rank == 0, strategy=strategy)
        try:
            SameStart(other if rank else first).setup(trainer, None, "fit")  # type: ignore[arg-type]
        except Stopped as stopped:
            return stopped.code == 2
        return False

    assert on_ranks(2, meet) == [differ] * 2
    told = capsys.readouterr().err.splitlines()
    assert [line.rpartition(": ")[2] for line in told[1:3]] == ["ten", "nine"] * differ


@short
@pytest.mark.parametrize(
    ("kind", "step", "settings"),
    [
        ("own", 1, {}),
        ("own", 2, {"limit_train_batches": 2}),  # after the last batch of the epoch, before its end
        ("own", 3, {"val_check_interval": 1, "max_steps": 4}),
        ("own", 2, {"hook": "on_train_epoch_end"}),  # where Lightning has not counted the epoch yet
        ("drawing", 1, {"accumulate_grad_batches": 2}),
        ("foreign", 1, {}),
        ("foreign", 3, {"accumulate_grad_batches": 2, "reload_dataloaders_every_n_epochs": 1}),
    ],
)
def test_a_script_resumes_with_the_next_sample(kind: str, step: int, settings: dict[str, Any], tmp_path: Path) -> None:
    """Without the command line, and with a module that is none of ours."""
    assert ends_alike(tmp_path, kind=kind, step=step, **settings)


@pytest.mark.slow
def test_a_script_resumes_on_two_processes(tmp_path: Path) -> None:
    script = Path(__file__).with_name("library_fits.py")
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr


@short
@pytest.mark.parametrize(
    ("kind", "sizes", "settings", "says"),
    [
        ("own", {"order": Order(frozen=True)}, {}, "order.frozen=false; --data.order.frozen=true would train"),
        ("foreign", {"batch_size": 32}, {}, "batch_size=16; .*batch_size=32"),  # which has fewer steps in an epoch
        ("foreign", {}, {"accumulate_grad_batches": 2}, "after 1 optimizer steps, which accumulate_grad_batches=2"),
    ],
)
def test_a_script_that_would_cut_the_epoch_otherwise_is_refused(
    kind: str, sizes: dict[str, int], settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    """Also if its data module is of another class."""
    file = tmp_path / "within.ckpt"
    fit_script(make(kind), tmp_path, callbacks=[Watch(file, 1)])
    for of in (CIFAR10DataModule, OwnData):
        again = data(**sizes)
        again.__class__ = of
        with pytest.raises(CheckpointError, match=says):
            fit_script(make(kind), tmp_path, again, resume=file, **settings)


class OwnData(CIFAR10DataModule):
    """A user's, which changes nothing."""


@short
@pytest.mark.filterwarnings("ignore:the (training before had|schedule goes on)")
@pytest.mark.parametrize(
    ("kind", "before", "after", "changed"),
    [
        ("own", CIFAR10DataModule, CIFAR10DataModule, {"seed": 1}),
        ("own", CIFAR10DataModule, CIFAR10DataModule, {"val_size": 4, "order": Order(frozen=True)}),
        *((kind, CIFAR10DataModule, OwnData, {"seed": 1}) for kind in ("own", "foreign")),
        *((kind, OwnData, CIFAR10DataModule, {"seed": 1}) for kind in ("own", "foreign")),
    ],
)
def test_a_script_does_not_validate_on_what_it_was_trained_on(
    kind: str, before: type[CIFAR10DataModule], after: type[CIFAR10DataModule], changed: dict[str, Any], tmp_path: Path
) -> None:
    """Between two epochs, where the order may be another, and when a checkpoint is validated; a test may be any."""
    file, first, again = tmp_path / "end.ckpt", data(), data(**changed)
    first.__class__, again.__class__ = before, after
    trainer = fit_script(make(kind), tmp_path, first)
    trainer.save_checkpoint(file)
    if before is after:
        trainer.test(make(kind), again, ckpt_path=file, verbose=False)
    for go_on in (
        lambda: fit_script(make(kind), tmp_path, again, resume=file, max_epochs=2),
        lambda: trainer.validate(make(kind), again, ckpt_path=file, verbose=False),
    ):
        told = pytest.raises(CheckpointError, match=r"trained on would be validated on: --data\.seed=1\n")
        with told if "seed" in changed else nullcontext():
            go_on()


@short
def test_a_script_that_hands_over_loaders_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "within.ckpt"
    trainer = fit_script(make("own"), tmp_path, callbacks=[Watch(file, 1)])
    loose = data()
    loose.setup("fit")
    with pytest.raises(CheckpointError, match="pass the data module itself"):
        trainer.fit(make("own"), loose.train_dataloader(), loose.val_dataloader(), ckpt_path=file)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    fit(run, EVERY_STEP)
    return run


@pytest.mark.parametrize("steps", [(1, 5), pytest.param((3, 6, 9), marks=pytest.mark.exhaustive)])
def test_a_stopped_run_goes_on_with_the_next_sample(steps: tuple[int, ...], undisturbed: Path, tmp_path: Path) -> None:
    """Step 5 ends the first epoch. Before, it dies without a checkpoint, and begins again."""
    run = tmp_path / "run"
    with pytest.raises(RuntimeError, match="fails at step 3"):
        fit(run, "--resume=auto", *callback("recorder.FailOn", rank=0, step=3))
    for step in steps:
        stopped = fit(run, EVERY_STEP, *stop_after(step), status=143)
        assert f"stopped by SIGTERM after {step} optimizer steps" in stopped.stderr
    fit(run, EVERY_STEP, "--resume=auto")
    assert_same_end(run, undisturbed)
    assert [event.step for event in read_events(run).Scalars("train/loss_step")] == list(range(10))
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["ckpt_path"] is None  # or a command that reads this file would go on from there too


PLATEAU = ["--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau", "--model.lr_scheduler.monitor=val/loss"]
PLATEAU += [f"--model.lr_scheduler.{setting}" for setting in ("patience=0", "threshold=1000", "factor=0.5")]


class Case(NamedTuple):
    """Flags of a run, the steps after which a rank is asked to stop, and in how many processes: 0 is in this one."""

    flags: list[str]
    stops: list[int]
    ranks: int = 0


def drawing(mode: str, network: str) -> list[str]:
    """Its masks must be those that were due, whatever the generators have been used for before."""
    return [*own_network(network), *mode_flags(mode), "--trainer.max_epochs=2"]


AVERAGE = callback("lightning.pytorch.callbacks.EMAWeightAveraging", decay=0.5, update_starting_at_epoch=1)
FINE = callback("EarlyStopping", monitor="val/loss", stopping_threshold=100)  # any loss is
CASES = {
    "a decision to stop that waits": Case([*SETTINGS, *FINE, "--trainer.min_epochs=2", "--trainer.max_epochs=3"], [7]),
    "random masks": Case(drawing("single", "Drawing"), [2]),
    "averaged weights": Case([*SETTINGS, *AVERAGE], [2]),
    "a sum of the network's own": Case([*drawing("single", "Counting"), "--trainer.precision=bf16-true"], [2, 5]),
}
# Over three processes the sums of a ring depend on how DistributedDataParallel has cut its buckets.
THREE = [*SETTINGS, *mode_flags("ddp", 3), "--data.batch_size=18"]
# With the ImageNet stem a single image is a single value per channel in the end, which BatchNorm refuses.
STAGES = mode_flags("DDPLayerParallelStrategy", 4, num_stages=2, num_microbatches=2)
SLOW = {
    "transforms": Case([*SETTINGS, *TRANSFORMS, "--data.num_workers=1"], [2]),
    "transforms, ddp": Case([*SETTINGS, *TRANSFORMS, *mode_flags("ddp")], [2], ranks=2),
    "random masks, ddp": Case(drawing("ddp", "DrawingWhole"), [2], ranks=2),
    "random masks, dp": Case(drawing("dp", "DrawingWhole"), [2]),
    "random masks, pp": Case(drawing("pp", "Drawing"), [2], ranks=2),
    "a validation within an epoch, which is not run again": Case(
        [*SETTINGS, "--trainer.val_check_interval=2", "--trainer.max_steps=9"], [2]
    ),
    "half precision": Case([*SETTINGS, "--trainer.precision=16-true"], [2]),
    "a schedule by the validation loss": Case([*SETTINGS, *PLATEAU, "--trainer.max_epochs=3"], [2, 5, 8]),
    "averaged weights, ddp": Case([*SETTINGS, *AVERAGE, *mode_flags("ddp")], [2], ranks=2),
    "three processes": Case(THREE, [3], ranks=3),
    "stages": Case([*SETTINGS, *STAGES, "--data.num_train=96"], [3], ranks=2),
}
ALL = [
    *(pytest.param(case, id=name) for name, case in CASES.items()),
    *(pytest.param(case, id=name, marks=pytest.mark.slow) for name, case in SLOW.items()),
]


@pytest.mark.parametrize("case", ALL)
def test_a_run_that_was_stopped_ends_as_the_undisturbed_one(case: Case, tmp_path: Path) -> None:
    """Asked by its last rank."""
    run, flags = tmp_path / "run", [*case.flags, EVERY_STEP]
    fit_in(case.ranks, tmp_path / "undisturbed", *flags)
    for step in case.stops:
        fit_in(case.ranks, run, *flags, *stop_after(step, rank=max(0, case.ranks - 1)), status=143)
    fit_in(case.ranks, run, *flags, "--resume=auto")
    assert_same_end(run, tmp_path / "undisturbed")


CONSTANT = ["--model.lr_scheduler=ConstantLR", "--model.lr_scheduler.factor=1.0"]
ENDS = {
    "max_steps": ["--trainer.max_steps=7"],
    "max_epochs": ["--trainer.max_epochs=1"],
    "EarlyStopping": FINE,
    "a callback": callback("stopping.EndAfter", step=7),
}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks")
@pytest.mark.parametrize("end", graded("max_steps", slow=[*ENDS][1:]))
def test_an_ended_training_goes_on_with_what_it_has(end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With its average or without; and what has ended it ends it again at once, and says so."""
    run, alone, whole = tmp_path / "run", tmp_path / "alone", tmp_path / "whole"
    flags = ["--resume=auto", *CONSTANT]
    average = [*AVERAGE, *callback("EarlyStopping", monitor="val/acc", mode="max", patience=9)]
    fit(whole, *flags, *average)
    fit(run, *flags, *average, *ENDS[end])
    digests = (run / DIGESTS).read_text()
    fit(run, *flags, *average, *ENDS[end])
    assert "to go on, resume with" in caplog.messages[-1]
    assert (run / DIGESTS).read_text() == digests
    shutil.copytree(run, alone)
    fit(alone, *flags)
    assert "goes on with those that it trained" in caplog.text
    fit(run, *flags, *average)
    found, expected = map(last_checkpoint, (run, whole))
    assert_same_checkpoint(found, expected, tolerance=0)
    for key in ("current_model_state", "averaging_state"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0)
    trained = {f"network.{name}": weights for name, weights in last_checkpoint(alone)["state_dict"].items()}
    torch.testing.assert_close(trained, expected["current_model_state"], rtol=0, atol=0)
    assert waited(found) == waited(expected)


def waited(checkpoint: dict[str, Any]) -> list[int]:
    """How long each EarlyStopping has waited."""
    return [state["wait_count"] for state in checkpoint["callbacks"].values() if "wait_count" in state]


@pytest.mark.parametrize(
    ("changed", "epochs"),
    graded(
        ([], 2),
        (["--trainer.callbacks.patience=2"], 3),
        slow=[
            (["--trainer.callbacks.min_delta=9"], 3),
            (["--trainer.max_epochs=5"], 3),
            (["--trainer.min_epochs=4"], 4),
            (callback("stopping.SlowSteps", seconds=0), 2),
        ],
    ),
)
def test_a_decision_to_stop_holds_until_its_settings_change(
    changed: list[str], epochs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The epoch after the first is no better, by so much."""
    stopping = [*callback("EarlyStopping", monitor="val/loss", patience=1, min_delta=10), *CONSTANT]
    stopping.append("--trainer.max_epochs=4")
    fit(tmp_path / "run", *stopping)
    fit(tmp_path / "run", *stopping, *changed, "--resume=auto")
    assert last_checkpoint(tmp_path / "run")["position"]["epoch"] == epochs
    assert f"ended after {5 * epochs} optimizer steps by EarlyStopping; to go on" in caplog.messages[-1]


def test_a_users_callback_that_has_ended_a_training_is_known_by_its_arguments(tmp_path: Path) -> None:
    """Whatever it calls them, and whatever it counts."""
    for step, reached in ((2, 2), (2, 2), (4, 4)):
        fit(tmp_path, *callback("stopping.EndAfter", step=step), *CONSTANT, "--resume=auto")
        assert last_checkpoint(tmp_path)["global_step"] == reached


def test_a_checkpoint_holds_no_kind_of_lightnings() -> None:
    assert {type(value) for value in ExactResume()._settings(Timer()).values()} == {str, bool}  # no `Interval`


def test_a_resumed_run_says_how_much_time_is_left(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, flags = tmp_path / "run", ["--resume=auto", *CONSTANT]
    fit(run, *flags, "--trainer.max_epochs=1", "--trainer.max_time=01:00:00:00")
    fit(run, *flags, "--trainer.max_time=01:00:00:00")
    assert re.search(r"max_time: (23:59|1 day, ).* are left, as the training before has taken 0:0", caplog.text)
    fit(run, *flags, "--trainer.max_epochs=3", "--trainer.max_time=00:00:00:00")
    assert "ended after 10 optimizer steps by --trainer.max_time, which counts earlier runs too" in caplog.messages[-1]


def written(run: Path) -> dict[Path, bytes]:
    """All files but the lock, which names the process that was here last."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != LOCK}


def test_settings_that_have_had_no_effect_are_not_written_down(undisturbed: Path, tmp_path: Path) -> None:
    """Neither of a run that is refused, which changes nothing, nor of one that has nothing left to do."""
    run = tmp_path / "stopped"
    fit(run, EVERY_STEP, *stop_after(2), status=143)
    before = written(run)
    assert "--data.batch_size=16" in refused_fit(run, EVERY_STEP, "--resume=auto", "--data.batch_size=8")
    assert written(run) == before

    done = shutil.copytree(undisturbed, tmp_path / "done")
    fit(done, EVERY_STEP, "--resume=auto", "--model.label_smoothing=0.2", "--data.eval_batch_size=7")
    assert_same_end(done, undisturbed)
    assert (done / "config.yaml").read_bytes() == (undisturbed / "config.yaml").read_bytes()


@pytest.mark.exhaustive
def test_a_schedule_whose_metric_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    """Validation comes after four of the five steps, so that the rest of the epoch knows nothing of it."""
    flags = [EVERY_STEP, *PLATEAU, "--trainer.val_check_interval=4"]
    fit(tmp_path / "run", *flags, *stop_after(4), status=143)
    fit(tmp_path / "run", *flags, "--resume=auto")
    end = last_checkpoint(tmp_path / "run")
    assert (end["global_step"], end["lr_schedulers"][0]["last_epoch"]) == (10, 1)


def test_counts_of_many_ranks_and_classes_are_few_bytes() -> None:
    """Whole numbers are summed over the ranks, and no evaluation goes on from a checkpoint."""
    module, kwargs = LitResNet("tiny", num_classes=1000), {"num_replicas": 8, "rank": 3}
    strategy: Any = SimpleNamespace(distributed_sampler_kwargs=kwargs, reduce=lambda tensor, reduce_op: tensor)
    module.train_loss.update(torch.tensor([0.25, 0.5]))
    collected = _collect(SimpleNamespace(strategy=strategy), module)  # type: ignore[arg-type]
    assert collected.keys() == {"train_loss", "train_acc"}
    assert sum(tensor.nbytes for states in collected.values() for tensor in states.values()) < 300
    assert collected["train_loss"]["count"] == 2
    module.train_loss.update(torch.ones(3))
    assert collected["train_loss"]["count"] == 2  # it is written behind the training
    total = module.train_loss.total.clone()
    module.to(torch.float16)  # as Lightning does once more when the counts are back
    assert module.train_loss.total.equal(total)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--trainer.max_epochs=1"], "--trainer.max_epochs=1, and the training that it continues has begun 2"),
        (["--trainer.max_steps=9"], "--trainer.max_steps=9, and the training that it continues has begun 10"),
        (["--model.lr_scheduler=ConstantLR"], "WarmupDecay; this one has torch.optim.lr_scheduler.Const"),
        (["--model.optimizer=lit_cifar.MuonSGD"], "with lit_cifar.NesterovSGD; this one has lit_cifar.MuonSGD"),
    ],
)
def test_a_run_that_cannot_go_on_is_told_why(
    flags: list[str], problem: str, undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what it is told to pass instead works."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    said = refused_fit(tmp_path / "run", checkpoint_flag(undisturbed), *flags)
    assert problem in said
    remedy = re.findall(r"--[\w.]+=[\w.]+", said.splitlines()[-1])
    fit(tmp_path / "run", checkpoint_flag(undisturbed), *flags, *remedy)


def test_settings_that_a_checkpoint_brings_along_are_those_of_the_resumed_run(tmp_path: Path) -> None:
    """The file that the run writes is true of its steps."""
    run, sgd = tmp_path / "run", ["--model.optimizer=torch.optim.SGD", "--model.optimizer.momentum=0.9"]
    stopping = [*callback("EarlyStopping", monitor="val/loss", patience=7)]
    fit(run, *sgd, "--model.optimizer.lr=0.1", *stopping, EVERY_STEP, *stop_after(2), status=143)
    more = ["--model.optimizer.lr=0.01", "--model.optimizer.momentum=0.5", "--model.optimizer.weight_decay=0.001"]
    more += ["--model.lr_scheduler=lit_cifar.WarmupDecay", "--model.lr_scheduler.warmup=0"]
    said = "optimizer.lr=0.1, optimizer.momentum=0.9, optimizer.weight_decay=0.0; from optimizer step 2 on it has"
    with pytest.warns(UserWarning, match=f"had lr_scheduler.warmup=0.2, {said}"):
        fit(run, *sgd, *more, *callback("EarlyStopping", monitor="val/loss", patience=9), "--resume=auto")
    rates = [float(row["lr-SGD"]) for row in metrics(run) if "lr-SGD" in row]
    falling = [0.01 * (1 - step / 10) for step in range(2, 10)]
    assert rates == pytest.approx([0.1 / 3, 0.2 / 3, *falling])
    end = last_checkpoint(run)
    (group,) = end["optimizer_states"][0]["param_groups"]
    assert (group["initial_lr"], group["momentum"], group["weight_decay"]) == (0.01, 0.5, 0.001)
    assert [state["patience"] for state in end["callbacks"].values() if "patience" in state] == [9]
    arguments = yaml.safe_load((run / "config.yaml").read_text())["model"]["optimizer"]["init_args"]
    assert (arguments["lr"], arguments["momentum"], arguments["weight_decay"]) == (0.01, 0.5, 0.001)


def test_a_schedule_by_epochs_and_a_longer_run(tmp_path: Path) -> None:
    """A finished run goes on when it may have more epochs, and ends at once when it may not."""
    schedule = ["--model.lr_scheduler=torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.step_size=1"]
    fit(tmp_path / "undisturbed", *schedule)
    fit(tmp_path / "run", *schedule, "--trainer.max_epochs=1", "--resume=auto")
    for _ in range(2):
        fit(tmp_path / "run", *schedule, "--resume=auto")
        assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fit(run, EVERY_STEP, *stop_after(4), status=143)
    newest = run / "checkpoints" / "last.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=r"skips a checkpoint: .*last.ckpt"):  # what it had logged is written again
        fit(run, EVERY_STEP, "--resume=auto")
    assert_same_end(run, undisturbed)


def checkpoint_flag(run: Path) -> str:
    return f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"


LONGER = ["--model.arch=resnet10", "--model.optimizer.lr=0.02", "--data.num_train=112", "--data.batch_size=32"]
LONGER += ["--model.lr_scheduler=torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.step_size=1"]
LONGER += ["--trainer.precision=64-true", "--trainer.gradient_clip_val=0.5", "--trainer.limit_val_batches=0"]
LONGER += ["--trainer.max_epochs=2", "--last_checkpoint.every_n_steps=1"]
SHARDS, MICROBATCHES = "--model.ghost_batchnorm.data_parallel_size=2", "--model.ghost_batchnorm.num_microbatches=2"
# Flags of a mode, processes it needs (0: it runs in this one, 1: it starts its own), and flags of what it equals.
MODES: dict[str, tuple[list[str], int, list[str]]] = {
    "single": (mode_flags("single"), 0, []),
    "dp": (mode_flags("dp"), 0, ["--model.ghost_batchnorm.local_replicas=2"]),
    "mp": (mode_flags("mp"), 0, []),
    "ddp": (mode_flags("ddp"), 2, [SHARDS]),
    "ddp_spawn": (mode_flags("ddp_spawn"), 1, [SHARDS]),
    "ddp_mp": (mode_flags("ddp_mp", 4), 2, [SHARDS]),
    "pp": (mode_flags("PipelineStrategy", num_microbatches=2), 2, [MICROBATCHES]),
    "ddp_pp": (mode_flags("PipelineStrategy", 4, num_stages=2, num_microbatches=2), 4, [SHARDS, MICROBATCHES]),
    "fsdp2": (mode_flags("fsdp2"), 2, [SHARDS]),
    "tp": (mode_flags("tp"), 2, []),
}


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("writer", MODES)
def test_what_one_mode_wrote_every_mode_resumes(writer: str, tmp_path: Path) -> None:
    flags, ranks, equals = MODES[writer]
    stop = callback("stopping.SignalAfter", step=4)
    fit_in(ranks, tmp_path / "written", *TINY, *LONGER, *flags, *stop, status=143)
    resume = checkpoint_flag(tmp_path / "written")
    fit_in(0, tmp_path / "undisturbed", *TINY, *LONGER, *equals)
    for reader, (flags, ranks, _) in MODES.items():
        fit_in(ranks, tmp_path / reader, *TINY, *LONGER, *flags, resume)
    for chunks in sorted({tuple(equals) for _, _, equals in MODES.values()}):
        fit_in(0, tmp_path / "-".join(["alone", *chunks]), *TINY, *LONGER, *chunks, resume)
    for reader, (*_, chunks) in MODES.items():
        assert_alike(tmp_path / reader, tmp_path / "-".join(["alone", *chunks]))
        if chunks == equals:
            assert_alike(tmp_path / reader, tmp_path / "undisturbed")


def assert_alike(run: Path, other: Path) -> None:
    found, wanted = map(last_checkpoint, (run, other))
    assert found["global_step"] == wanted["global_step"] == 6, run
    assert found["position"] | {"rows": 0} == wanted["position"] | {"rows": 0}, run
    assert found["lr_schedulers"] == wanted["lr_schedulers"], run
    assert list(found["state_dict"]) == list(wanted["state_dict"]), run
    assert_same_checkpoint(found, wanted, tolerance=1e-9)
    # Of the second epoch, which the run has in part from the one before it; logged in float32.
    assert losses(run)[-1] == pytest.approx(losses(other)[-1], rel=1e-6), run


def test_a_schedule_counts_the_steps_of_this_run_where_batches_are_others_from_an_epoch_on(tmp_path: Path) -> None:
    """79 images are 5 steps an epoch, then 2: it stands behind 2 of 6 steps, and ends at 0, before `max_steps`.

    The rate has fallen to zero in the first plan; the second epoch takes it up in the plan over all.
    """
    run = tmp_path / "run"
    fit(run, "--trainer.max_epochs=1", "--trainer.max_steps=1000")
    more = ["--trainer.max_epochs=3", "--trainer.max_steps=1000", "--data.batch_size=40", "--resume=auto"]
    more += ["--data.augment.cutout=4", "--model.label_smoothing=0.2"]
    data = "--data.batch_size=16 --data.augment.cutout=0; it goes on with --data.batch_size=40 --data.augment.cutout=4"
    rest = "label_smoothing=0.1, lr_scheduler.total_steps=5; from optimizer step 5 on it has label_smoothing=0.2"
    with pytest.warns(match=data), pytest.warns(match=rest), pytest.warns(match="behind 2 steps of this run, not 5"):
        fit(run, *more)
    schedule = last_checkpoint(run)["lr_schedulers"][0]
    assert (schedule["total_steps"], schedule["last_epoch"], schedule["_last_lr"]) == (6, 6, [0.0])
    rates = [float(row["lr-NesterovSGD"]) for row in metrics(run) if "lr-NesterovSGD" in row]
    assert rates[5:] == pytest.approx([0.16, 0.12, 0.08, 0.04])  # after a step of warm-up


@short
@pytest.mark.parametrize(
    ("hook", "made"),
    [
        ("on_train_batch_end", [2, 4]),
        ("on_validation_model_eval", [2, 4]),
        ("on_validation_batch_end", [2, 4]),  # when the average has the place of the weights
        ("on_validation_epoch_end", [2, 4]),
        ("on_validation_end", [4]),  # when all that it found is known
    ],
)
def test_a_validation_that_an_error_has_prevented_is_made(hook: str, made: list[int], tmp_path: Path) -> None:
    file = tmp_path / "failed.ckpt"

    def fail(*_: Any) -> None:
        if models[1].global_step == 2:
            raise MemoryError

    models, found, saving = [make("own") for _ in range(3)], list[int](), Checkpoint()  # which comes last
    saving.on_exception = lambda trainer, *_: trainer.save_checkpoint(file)  # type: ignore[method-assign]
    models[1].load_state_dict(models[0].state_dict())
    setattr(models[1] if "model" in hook else saving, hook, fail)
    watch = LambdaCallback(on_validation_end=lambda trainer, _: found.append(trainer.global_step))
    how: dict[str, Any] = {"max_epochs": 2, "num_sanity_val_steps": 0, "limit_train_batches": 2}
    for model, more, resume in zip(models, ([], [saving], [watch]), (None, None, file), strict=True):
        callbacks = [EMAWeightAveraging(decay=0.5), *more]
        with pytest.raises(MemoryError) if saving in more else nullcontext():
            fit_script(model, tmp_path, callbacks=callbacks, resume=resume, enable_checkpointing=saving in more, **how)
    assert found == made
    torch.testing.assert_close(models[2].state_dict(), models[0].state_dict(), rtol=0, atol=0)


@short
def test_a_checkpoint_after_a_shorter_last_step_warns(tmp_path: Path) -> None:
    sizes = {"accumulate_grad_batches": 2, "limit_train_batches": 3}
    with pytest.warns(UserWarning, match="within an optimizer step"):
        fit_script(make("own"), tmp_path, callbacks=[Watch(tmp_path / "within.ckpt", 2)], **sizes)


def test_metrics_that_are_no_sums_begin_anew() -> None:
    metrics = torch.nn.ModuleDict({"loss": MeanLoss(), "most": MaxMetric(), "all": CatMetric(), "val_loss": MeanLoss()})
    assert [name for name, _ in _metrics(metrics)] == ["loss"]


def test_another_optimizer_of_the_same_name_is_refused() -> None:
    class SGD(torch.optim.SGD):
        pass

    parameters = [torch.nn.Parameter(torch.zeros(2))]
    checkpoint = {OPTIMIZER: class_path(SGD(parameters, lr=0.1))}
    with pytest.raises(CheckpointError, match="this one has SGD"):
        check_optimizer(checkpoint, torch.optim.SGD(parameters, lr=0.1), None)
