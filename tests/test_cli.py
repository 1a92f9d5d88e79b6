"""The command line as a user meets it: what bad input is answered with, and what a run leaves behind."""

import contextlib
import os
import runpy
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import yaml
from commands import TINY, counts, environment_of, mode_flags, refused, run_here

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


def assert_refused(command: list[str], *words: str) -> str:
    """Exit status 2 and at most five lines that say `words`, which are returned."""
    said = refused(*command)
    assert [word for word in words if word not in said] == [], said
    return said


REFUSED = {
    "--trainer.strategy=dp --trainer.devices=3": ["--data.batch_size=15 or"],
    "--trainer.accumulate_grad_batches=3": ["3 accumulation steps", "=15 or"],
    "--trainer.strategy=dpp": ["dpp", "ddp_spawn", "dp"],
    "--data.batchsize=3": ["batchsize", "did you mean --data.batch_size?", "--help"],
    "--trainer.max_epoch=3": ["--trainer.max_epoch=3", "did you mean --trainer.max_epochs?"],
    "--model.optimizer.lr=-1": ["learning rate: -1"],
    "--trainer.limit_train_batches=0": ["--trainer.limit_train_batches=0 would train nothing"],
    "--trainer.accumulate_grad_batches=4 --trainer.limit_train_batches=6": ["=4 or --trainer.limit_train_batches=8"],
    "--trainer.accumulate_grad_batches=2 --trainer.overfit_batches=1": ["whole steps: --trainer.overfit_batches=2"],
    "--trainer.callbacks+=StochasticWeightAveraging --trainer.callbacks.swa_lrs=0.01": ["EMAWeightAveraging"],
    "--trainer.max_steps=0": ["--trainer.max_steps=0 would train nothing"],
    "--data.batch_size=many": ["batch_size"],
    "--model.lr_scheduler=StepLR --model.lr_scheduler.step_size=0": ["--model.lr_scheduler.NAME=VALUE"],
    "--trainer.accelerator=cuda": ["CUDA"],
    "--trainer.strategy=fsdp": ["FSDP"],
    "--trainer.devices=-1": ["--trainer.devices=-1", "--trainer.devices=2"],
    "--trainer.devices=abc": ["--trainer.devices=abc", "int > 0"],
    "--trainer.strategy=ddp --trainer.devices=[0,1]": ["devices=[0, 1]", "int > 0"],
    "--trainer.strategy=dp --trainer.num_nodes=2": ["--trainer.num_nodes=2", "--trainer.strategy=ddp"],
    "--trainer.strategy=dp --trainer.devices=2 --trainer.sync_batchnorm=true": ["Drop --trainer.sync_batchnorm"],
    "--trainer.strategy=mp --trainer.devices=10": ["10 stages of a network of 6 blocks"],
    "--trainer.strategy=LayerParallelStrategy --trainer.strategy.cuts=[layer9.0] --trainer.devices=2": ["'layer9.0'"],
    "--trainer.strategy=dp --trainer.devices=2 --model.ghost_batchnorm.dp_size=2": ["--trainer.devices=1"],
    "--trainer.strategy=pp --trainer.devices=2 --data.batch_size=14": ["4 microbatches", "--data.batch_size=16"],
    "--data.val_size=96": ["--data.val_size=9"],
    "--data.num_train=97": ["--data.drop_last=true"],
    "--data.augment=false --data.cutout=8": ["--data.augment=true"],
    "--data.dataset=cifar10 --data.download=false --data.root=nowhere": ["synthetic"],
    "--trainer.logger=[]": ["--trainer.logger=[]", "--trainer.fast_dev_run=N"],
    "--trainer.enable_checkpointing=false": ["--trainer.fast_dev_run=N"],
    "--trainer.barebones=true": ["--trainer.barebones=true", "--trainer.fast_dev_run=N"],
    "--trainer.logger=false": ["--trainer.logger=false", "--trainer.fast_dev_run=N"],
    "--trainer.logger=CometLogger": ["comet"],  # which is not installed
    "--trainer.default_root_dir=x": ["--trainer.default_root_dir=x", "--run_dir=x"],
    "--trainer.strategy.num_microbatches=8": ["=auto ", "=CLASS --trainer.strategy.num_microbatches=8"],
    "--trainer.strategy=ppp --trainer.strategy.num_microbatches=8": ["=ppp ", "--trainer.strategy=CLASS "],
    # A value that an option cannot have: what it can be, and what may have been meant.
    "--data.num_train=many": ["--data.num_train=many must be a whole number or null"],
    "--trainer.precision=bf16mixed": ["did you mean --trainer.precision=bf16-mixed?"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.num_stages=x": ["num_stages=x must be a whole number"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.timeout=soon": ["must be a duration, as 0:10:00"],
    "--trainer.strategy=PipelineStrategy --trainer.strategy.schedule=1F2B": ["GPipe, 1F1B", "schedule=1F1B?"],
    "--data.dataset=fashion-mnist": ["cifar10, fashion_mnist, synthetic, folder", "--data.dataset=fashion_mnist?"],
    "--model.arch=resnet43": ["did you mean --model.arch=resnet34?"],
    "--data.augment=maybe": ["--data.augment=maybe must be true or false"],
    "--model.optimizer=AdmaW --model.optimizer.lr=1": [
        "there is no such class",
        "did you mean --model.optimizer=AdamW?",
    ],
    "--model.optimizer=torch.optim.Sgd": ["did you mean --model.optimizer=SGD?"],
    "--model.lr_scheduler=steplr": ["did you mean --model.lr_scheduler=StepLR?"],
    "--trainer.callbacks+=EarlyStoping": ["did you mean --trainer.callbacks=EarlyStopping?"],
    "--trainer.strategy=PipelineStrategi": ["did you mean --trainer.strategy=PipelineStrategy?", "known ones: ddp, "],
    "--model.optimizer=qqq": ["--model.optimizer=qqq: there is no such class", "--help"],
    "--data.batch_size=0": ["--data.batch_size=0 is the global batch", "pass --data.batch_size=128"],
    "--model.num_classes=11": ["synthetic has 10", "--model.num_classes=10"],
}
WITHOUT_GPU = ("--trainer.accelerator=cuda", "--trainer.strategy=fsdp")


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_before_anything_is_written(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And before Lightning says on what it runs, and with which seed. Nothing of Python's types is in the answer."""
    if flags in WITHOUT_GPU and torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.chdir(tmp_path)
    with caplog.at_level("INFO"):
        said = assert_refused(["fit", *TINY, *flags.split()], *REFUSED[flags])
    assert not any(word in said for word in ("Errors:", "class '"))
    assert caplog.text == ""
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == []


@pytest.mark.parametrize("content", [b"\x8d\xff\x00", b"trainer: {}\0"])
def test_a_config_that_is_not_text_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes(content)
    assert_refused(["fit", f"--config={tmp_path / 'config.yaml'}"], "config")


@pytest.mark.parametrize(
    ("variables", "flags", "words"),
    [
        # As another rank than 0 the only process would write nothing.
        ({"RANK": "1"}, [], ["RANK=1 in the environment", "unset RANK"]),
        ({"LOCAL_RANK": "1"}, [], ["LOCAL_RANK=1 in the environment", "unset LOCAL_RANK"]),
        # Processes that could not meet.
        ({"MASTER_PORT": "abc"}, mode_flags("ddp"), ["MASTER_PORT=abc", "export MASTER_PORT="]),
        (
            {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"},
            mode_flags("ddp"),
            ["MASTER_PORT does not say", "unset LOCAL_RANK", "export"],
        ),
    ],
)
def test_an_environment_in_which_no_run_can_work_is_refused(
    variables: dict[str, str], flags: list[str], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if "1" in variables.values():
        monkeypatch.setattr("lightning.pytorch.utilities.rank_zero_only.rank", 1)  # as Lightning's import finds it
        monkeypatch.setattr("lit_cifar.cli.main.exit_with_parent", list)
    assert_refused(["fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}"], *words)
    assert not list(tmp_path.iterdir())


def test_training_goes_on_when_nobody_reads_any_more(tmp_path: Path) -> None:
    """As in `fit ... | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, contextlib.redirect_stdout(pipe), contextlib.redirect_stderr(pipe):
        main(["fit", *TINY, f"--run_dir={tmp_path / 'run'}"])
        print("flushed at the end", flush=True)
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_a_trial_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the errors promise; nor does a logger of the user's own."""
    monkeypatch.chdir(tmp_path)
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    result = run_here("fit", *TINY, "--trainer.fast_dev_run=1", *own)
    assert result.status == 0, result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named", "command"),
    [
        ("verif --modes all", ["verif", "fit, validate, test, predict", *COMMANDS], ""),
        ("", ["fit, validate, test, predict", *COMMANDS], ""),
        ("fit --typo", ["--typo"], "fit "),
        ("--typo fit", ["--typo"], ""),
    ],
)
def test_wrong_words_are_answered_with_the_help_that_there_is(
    words: str, named: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of the subcommand, where there is one."""
    monkeypatch.setattr(sys, "argv", ["lit_cifar", *words.split()])
    said = assert_refused(words.split(), *named)
    assert said.split("see ")[1] == f"python -m lit_cifar {command}--help\n"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("pp num_microbatches=8", "PipelineStrategy num_microbatches=8"),
        ("mp cuts=['layer2']", "LayerParallelStrategy cuts=['layer2']"),
        ("ddp_pp num_microbatches=8", "PipelineStrategy num_stages=2 num_microbatches=8"),
        ("tp tensor_parallel_size=2", "ShardedStrategy data_parallel_size=1 tensor_parallel_size=2"),
        ("tp data_parallel_size=2", "ShardedStrategy data_parallel_size=2 tensor_parallel_size=null"),
        ("ddp_spawn find_unused_parameters=true", "DDPStrategy find_unused_parameters=true start_method=spawn"),
    ],
)
def test_a_short_name_with_arguments_is_answered_with_its_class(asked: str, answer: str) -> None:
    def flags(words: str) -> list[str]:
        name, *arguments = words.split()
        return [f"--trainer.strategy={name}", *(f"--trainer.strategy.{argument}" for argument in arguments)]

    said = assert_refused(["fit", *TINY, *flags(asked)], f"--trainer.strategy={asked.split()[0]} is a short name")
    pasted = shlex.split(said.partition("\n  use ")[2])
    assert sorted(pasted) == sorted(flags(answer))
    assert run_here("fit", *TINY, *pasted, "--print_config").status == 0


REFUSED_LATER = {
    "test --ckpt_path={} --model.stem=cifar": ["{}: the checkpoint holds tiny with the imagenet stem", "--model.stem"],
    "test --ckpt_path={} --model.arch=resnet18": ["{}: the checkpoint holds tiny with the imagenet", "--model.arch"],
    "validate --ckpt_path={} --data.val_size=0": ["--data.val_size"],
    "predict --ckpt_path={}": ["--data.predict_dir"],
    "predict --ckpt_path={} --data.dataset=cifar10 --data.predict_dir=.": ["{}: ", "--data.dataset=synthetic"],
    "test --ckpt_path=best": ["no checkpoint best"],  # Lightning's words for those of this process
    "test --ckpt_path=last": ["no checkpoint last"],
    **{command: ["untrained", "--ckpt_path"] for command in ("validate", "test", "predict")},
    "fit --best_checkpoint.monitor=abc": ["abc", "--help"],
    "fit --trainer.limit_val_batches=0.5": ["limit_val_batches", "--help"],
    "fit --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=abc": ["abc", "--help"],
}


@pytest.mark.parametrize("words", REFUSED_LATER)
def test_what_only_the_run_itself_finds_is_said_in_words_too(words: str, trained: Path, tmp_path: Path) -> None:
    """And what cannot be evaluated, before it has a folder."""
    checkpoint = trained / "checkpoints" / "last.ckpt"
    subcommand, *flags = words.format(checkpoint).split()
    expected = [word.format(checkpoint) for word in REFUSED_LATER[words]]
    assert_refused([subcommand, *TINY, *flags, f"--run_dir={tmp_path / 'run'}"], *expected)
    assert subcommand == "fit" or not (tmp_path / "run").exists()


def test_a_second_run_leaves_the_first_alone(trained: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    assert_refused(["fit", *TINY, f"--run_dir={trained}"], "is not empty", f"--run_dir={trained}-2")
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before


def test_a_run_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert_refused(["fit", *TINY, f"--run_dir={tmp_path / 'file' / 'run'}"], "cannot be written")


def test_a_run_folder_holds_everything(trained: Path) -> None:
    """The checkpoint plain keys, no code."""
    names = {path.name.split(".")[0] if "tfevents" in path.name else path.name for path in trained.iterdir()}
    tables = {"confusion.csv", "metrics.csv", "per_rank.csv", "sample_audit.csv", "weights.sha256"}
    assert names == tables | {".lock", "checkpoints", "config.yaml", "environment.json", "events", "hparams.yaml"}
    assert {path.name for path in (trained / "checkpoints").iterdir()} == {"best.ckpt", "last.ckpt"}
    config = yaml.safe_load((trained / "config.yaml").read_text())
    assert config["data"]["batch_size"] == 16
    assert config["trainer"]["num_sanity_val_steps"] == 0  # no validation comes before the first step
    assert config["run_dir"] is None  # or a command that reads this file would write here
    assert environment_of(trained)["data"] == "synthetic"
    columns = (trained / "metrics.csv").read_text().splitlines()[0].split(",")
    assert {"train/loss", "train/acc", "train/images_per_s", "val/loss", "val/acc", "val/acc_top5"} <= set(columns)
    assert counts(trained, "val")["all"][1] == 16
    weights = read_checkpoint(trained / "checkpoints" / "best.ckpt")["state_dict"]
    assert "layer1.0.conv1.weight" in weights
    assert not [key for key in weights if "network" in key or "metrics" in key]


def test_the_printed_commands_work(tmp_path: Path) -> None:
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


def test_an_optimizer_is_chosen_by_name_and_a_run_that_is_not_validated_warns_of_nothing(tmp_path: Path) -> None:
    flags = ["--model.optimizer=AdamW", "--model.optimizer.lr=1e-3", "--trainer.max_steps=2"]
    flags += ["--model.lr_scheduler=lit_cifar.WarmupDecay", "--model.lr_scheduler.decay=cosine"]
    result = run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}")
    assert result.status == 0
    assert "best " not in result.stdout
    assert "checkpoints/last.ckpt" in result.stdout
    assert "lr-AdamW" in (tmp_path / "run" / "metrics.csv").read_text()
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["optimizer"]["init_args"]
    assert chosen["weight_decay"] == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]  # not the default's


def test_help_names_the_commands_and_says_what_they_do() -> None:
    shown = run_here("--help").stdout
    assert shown.startswith("usage: python -m lit_cifar ")
    assert "in any mode of parallelism." in shown
    lines = [line.split() for line in shown.splitlines()]
    for command in ("fit", "validate", "test", "predict", *COMMANDS):
        assert any(line[0] == command and len(line) > 3 for line in lines if line)


def test_the_version_is_known_without_an_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the package, and so to the runs of a checkout."""

    def unknown(name: str) -> NoReturn:
        raise metadata.PackageNotFoundError(name)

    for asked in ("distribution", "version"):
        monkeypatch.setattr(metadata, asked, unknown)
    assert runpy.run_path(lit_cifar.__file__)["__version__"] == versions()["lit-cifar"] == __version__


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
from lit_cifar.cli.main import main
main({["fit", *TINY, f"--run_dir={tmp_path / 'run'}"]!r})
print("loaded", sorted(name for name in sys.modules if name.startswith(("lit_cifar.strategies", "lit_cifar.watchdog"))))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded ['lit_cifar.watchdog', 'lit_cifar.watchdog.callback']"
