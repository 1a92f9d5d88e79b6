"""The command line as a user meets it: what bad input is answered with, and what a run leaves behind."""

import contextlib
import csv
import os
import runpy
import shlex
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import yaml
from commands import TINY, Result, counts, environment_of, launch, mode_flags, run_here
from PIL import Image

import lit_cifar
from lit_cifar import __version__
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.main import CLI, MAY_NAME_STRATEGY, main
from lit_cifar.reporting.environment import versions
from lit_cifar.tools.commands import COMMANDS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of a short training."""
    run = tmp_path_factory.mktemp("runs") / "trained"
    assert run_here("fit", *TINY, f"--run_dir={run}").status == 0
    return run


def assert_refused(result: Result, *words: str) -> None:
    """Exit status 2 and at most five lines that say `words`."""
    lines = [line for line in result.stderr.splitlines() if line.strip()]
    assert result.status == 2, result.stderr
    assert len(lines) <= 5
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in result.stderr


REFUSED = {
    "indivisible batch": (["--trainer.strategy=dp", "--trainer.devices=3"], ["--data.batch_size=15 or"]),
    "indivisible accumulation": (["--trainer.accumulate_grad_batches=3"], ["3 accumulation steps", "=15 or"]),
    "unknown strategy": (["--trainer.strategy=dpp"], ["dpp", "ddp_spawn", "dp"]),
    "unknown flag": (["--data.batchsize=3"], ["batchsize", "did you mean --data.batch_size?", "--help"]),
    "abbreviated flag": (["--trainer.max_epoch=3"], ["--trainer.max_epoch=3", "did you mean --trainer.max_epochs?"]),
    "negative rate": (["--model.optimizer.lr=-1"], ["learning rate: -1"]),
    "no batches": (["--trainer.limit_train_batches=0"], ["--trainer.limit_train_batches=0 would train nothing"]),
    "half a step": (
        ["--trainer.accumulate_grad_batches=4", "--trainer.limit_train_batches=6"],
        ["--trainer.limit_train_batches=4 or --trainer.limit_train_batches=8"],
    ),
    "half a step of few": (
        ["--trainer.accumulate_grad_batches=2", "--trainer.overfit_batches=1"],
        ["the nearest that are whole steps: --trainer.overfit_batches=2"],
    ),
    "an epoch without steps": (
        ["--trainer.callbacks+=StochasticWeightAveraging", "--trainer.callbacks.swa_lrs=0.01"],
        ["for BatchNorm", "EMAWeightAveraging"],
    ),
    "no steps": (["--trainer.max_steps=0"], ["--trainer.max_steps=0 would train nothing"]),
    "wrong type": (["--data.batch_size=many"], ["batch_size"]),
    "no schedule": (
        ["--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=0"],
        ["StepLR cannot take a step", "--model.lr_scheduler.NAME=VALUE"],
    ),
    "no gpu": (["--trainer.accelerator=cuda"], ["CUDA"]),
    "gpu strategy": (["--trainer.strategy=fsdp"], ["FSDP"]),
    "all cores": (["--trainer.devices=-1"], ["--trainer.devices=-1", "--trainer.devices=2"]),
    "devices in words": (["--trainer.devices=abc"], ["--trainer.devices=abc", "int > 0"]),
    "cores by number": (["--trainer.strategy=ddp", "--trainer.devices=[0,1]"], ["devices=[0, 1]", "int > 0"]),
    "dp on nodes": (
        ["--trainer.strategy=dp", "--trainer.num_nodes=2"],
        ["--trainer.num_nodes=2", "--trainer.strategy=ddp"],
    ),
    "dp with synchronised BatchNorm": (
        ["--trainer.strategy=dp", "--trainer.devices=2", "--trainer.sync_batchnorm=true"],
        ["--trainer.sync_batchnorm=true", "Drop --trainer.sync_batchnorm"],
    ),
    "more stages than blocks": (
        ["--trainer.strategy=mp", "--trainer.devices=10"],
        ["10 stages of a network of 6 blocks"],
    ),
    "a cut at no block": (
        ["--trainer.strategy=LayerParallelStrategy", "--trainer.strategy.cuts=[layer9.0]", "--trainer.devices=2"],
        ["['layer9.0'] do not make 2 stages"],
    ),
    "chunks of one device in a mode": (
        ["--trainer.strategy=dp", "--trainer.devices=2", "--model.ghost_batchnorm.num_shards=2"],
        ["ghost_batchnorm", "--trainer.devices=1"],
    ),
    "too few devices for microbatches": (
        ["--trainer.strategy=pp", "--trainer.devices=2", "--data.batch_size=14"],
        ["4 microbatches", "--data.batch_size=16"],
    ),
    "nothing left to train on": (["--data.val_size=96"], ["--data.val_size=9"]),
    "ragged batch too small": (["--data.num_train=97"], ["--data.drop_last=true"]),
    "cutout without augmentation": (["--data.augment=false", "--data.cutout=8"], ["--data.augment=true"]),
    "missing data": (["--data.dataset=cifar10", "--data.download=false", "--data.root=nowhere"], ["synthetic"]),
    "no loggers": (["--trainer.logger=[]"], ["--trainer.logger=[]", "--trainer.fast_dev_run=N"]),
    "no checkpoints": (["--trainer.enable_checkpointing=false"], ["--trainer.fast_dev_run=N"]),
    "nothing but steps": (["--trainer.barebones=true"], ["--trainer.barebones=true", "--trainer.fast_dev_run=N"]),
    "no logger": (["--trainer.logger=false"], ["--trainer.logger=false", "--trainer.fast_dev_run=N"]),
    "logger that is not installed": (["--trainer.logger=CometLogger"], ["comet"]),
    "Lightning's folder": (["--trainer.default_root_dir=x"], ["--trainer.default_root_dir=x", "--run_dir=x"]),
    "an argument of no strategy": (
        ["--trainer.strategy.num_microbatches=8"],
        ["=auto ", "--trainer.strategy=CLASS --trainer.strategy.num_microbatches=8"],
    ),
    "an argument of an unknown strategy": (
        ["--trainer.strategy=ppp", "--trainer.strategy.num_microbatches=8"],
        ["=ppp ", "--trainer.strategy=CLASS --trainer.strategy.num_microbatches=8"],
    ),
    # A value that an option cannot have: what it can be, and what may have been meant.
    "union of types": (["--data.num_train=many"], ["--data.num_train=many must be a whole number or null"]),
    "union of choices": (["--trainer.precision=bf16mixed"], ["did you mean --trainer.precision=bf16-mixed?"]),
    "union in a class": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.num_stages=x"],
        ["--trainer.strategy.num_stages=x must be a whole number or null"],
    ),
    "duration": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.timeout=soon"],
        ["--trainer.strategy.timeout=soon must be a duration, as 0:10:00"],
    ),
    "choice in a class": (
        ["--trainer.strategy=PipelineStrategy", "--trainer.strategy.schedule=1F2B"],
        ["GPipe, 1F1B", "did you mean --trainer.strategy.schedule=1F1B?"],
    ),
    "data set": (
        ["--data.dataset=fashion-mnist"],
        ["cifar10, fashion_mnist, synthetic, folder", "did you mean --data.dataset=fashion_mnist?"],
    ),
    "network": (["--model.arch=resnet43"], ["did you mean --model.arch=resnet34?"]),
    "truth": (["--data.augment=maybe"], ["--data.augment=maybe must be true or false"]),
    "optimizer": (
        ["--model.optimizer=AdmaW", "--model.optimizer.lr=1"],
        ["--model.optimizer=AdmaW: there is no such class", "did you mean --model.optimizer=AdamW?"],
    ),
    "optimizer by its path": (["--model.optimizer=torch.optim.Sgd"], ["did you mean --model.optimizer=SGD?"]),
    "schedule": (["--model.lr_scheduler=steplr"], ["did you mean --model.lr_scheduler=StepLR?"]),
    "callback": (["--trainer.callbacks+=EarlyStoping"], ["did you mean --trainer.callbacks=EarlyStopping?"]),
    "class of a strategy": (
        ["--trainer.strategy=PipelineStrategi"],
        ["did you mean --trainer.strategy=PipelineStrategy?", "the known ones: ddp, "],
    ),
    "nothing alike": (["--model.optimizer=qqq"], ["--model.optimizer=qqq: there is no such class", "--help"]),
    "no batch": (["--data.batch_size=0"], ["--data.batch_size=0 is the global batch", "pass --data.batch_size=128"]),
    "classes": (["--model.num_classes=11"], ["synthetic has 10", "--model.num_classes=10"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And before Lightning says on what it runs, and with which seed. Nothing of Python's types is in the answer."""
    if name in ("no gpu", "gpu strategy") and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    flags, words = REFUSED[name]
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        result = run_here("fit", *TINY, *flags)
    assert_refused(result, *words)
    assert not any(word in result.stderr for word in ("Errors:", "class '"))
    assert caplog.text == ""
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == []


@pytest.mark.parametrize("content", [b"\x8d\xff\x00", b"trainer: {}\0"])
def test_a_config_that_is_not_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert_refused(run_here("fit", f"--config={tmp_path / 'config.yaml'}"), "config")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_stray_rank_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As another rank than 0 the only process would write nothing."""
    monkeypatch.setenv(name, "1")
    monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)  # as Lightning's import finds it
    monkeypatch.setattr("lit_cifar.cli.main.exit_with_parent", list)
    result = run_here("fit", *TINY, f"--run_dir={tmp_path / 'run'}")
    assert_refused(result, f"{name}=1 in the environment", f"unset {name}")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MASTER_PORT": "abc"}, ["MASTER_PORT=abc", "export MASTER_PORT="]),
        (
            {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"},
            ["MASTER_PORT does not say", "unset LOCAL_RANK", "export"],
        ),
    ],
)
def test_processes_that_could_not_meet_are_refused(
    variables: dict[str, str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert_refused(run_here("fit", *TINY, *mode_flags("ddp"), f"--run_dir={tmp_path / 'run'}"), *words)
    assert not list(tmp_path.iterdir())


def test_training_goes_on_when_nobody_reads_any_more(tmp_path: Path) -> None:
    """As in `fit ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, contextlib.redirect_stdout(pipe), contextlib.redirect_stderr(pipe):
        main(["fit", *TINY, f"--run_dir={tmp_path / 'run'}"])
        print("flushed at the end", flush=True)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_a_run_that_ends_before_it_is_validated_warns_of_nothing(tmp_path: Path) -> None:
    result = run_here("fit", *TINY, "--trainer.max_steps=2", f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0
    assert "best " not in result.stdout
    assert "checkpoints/last.ckpt" in result.stdout


def test_a_trial_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the errors promise; nor do loggers of the user's own."""
    monkeypatch.chdir(tmp_path)
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    for flags in ([], own):
        result = run_here("fit", *TINY, "--trainer.fast_dev_run=1", *flags)
        assert result.status == 0, result.stderr
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [["verif", "--modes", "all"], []], ids=str)
def test_an_unknown_command_is_answered_with_those_there_are(words: list[str]) -> None:
    result = run_here(*words)
    assert_refused(result, *words[:1], "fit, validate, test, predict", *COMMANDS)
    assert result.stderr.endswith("\n  see python -m lit_cifar --help\n")


@pytest.mark.parametrize("command", ["fit", ""])
def test_the_help_that_an_error_names_is_there(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the subcommand, where there is one."""
    words = [command, "--typo"] if command else ["--typo", "fit"]
    monkeypatch.setattr(sys, "argv", ["lit_cifar", *words])
    result = run_here(*words)
    assert_refused(result, "--typo")
    assert result.stderr.split("see ")[1].split() == ["python", "-m", "lit_cifar", *command.split(), "--help"]


@pytest.mark.parametrize(
    ("name", "argument", "answer"),
    [
        ("pp", "num_microbatches=8", "PipelineStrategy num_microbatches=8"),
        ("mp", "cuts=['layer2']", "LayerParallelStrategy cuts=['layer2']"),
        ("ddp_pp", "num_microbatches=8", "PipelineStrategy num_stages=2 num_microbatches=8"),
        ("tp", "tensor_parallel_size=2", "ShardedStrategy data_parallel_size=1 tensor_parallel_size=2"),
        ("tp", "data_parallel_size=2", "ShardedStrategy data_parallel_size=2 tensor_parallel_size=null"),
        (
            "ddp_spawn",
            "find_unused_parameters=true",
            "DDPStrategy find_unused_parameters=true start_method=spawn",
        ),
    ],
)
def test_a_short_name_with_arguments_is_answered_with_its_class(name: str, argument: str, answer: str) -> None:
    strategy = "--trainer.strategy"
    result = run_here("fit", *TINY, f"{strategy}={name}", f"{strategy}.{argument}")
    assert_refused(result, f"{strategy}={name} is a short name")
    flags = shlex.split(result.stderr.partition("\n  use ")[2])
    assert sorted(flags) == sorted(
        [f"{strategy}={answer.split()[0]}", *(f"{strategy}.{word}" for word in answer.split()[1:])]
    )
    assert run_here("fit", *TINY, *flags, "--print_config").status == 0


OF_CHECKPOINT = ["--ckpt_path={checkpoint}"]
HELD = "{checkpoint}: the checkpoint holds tiny with the imagenet stem and 10 classes"
REFUSED_LATER = {
    "another stem": ("test", [*OF_CHECKPOINT, "--model.stem=cifar"], [HELD, "--model.stem"]),
    "another network": ("test", [*OF_CHECKPOINT, "--model.arch=resnet18"], [HELD, "--model.arch"]),
    "no held-out images": ("validate", [*OF_CHECKPOINT, "--data.val_size=0"], ["--data.val_size"]),
    "no folder": ("predict", OF_CHECKPOINT, ["--data.predict_dir"]),
    "classes of another data set": (
        "predict",
        [*OF_CHECKPOINT, "--data.dataset=cifar10", "--data.predict_dir=."],
        ["{checkpoint}: ", "trained on synthetic, not on cifar10", "--data.dataset=synthetic"],
    ),
    "a word for the best of this process": ("test", ["--ckpt_path=best"], ["no checkpoint best"]),
    "a word for the last of this process": ("test", ["--ckpt_path=last"], ["no checkpoint last"]),
} | {
    f"{command} of nothing": (command, [], ["untrained", "--ckpt_path"]) for command in ("validate", "test", "predict")
}


@pytest.mark.parametrize(("subcommand", "flags", "words"), REFUSED_LATER.values(), ids=REFUSED_LATER)
def test_what_cannot_be_evaluated_is_refused(
    subcommand: str, flags: list[str], words: list[str], trained: Path, tmp_path: Path
) -> None:
    checkpoint = trained / "checkpoints" / "last.ckpt"
    given = [flag.format(checkpoint=checkpoint) for flag in flags]
    result = run_here(subcommand, *TINY, *given, f"--run_dir={tmp_path / 'run'}")
    assert_refused(result, *(word.format(checkpoint=checkpoint) for word in words))
    assert not (tmp_path / "run").exists()


def test_a_second_run_leaves_the_first_alone(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    result = run_here("fit", *TINY, f"--run_dir={trained}")
    assert_refused(result, "is not empty", f"--run_dir={trained}-2")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(run_here("fit", *TINY, f"--run_dir={tmp_path / 'file' / 'run'}"), "cannot be written")


def test_a_run_folder_holds_everything(trained: Path) -> None:
    names = {path.name.split(".")[0] if "tfevents" in path.name else path.name for path in trained.iterdir()}
    assert names == {
        ".lock",
        "checkpoints",
        "config.yaml",
        "confusion.csv",
        "environment.json",
        "events",
        "hparams.yaml",
        "metrics.csv",
        "per_rank.csv",
        "sample_audit.csv",
        "weights.sha256",
    }
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 16
    assert config["trainer"]["num_sanity_val_steps"] == 0  # no validation comes before the first step
    assert config["run_dir"] is None  # or a command that reads this file would write here
    assert environment_of(trained)["data"] == "synthetic"
    columns = (trained / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/acc", "train/images_per_s", "val/loss", "val/acc", "val/acc_top5"} <= set(columns)
    assert counts(trained, "val")["all"][1] == 16


def test_without_validation_the_last_epoch_is_kept(tmp_path: Path) -> None:
    """After every epoch, before the first step of the next, not only at the end of the run."""
    flags = ["--data.val_size=0", "--trainer.max_epochs=3", "--trainer.callbacks+=recorder.StopBefore"]
    with pytest.raises(RuntimeError, match="stopped before epoch 2"):
        run_here("fit", *TINY, *flags, "--trainer.callbacks.epoch=2", f"--run_dir={tmp_path / 'run'}")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["last.ckpt"]
    position = read_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")["position"]
    assert (position["epoch"], position["step"]) == (1, 0)


@pytest.mark.filterwarnings("ignore:the learning rate schedule of the checkpoint")  # by the first run, which is shorter
def test_a_resumed_run_begins_with_the_very_weights_that_were_saved(tmp_path: Path) -> None:
    """In float64 too, whose weights a network of float32 would round."""
    precise = [*TINY, "--trainer.precision=64-true"]
    assert run_here("fit", *precise, f"--run_dir={tmp_path / 'first'}").status == 0
    last = tmp_path / "first" / "checkpoints" / "last.ckpt"
    keep = ["--trainer.callbacks+=recorder.KeepFirstWeights", f"--trainer.callbacks.path={tmp_path / 'weights.pt'}"]
    resume = [f"--ckpt_path={last}", "--trainer.max_epochs=2", f"--run_dir={tmp_path / 'second'}"]
    assert run_here("fit", *precise, *resume, *keep).status == 0
    begun, saved = torch.load(tmp_path / "weights.pt", weights_only=True), read_checkpoint(last)["state_dict"]
    assert begun.keys() == saved.keys()
    assert all(begun[name].equal(tensor) for name, tensor in saved.items())


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--best_checkpoint.monitor=abc"], "abc"),
        (["--trainer.limit_val_batches=0.5"], "limit_val_batches"),
        (["--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor=abc"], "abc"),
    ],
)
def test_what_lightning_refuses_in_the_run_is_said_in_words(flags: list[str], word: str, tmp_path: Path) -> None:
    assert_refused(run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}"), word, "--help")


def test_a_checkpoint_holds_plain_keys_and_no_code(trained: Path) -> None:
    checkpoint = read_checkpoint(trained / "checkpoints" / "best.ckpt")
    known = {"arch": "tiny", "stem": "imagenet", "num_classes": 10}
    assert checkpoint["lit_cifar"] == known | {"image_size": 32, "network": None}
    assert "layer1.0.conv1.weight" in checkpoint["state_dict"]
    assert not [key for key in checkpoint["state_dict"] if "network" in key or "metrics" in key]


def test_the_printed_commands_work(trained: Path, tmp_path: Path) -> None:
    """`fit` prints how to test its best checkpoint, whatever others the user keeps; its config serves that command."""
    own = ["--trainer.callbacks+=ModelCheckpoint", "--trainer.callbacks.monitor=train/loss"]
    run = tmp_path / "my run"
    result = run_here("fit", *TINY, *own, "--trainer.callbacks.filename=own", f"--run_dir={run}")
    assert (run / "checkpoints" / "own.ckpt").exists()
    lines = {line[:12].strip(): line[12:] for line in result.stdout.splitlines()}
    assert lines["result"].startswith("best val/acc 0.")
    assert shlex.split(lines["run folder"]) == [str(run)]
    assert shlex.split(lines["look at it"]) == ["tensorboard", "--logdir", str(run), "--host", "localhost"]
    assert shlex.split(lines["report"]) == ["python", "-m", "lit_cifar", "report", str(run)]
    arguments = shlex.split(lines["test it"])[3:]
    assert arguments[-1].endswith("checkpoints/best.ckpt")
    tested = run_here(*arguments, f"--run_dir={tmp_path / 'test'}")
    assert tested.status == 0
    assert counts(tmp_path / "test")["all"][1] == 100


def test_predict_lists_every_file_in_order(trained: Path, tmp_path: Path) -> None:
    folder = tmp_path / "photos"
    folder.mkdir()
    for name in ("c.png", "a.jpg"):
        Image.effect_noise((48, 40), 90).convert("RGB").save(folder / name)
    (folder / "b.png").write_bytes(b"not an image")
    run = tmp_path / "run"
    flags = [f"--ckpt_path={trained / 'checkpoints' / 'last.ckpt'}", f"--data.predict_dir={folder}"]
    result = run_here("predict", *TINY, *flags, f"--run_dir={run}")
    assert result.status == 0
    assert "not read    1 of 3 files; the first is b.png: not an image (PNG, " in result.stdout
    rows = list(csv.DictReader((run / "predictions.csv").read_text().splitlines()))
    assert [row["file"] for row in rows] == ["a.jpg", "b.png", "c.png"]
    assert [bool(row["class"]) for row in rows] == [True, False, True]
    assert rows[1]["error"]


def test_learning_rate_scaling_is_printed_and_applied(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    flags = ["--model.lr_scaling=linear", "--model.optimizer.lr=0.8"]
    flags += ["--model.lr_scheduler=StepLR", "--model.lr_scheduler.step_size=1"]
    with caplog.at_level("INFO"):
        assert run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}").status == 0
    assert "linear scaling from a global batch of 128 to 16" in caplog.text
    metrics = csv.DictReader((tmp_path / "run" / "metrics.csv").read_text().splitlines())
    rates = [row["lr-NesterovSGD"] for row in metrics if row["lr-NesterovSGD"]]
    assert float(rates[0]) == pytest.approx(0.1)


def test_an_optimizer_is_chosen_by_name(tmp_path: Path) -> None:
    flags = ["--model.optimizer=AdamW", "--model.optimizer.lr=1e-3"]
    flags += ["--model.lr_scheduler=lit_cifar.WarmupDecay", "--model.lr_scheduler.decay=cosine"]
    assert run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}").status == 0
    assert "lr-AdamW" in (tmp_path / "run" / "metrics.csv").read_text()
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["optimizer"]["init_args"]
    assert chosen["weight_decay"] == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]  # not the default's


def test_help_names_the_commands_and_says_what_they_do() -> None:
    shown = launch("--help").stdout
    assert shown.startswith("usage: python -m lit_cifar ")
    assert "in any mode of parallelism." in shown
    lines = [line.split() for line in shown.splitlines()]
    for command in ("fit", "validate", "test", "predict", *COMMANDS):
        assert any(line[0] == command and len(line) > 3 for line in lines if line)


def test_the_version_is_known_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the package, and so to the runs of a checkout; the distribution takes it from there."""

    def unknown(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    for asked in ("distribution", "version"):
        monkeypatch.setattr(metadata, asked, unknown)
    fresh = runpy.run_path(lit_cifar.__file__)
    assert fresh["__version__"] == versions()["lit-cifar"] == __version__
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["hatch"]["version"]["path"] == "lit_cifar/__init__.py"


@pytest.mark.parametrize("subcommand", ["fit", "test"])
def test_help_on_checkpoints_offers_nothing_that_is_refused(subcommand: str) -> None:
    shown = " ".join(run_here(subcommand, "--help=all").stdout.rpartition("--ckpt_path CKPT_PATH\n")[2].split())
    assert shown.startswith("Checkpoint to ")
    assert "--weights_only" in shown
    assert "false is refused" in shown
    assert not any(word in shown for word in ('"last"', '"best"', "hpc", "registry", "weights_only=False"))


def test_callbacks_that_save_come_last_and_the_agreement_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(
        CLI, "_run_subcommand", lambda cli, _: names.extend(type(each).__name__ for each in cli.trainer.callbacks)
    )
    result = run_here("fit", *TINY, "--trainer.callbacks+=recorder.KeepFirstWeights", "--trainer.callbacks.path=x")
    assert result.status == 0, result.stderr
    assert names[:3] == ["SameStart", "StepBoundary", "Watchdog"]
    assert names[-2:] == ["BestCheckpoint", "LastCheckpoint"]
    assert "KeepFirstWeights" in names[3:-2]


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        (["fit", "--trainer.max_steps=1"], False),
        (["fit", "--trainer.devices=2"], False),  # Lightning's own ddp
        (["fit", "--trainer.strategy=ddp_spawn"], False),
        (["fit", "--trainer.strategy=ddp_mp"], True),
        (["fit", "--trainer.strategy=PipelineStrategy"], True),
        (["fit", "-c", "run.yaml"], True),
        (["--config=run.yaml", "fit"], True),
        (["fit", "--trainer", "{strategy: pp}"], True),
    ],
)
def test_strategies_are_known_where_they_may_be_asked_for(words: list[str], loads: bool) -> None:
    assert any(MAY_NAME_STRATEGY.search(word) for word in words) == loads


def test_a_fit_on_one_device_imports_no_strategy_and_no_monitor(tmp_path: Path) -> None:
    program = f"""import sys
from lit_cifar.cli.main import CLI, MAY_NAME_STRATEGY, main
main({["fit", *TINY, f"--run_dir={tmp_path / 'run'}"]!r})
print("loaded", sorted(name for name in sys.modules if name.startswith(("lit_cifar.strategies", "lit_cifar.watchdog"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded ['lit_cifar.watchdog', 'lit_cifar.watchdog.callback']"
