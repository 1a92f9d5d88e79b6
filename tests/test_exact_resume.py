"""A run that is stopped and resumed ends where the undisturbed one ends, bit for bit on as many processes."""

import csv
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from commands import TINY, Result, launch, mode_flags, own_network, refused, run_here
from tiny_task import read_events

from lit_cifar import LitResNet
from lit_cifar.checkpoint.exact_resume import _collect
from lit_cifar.checkpoint.files import write_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.main import CLI
from lit_cifar.reporting.run_folder import LOCK
from lit_cifar.tools.forked import ForkedRun, _rank_environments

# 79 images in batches of 16: four steps and a ragged one of 15 an epoch, ten steps in all.
SETTINGS = [
    *TINY,
    "--data.num_train=95",
    "--trainer.max_epochs=2",
    "--trainer.devices=1",
    "--trainer.num_sanity_val_steps=0",
]
EVERY_STEP = "--last_checkpoint.every_n_steps=1"


def fit(run: Path, *flags: str) -> Result:
    return run_here("fit", *SETTINGS, f"--run_dir={run}", *flags)


def refused_fit(run: Path, *flags: str) -> str:
    return refused("fit", *SETTINGS, f"--run_dir={run}", *flags)


def stop_after(step: int, *, rank: int = 0) -> list[str]:
    """Ask to stop then; as a checkpoint is due at every step, the processes agree at every step too."""
    return [
        "--resume=auto",
        "--trainer.callbacks+=stopping.SignalAfter",
        f"--trainer.callbacks.step={step}",
        f"--trainer.callbacks.rank={rank}",
    ]


def metrics(run: Path) -> list[dict[str, str]]:
    """Every line of `metrics.csv`, without what the clock says."""
    with (run / "metrics.csv").open(newline="") as file:
        rows = [{k: v for k, v in row.items() if v and "images_per_s" not in k} for row in csv.DictReader(file)]
    return [row for row in rows if row.keys() - {"step", "epoch"}]


def assert_equal(found: Any, expected: Any, name: str = "") -> None:
    """Tensors bit for bit, and all that holds them."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected), name
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys(), name
        for key in expected:
            assert_equal(found[key], expected[key], f"{name}.{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), name
        for index, pair in enumerate(zip(found, expected, strict=True)):
            assert_equal(*pair, f"{name}[{index}]")
    else:
        assert found == expected, name


def assert_same_end(run: Path, undisturbed: Path) -> None:
    """The last checkpoints have the same weights, optimizer, schedule, position and counts, and the metrics agree."""
    found, expected = (read_checkpoint(folder / "checkpoints" / "last.ckpt") for folder in (run, undisturbed))
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "position", "metrics", "sample_audit", "loops"):
        if key in expected:
            assert_equal(found[key], expected[key], key)
    assert metrics(run) == metrics(undisturbed)


def test_processes_that_see_different_checkpoints_end_in_words(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a network file system shows one of them an older file. Here each has a folder of its own."""
    for rank in (0, 1):
        shutil.copytree(undisturbed, tmp_path / str(rank) / "run")
    last = Path("run", "checkpoints", "last.ckpt")
    older = read_checkpoint(undisturbed / "checkpoints" / "last.ckpt") | {"global_step": 9}
    write_checkpoint(older, tmp_path / "1" / last)
    before = (tmp_path / "0" / "run" / "metrics.csv").read_bytes()
    started = []
    words = ["fit", *SETTINGS, *mode_flags("ddp"), "--resume=auto", "--run_dir=run"]
    with _rank_environments({**os.environ, "OMP_NUM_THREADS": "1"}, 2) as environments:
        for rank, environment in enumerate(environments):
            monkeypatch.chdir(tmp_path / str(rank))
            own = {name: tmp_path / f"{name}{rank}" for name in ("stdout", "stderr")}
            started.append(ForkedRun(words, environment=environment, **own))
    try:
        assert started[0].wait(100) == 2
        assert started[1].wait(100) is not None
    finally:
        for run in started:
            run.kill()
    told = (tmp_path / "stderr0").read_text().partition("lit_cifar: error: ")[2].splitlines()
    assert len(told) == 4
    assert told[1].endswith(f": {last} after 10 optimizer steps")
    assert told[2].endswith(f": {last} after 9 optimizer steps")
    assert "Traceback" not in (tmp_path / "stderr0").read_text() + (tmp_path / "stderr1").read_text()
    assert (tmp_path / "0" / "run" / "metrics.csv").read_bytes() == before


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert fit(run, EVERY_STEP).status == 0
    return run


@pytest.mark.parametrize("step", [1, 5, *(pytest.param(step, marks=pytest.mark.exhaustive) for step in (3, 6, 9))])
def test_a_stopped_run_goes_on_with_the_very_next_sample(step: int, undisturbed: Path, tmp_path: Path) -> None:
    """Step 5 ends the first epoch."""
    run = tmp_path / "run"
    stopped = fit(run, EVERY_STEP, *stop_after(step))
    assert stopped.status == 143
    assert f"stopped by SIGTERM after {step} optimizer steps" in stopped.stderr
    assert fit(run, EVERY_STEP, "--resume=auto").status == 0
    assert_same_end(run, undisturbed)
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["ckpt_path"] is None  # or a command that reads this file would go on from there too


@pytest.mark.parametrize(
    ("mode", "network", "ranks"),
    [
        ("single", "Drawing", 1),
        ("ddp", "DrawingWhole", 2),
        *(pytest.param(*more, marks=pytest.mark.slow) for more in (("dp", "DrawingWhole", 1), ("pp", "Drawing", 2))),
    ],
)
def test_a_network_with_dropout_goes_on_with_the_masks_that_were_due(
    mode: str, network: str, ranks: int, tmp_path: Path
) -> None:
    """Whatever the generators have been used for before, as they have in the run that was stopped."""
    flags = [*own_network(network), *mode_flags(mode), "--trainer.max_epochs=2", EVERY_STEP]
    commands = [
        [*flags, f"--run_dir={tmp_path}/undisturbed"],
        [*flags, f"--run_dir={tmp_path}/run", *stop_after(2)],
        [*flags, f"--run_dir={tmp_path}/run", "--resume=auto"],
    ]
    statuses = [launch("fit", *command, check=False, ranks=ranks).status for command in commands]
    assert statuses == [0, 143, 0]
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def written(run: Path) -> dict[Path, bytes]:
    """All files but the lock, which names the process that was here last."""
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != LOCK}


def test_settings_that_have_had_no_effect_are_not_written_down(undisturbed: Path, tmp_path: Path) -> None:
    """Neither of a run that is refused, which changes nothing, nor of one that has nothing left to do."""
    run = tmp_path / "stopped"
    assert fit(run, EVERY_STEP, *stop_after(2)).status == 143
    before = written(run)
    assert "--data.batch_size=16" in refused_fit(run, EVERY_STEP, "--resume=auto", "--data.batch_size=8")
    assert written(run) == before

    done = shutil.copytree(undisturbed, tmp_path / "done")
    assert fit(done, EVERY_STEP, "--resume=auto", "--data.seed=7", "--data.eval_batch_size=7").status == 0
    assert_same_end(done, undisturbed)
    assert (done / "config.yaml").read_bytes() == (undisturbed / "config.yaml").read_bytes()


PLATEAU = [
    "--model.lr_scheduler=lightning.pytorch.cli.ReduceLROnPlateau",
    "--model.lr_scheduler.monitor=val/loss",
    "--model.lr_scheduler.patience=0",
    "--model.lr_scheduler.threshold=1000",
    "--model.lr_scheduler.factor=0.5",
    "--trainer.max_epochs=3",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "stops"),
    [(["--trainer.val_check_interval=2", "--trainer.max_steps=9"], [2]), (PLATEAU, [2, 5, 8])],
    ids=["a validation in the middle of an epoch, which is not run again", "a schedule by the validation loss"],
)
def test_what_validation_changes_is_as_it_was(flags: list[str], stops: list[int], tmp_path: Path) -> None:
    flags = [EVERY_STEP, *flags]
    assert fit(tmp_path / "undisturbed", *flags).status == 0
    for step in stops:
        assert fit(tmp_path / "run", *flags, *stop_after(step)).status == 143
    assert fit(tmp_path / "run", *flags, "--resume=auto").status == 0
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


@pytest.mark.exhaustive
def test_a_schedule_whose_metric_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    """Validation comes after four of the five steps, so that the rest of the epoch knows nothing of it."""
    flags = [EVERY_STEP, *PLATEAU, "--trainer.val_check_interval=4", "--trainer.max_epochs=2"]
    assert fit(tmp_path / "run", *flags, *stop_after(4)).status == 143
    assert fit(tmp_path / "run", *flags, "--resume=auto").status == 0
    end = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
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


def test_a_checkpoint_of_an_earlier_commit_is_resumed(undisturbed: Path, tmp_path: Path) -> None:
    """That of fd36ea9 had another name for the sample audit, a row of counts for each rank, and no optimizer's name."""
    run = tmp_path / "run"
    assert fit(run, EVERY_STEP, *stop_after(3)).status == 143
    last = run / "checkpoints" / "last.ckpt"
    content = read_checkpoint(last)
    content["receipt"] = content.pop("sample_audit")
    del content["optimizer"]
    for counts in content["metrics"].values():
        counts |= {key: torch.stack([count - 1, torch.ones_like(count)]) for key, count in counts.items()}
        counts["update_count"] = torch.tensor([3, 0])
    write_checkpoint(content, last)
    for optimizer in ("AdamW", "lit_cifar.MuonSGD"):
        said = refused_fit(tmp_path / "other", f"--ckpt_path={last}", f"--model.optimizer={optimizer}")
        assert f"with another optimizer; this one has {optimizer}" in said
    assert fit(run, EVERY_STEP, "--resume=auto").status == 0
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        (["--trainer.max_epochs=1"], "--trainer.max_epochs=1, and the training that it continues has begun 2"),
        (["--trainer.max_steps=9"], "--trainer.max_steps=9, and the training that it continues has begun 10"),
        (["--model.optimizer=AdamW"], "with lit_cifar.NesterovSGD; this one has AdamW"),
        (["--model.optimizer=SGD"], "with lit_cifar.NesterovSGD; this one has SGD"),
        (["--model.optimizer=lit_cifar.MuonSGD"], "NesterovSGD; this one has lit_cifar.MuonSGD"),
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
    accepted = fit(tmp_path / "run", checkpoint_flag(undisturbed), *flags, *remedy)
    assert accepted.status == 0, accepted.stderr


def test_a_schedule_by_epochs_and_a_longer_run(tmp_path: Path) -> None:
    """A finished run goes on when it may have more epochs, and ends at once when it may not."""
    schedule = ["--model.lr_scheduler=torch.optim.lr_scheduler.StepLR", "--model.lr_scheduler.step_size=1"]
    assert fit(tmp_path / "undisturbed", *schedule).status == 0
    assert fit(tmp_path / "run", *schedule, "--trainer.max_epochs=1", "--resume=auto").status == 0
    for _ in range(2):
        assert fit(tmp_path / "run", *schedule, "--resume=auto").status == 0
        assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def test_a_longer_run_with_the_default_schedule(tmp_path: Path) -> None:
    """The rate has fallen to zero in the first plan; the second epoch takes it up in the plan over both."""
    assert fit(tmp_path / "run", "--trainer.max_epochs=1", "--resume=auto").status == 0
    with pytest.warns(UserWarning, match="has 5 optimizer steps, this run has 10"):
        assert fit(tmp_path / "run", "--resume=auto").status == 0
    rates = [float(row["lr-NesterovSGD"]) for row in metrics(tmp_path / "run") if "lr-NesterovSGD" in row]
    assert rates[5:] == pytest.approx([0.1 * (1 - fallen / 8) for fallen in range(3, 8)])


def test_a_run_that_died_before_its_first_checkpoint_begins_again(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    failing = ["--trainer.callbacks+=recorder.FailOn", "--trainer.callbacks.rank=0", "--trainer.callbacks.step=3"]
    with pytest.raises(RuntimeError, match="fails at step 3"):
        fit(run, "--resume=auto", *failing)
    assert fit(run, EVERY_STEP, "--resume=auto").status == 0
    assert_same_end(run, undisturbed)
    assert [event.step for event in read_events(run).Scalars("train/loss_step")] == list(range(10))


def test_a_damaged_newest_checkpoint_is_reported_and_the_one_before_it_used(undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert fit(run, EVERY_STEP, *stop_after(4)).status == 143
    newest = run / "checkpoints" / "last.ckpt"
    newest.write_bytes(newest.read_bytes()[:-1000])
    with pytest.warns(UserWarning, match=r"skips a checkpoint: .*last.ckpt"):  # what it had logged is written again
        assert fit(run, EVERY_STEP, "--resume=auto").status == 0
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["fit", "--resume=auto"], "--run_dir"),
        (["fit", "--resume=auto", "--run_dir=run", "--ckpt_path=some.ckpt"], "--ckpt_path"),
        (["test", "--resume=auto", "--run_dir=run"], "test"),
        (["fit", "--resume=last", "--run_dir=run"], "resume"),
    ],
)
def test_contradicting_flags_are_refused(
    flags: list[str], word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert word in refused(*flags)
    assert not any(tmp_path.iterdir())


STAGES = [
    *mode_flags("DDPLayerParallelStrategy"),
    "--trainer.strategy.num_stages=2",
    "--trainer.strategy.num_microbatches=2",
    "--data.num_train=96",
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "ranks"), [([*mode_flags("ddp", 3), "--data.batch_size=18"], 3), (STAGES, 2)], ids=["ddp", "stages"]
)
def test_as_many_processes_agree_bit_for_bit(flags: list[str], ranks: int, tmp_path: Path) -> None:
    """Over three processes the sums of a ring depend on how DistributedDataParallel has cut its buckets.

    With the ImageNet stem a single image is a single value per channel in the end, which BatchNorm refuses.
    """
    settings = ["fit", *SETTINGS, EVERY_STEP, *flags]
    launch(*settings, f"--run_dir={tmp_path}/undisturbed", check=False, ranks=ranks)
    for more in (stop_after(3, rank=1), ["--resume=auto"]):
        launch(*settings, f"--run_dir={tmp_path}/run", *more, check=False, ranks=ranks)
    assert_same_end(tmp_path / "run", tmp_path / "undisturbed")


def checkpoint_flag(run: Path) -> str:
    return f"--ckpt_path={run / 'checkpoints' / 'last.ckpt'}"


@pytest.mark.slow
def test_ddp_spawn_stops_and_goes_on(tmp_path: Path) -> None:
    """The exit status of the spawned processes becomes that of the one that the user has started."""
    settings = [*SETTINGS, EVERY_STEP, *mode_flags("ddp_spawn"), f"--run_dir={tmp_path / 'run'}"]
    assert launch("fit", *settings, *stop_after(3, rank=1), check=False).status == 143
    result = launch("fit", *settings, "--resume=auto")
    assert "resuming from" in result.stderr
