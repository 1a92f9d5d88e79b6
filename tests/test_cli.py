"""The command line as a user meets it: help, what a run finds wrong, and what it leaves; `test_refusals` has more."""

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import warnings
from ast import literal_eval
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import pytest
import torch
import yaml
from commands import TINY, callback, counts, environment_of, graded, launch, mode_flags, refused, run_here
from documents import ROOT
from lightning.pytorch import Callback

import lit_cifar
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.cli.main import CLI, MAY_NAME_STRATEGY, TOOLS, main
from lit_cifar.launch import startup
from lit_cifar.task.callbacks import skip_idle_hooks


def pipe_without_a_reader(mode: str) -> TextIO:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, mode)


@pytest.mark.parametrize(
    ("stream", "told"),
    [
        (pipe_without_a_reader, ""),  # as in `fit ... | head -1`
        (Path("/dev/full").open, "lit_cifar: what stdout shows ends here: [Errno 28] No space left on device\n"),
    ],
)
def test_training_goes_on_without_a_usable_stream(
    stream: Callable[[str], TextIO], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stream("w") as broken:
        with contextlib.redirect_stdout(broken):
            main(["fit", *TINY, "--trainer.enable_progress_bar=true", f"--run_dir={tmp_path / 'run'}"])
        with contextlib.redirect_stderr(broken), pytest.raises(SystemExit, match="2"):
            main(["doctor", "--nonsense"])
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert capsys.readouterr().err == told


def test_a_descriptor_that_the_caller_has_closed_is_taken_by_no_file() -> None:
    occupy = f"import os, runpy, sys; runpy.run_path({startup.__file__!r})['open_closed_streams']()"
    use = "sys.stdout.write('-'); sys.exit(os.open(os.devnull, os.O_RDONLY) < 3)"
    words = shlex.join([sys.executable, "-c", f"{occupy}; {use}"])
    assert subprocess.run(["sh", "-c", f"{words} <&- >&- 2>&-"]).returncode == 0


def test_only_what_a_user_can_act_on_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others would end a run under PYTHONWARNINGS=error. Nothing is shuffled where the same batches are repeated."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "all")  # else it gives each once in a process
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run_here("fit", *TINY, "--trainer.overfit_batches=2", f"--run_dir={tmp_path / 'run'}")


def test_a_trial_run_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the errors promise; nor does a logger of the user's own."""
    monkeypatch.chdir(tmp_path)
    own = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=logs"]
    run_here("fit", *TINY, "--trainer.fast_dev_run=1", *own)
    assert list(tmp_path.iterdir()) == []


def test_hooks_of_a_step_that_do_nothing_are_passed_over_and_no_others() -> None:
    class Own(Callback):
        def on_train_batch_end(self, *_: Any, **__: Any) -> None:
            pass

    own = Own()
    own.on_after_backward = lambda *_: None  # type: ignore[method-assign]
    skip_idle_hooks([own])
    called = {name for name in vars(Callback) if name.startswith("on_") and callable(getattr(own, name))}
    kept = {"on_train_batch_end", "on_after_backward"}
    idle = {"on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_before_optimizer_step"}
    assert kept <= called
    assert {name for name in vars(Callback) if name.startswith("on_")} - called == idle


@pytest.mark.parametrize(
    ("words", "named", "command"),
    [
        ("verif --modes all", ["verif", "fit, validate, test, predict", *TOOLS], ""),
        ("", ["fit, validate, test, predict", *TOOLS], ""),
        ("fit --typo", ["--typo"], "fit "),
    ],
)
def test_wrong_words_get_help(words: str, named: list[str], command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the subcommand, where there is one."""
    monkeypatch.setattr(sys, "argv", ["lit_cifar", *words.split()])
    said = refused(*words.split(), says=named)
    assert said.split("see ")[1] == f"python -m lit_cifar {command}--help\n"


@pytest.mark.parametrize(
    ("asked", "answer"),
    [
        ("pp num_microbatches=8", "PipelineStrategy num_microbatches=8"),
        ("mp num_stages=4", "LayerParallelStrategy num_stages=4"),
        ("ddp_pp num_microbatches=8", "PipelineStrategy num_stages=2 num_microbatches=8"),
        ("tp process_group_backend=gloo", "ShardedStrategy splits_layers=True process_group_backend=gloo"),
        ("ddp_spawn find_unused_parameters=true", "DDPStrategy find_unused_parameters=true start_method=spawn"),
    ],
)
def test_a_short_name_with_arguments_is_answered_with_its_class(asked: str, answer: str) -> None:
    def flags(words: str) -> list[str]:
        name, *arguments = words.split()
        return [f"--trainer.strategy={name}", *(f"--trainer.strategy.{argument}" for argument in arguments)]

    said = refused("fit", *TINY, *flags(asked), says=[f"--trainer.strategy={asked.split()[0]} is a short name"])
    pasted = shlex.split(said.partition("\n  use ")[2])
    assert sorted(pasted) == sorted(flags(answer))
    run_here("fit", *TINY, *pasted, "--print_config")


def test_a_run_folder_stands_for_its_settings_and_its_best_checkpoint(trained: Path, tmp_path: Path) -> None:
    checkpoint = trained / "checkpoints" / "best.ckpt"
    shown = run_here("test", trained, f"--run_dir={tmp_path / 'run'}", "--trainer.precision=64-true").stdout
    assert shown.startswith(f"test        {checkpoint}\n")
    assert "64-true" in shown  # flags win over the run's settings
    alone = tmp_path / "alone"
    (alone / "checkpoints").mkdir(parents=True)
    shutil.copy(trained / "config.yaml", alone)
    refused("test", alone, says=["alone is no run folder with a checkpoint"])
    shutil.copy(trained / "checkpoints" / "last.ckpt", alone / "checkpoints")
    assert "last.ckpt" in run_here("validate", alone, f"--run_dir={tmp_path / 'validated'}").stdout
    run_here("test", trained, f"--run_dir={tmp_path / 'dp'}", "--trainer.sync_batchnorm=true", *mode_flags("dp"))


def test_an_evaluation_that_a_signal_stops_has_not_ended_well(trained: Path, tmp_path: Path) -> None:
    stopping = callback("stopping.SignalAfter", step=0)
    assert launch("test", trained, *stopping, f"--run_dir={tmp_path / 'run'}", check=False).status == -signal.SIGTERM


REFUSED_LATER = {
    "test --ckpt_path={} --model.stem=cifar": ["{}: the checkpoint holds tiny with the imagenet stem", "--model.stem"],
    "validate --ckpt_path={} --data.val_size=0": ["--data.val_size"],
    "predict --ckpt_path={}": ["--data.predict_dir"],
    "predict --ckpt_path={} --data.dataset=cifar10 --data.predict_dir=.": ["{}: ", "--data.dataset=synthetic"],
    "test --ckpt_path=best": ["no checkpoint best"],  # Lightning's word for that of this process
    **{command: ["untrained", "RUN_FOLDER", "--ckpt_path"] for command in ("validate", "test", "predict")},
    "fit --trainer.callbacks+=analysis.timeline.Timeline": ["records stages"],
    "fit --best_checkpoint.monitor=lr-abc": ["lr-abc", "--help"],
    "fit --trainer.limit_val_batches=0.5": ["limit_val_batches", "--help"],
    "fit --trainer.callbacks+=EarlyStopping --trainer.callbacks.monitor=lr-abc": ["abc", "--help"],
}


@pytest.mark.parametrize("words", REFUSED_LATER)
def test_what_only_the_run_itself_finds_is_said_in_words_too(words: str, trained: Path, tmp_path: Path) -> None:
    """And what cannot be evaluated, before it has a folder."""
    checkpoint = trained / "checkpoints" / "last.ckpt"
    subcommand, *flags = words.format(checkpoint).split()
    expected = [word.format(checkpoint) for word in REFUSED_LATER[words]]
    refused(subcommand, *TINY, *flags, f"--run_dir={tmp_path / 'run'}", says=expected)
    assert subcommand == "fit" or not (tmp_path / "run").exists()


def test_every_path_is_expanded_in_one_place_or_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CLI] = []
    monkeypatch.setattr(CLI, "_run_subcommand", lambda cli, subcommand: made.append(cli))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("SCRATCH", str(tmp_path / "scratch"))
    (tmp_path / "settings.yaml").write_text("run_dir: $SCRATCH/x")
    flags = ["fit", *TINY, "--data.root=~/data", *callback("ModelCheckpoint", dirpath="~/kept")]
    logger = ["--trainer.logger=CSVLogger", "--trainer.logger.save_dir=${SCRATCH}"]
    run_here(*flags, *logger, f"--config={tmp_path / 'settings.yaml'}")
    (cli,) = made
    assert cli._arguments.run_dir == f"{tmp_path}/scratch/x"
    assert cli._arguments.data.root == f"{tmp_path}/home/data"
    assert cli._own_loggers[0].init_args.save_dir == f"{tmp_path}/scratch"
    assert f"{tmp_path}/home/kept" in [str(getattr(each, "dirpath", "")) for each in cli.trainer.callbacks]
    refused(*flags, "--run_dir=~nobody-here/x", says=["--run_dir=~nobody-here/x: there is no ~nobody-here"])
    refused(*flags, "--run_dir=$NONE/x", says=["--run_dir=$NONE/x: there is no $NONE"])
    refused("test", "~/none", says=[f"{tmp_path}/home/none"])
    assert [path.name for path in tmp_path.iterdir()] == ["settings.yaml"]


def test_what_needs_no_training_imports_none_of_it() -> None:
    """The overview, the version, a mistyped command and one that has gone."""
    asked = {
        "--version": lit_cifar.__version__,
        "--help": "usage",
        "fitt": "did you mean fit?",
        "train": "did you mean fit?",
        "--trainer.max_epochs=1 fit": "--trainer.max_epochs=1 stands before the command",
        "export": "has gone",
        "": "missing",
    }
    code = "import sys\nfrom lit_cifar.cli.overview import answer\n"
    code += "try: answer(sys.argv[1:])\nfinally: print([*sys.modules])"
    for word, said in asked.items():
        command = [sys.executable, "-c", code, *word.split()]
        found = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert said in found.stdout + found.stderr
        assert found.returncode == (0 if word in ("--version", "--help") else 2)
        assert not {"torch", "lightning", "jsonargparse"} & {*literal_eval(found.stdout.splitlines()[-1])}


@pytest.mark.parametrize(
    ("command", "moment"),
    graded(
        ("relations", "a process begins"),
        slow=[
            *((mode, moment) for mode in ("ddp", "ddp_spawn") for moment in ("run folder", "", "model")),
            *((name, moment) for name in ("ddp", "ddp_spawn", "verify") for moment in ("a process begins", "alone")),
        ],
    ),
)
def test_an_interrupt_before_training_ends_all_at_once(command: str, moment: str, tmp_path: Path) -> None:
    """Sent to all processes, as by a terminal, or to the first alone, while they begin, import or wait for others."""
    moment, send = ("a process begins", os.kill) if moment == "alone" else (moment, os.killpg)
    begins = (
        "import os, re, sys, time\n"
        "if 'LOCAL_RANK' in os.environ or re.search('multiprocessing.fork', ' '.join(sys.orig_argv)):\n"
        "    print('a process begins', file=sys.stderr, flush=True); time.sleep(1)"
    )
    if moment == "a process begins":
        (tmp_path / "sitecustomize.py").write_text(begins)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    (tmp_path / "x.py").touch()
    words = {"verify": ["verify"], "relations": ["relations", str(tmp_path / "x.py")]}.get(command)
    words = words or ["fit", *TINY, *mode_flags(command), f"--run_dir={tmp_path / 'x'}"]
    said = tmp_path / "said"
    with said.open("wb") as file:
        words = [sys.executable, "-m", "lit_cifar", *words]
        run = subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True, env=environment)
        try:
            while run.poll() is None and moment not in said.read_text():
                time.sleep(0.01)
            if not moment:
                time.sleep(0.7)  # it imports
            send(run.pid, signal.SIGINT)
            assert run.wait(60) in (130, -signal.SIGINT)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
    assert said.read_text().splitlines()[-1] == "lit_cifar: interrupted"
    assert "Traceback" not in said.read_text()


def test_an_interrupt_that_was_held_back_ends_a_process_that_is_ready() -> None:
    held = "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT]); signal.raise_signal(signal.SIGINT)"
    program = f"import signal, time; from lit_cifar import startup; {held}; startup.end_at_interrupt(); time.sleep(60)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (130, "lit_cifar: interrupted\n")


def test_a_run_leaves_alone_what_is_there(trained: Path, tmp_path: Path) -> None:
    """The folder of another run, and a file."""
    before = {path: path.stat().st_mtime_ns for path in trained.rglob("*")}
    refused("fit", *TINY, f"--run_dir={trained}", says=["is not empty", f"--run_dir={trained}-2"])
    refused("fit", *TINY, f"--run_dir={trained}-\udce9", says=["characters that cannot be printed"])
    assert {path: path.stat().st_mtime_ns for path in trained.rglob("*")} == before
    (tmp_path / "file").touch()
    refused("fit", *TINY, f"--run_dir={tmp_path / 'file' / 'run'}", says=["cannot be written"])


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
def test_own_checkpoint_callbacks_and_the_resume_point_do_not_meet(tmp_path: Path) -> None:
    """They save weights alone under our names, before and after ours; no training goes on from these."""
    run, folder = tmp_path / "run", tmp_path / "run" / "checkpoints"
    own = callback("ModelCheckpoint", save_last="true", save_weights_only="true", every_n_train_steps=1, save_top_k=0)
    own += callback("ModelCheckpoint", filename="previous", save_last="link", every_n_epochs=1)
    own += callback("lit_cifar.checkpoint.callbacks.BestCheckpoint", monitor="val/loss", mode="min")
    run_here("fit", *TINY, *own, f"--run_dir={run}", "--last_checkpoint.every_n_steps=2")
    steps = {str(path.relative_to(folder)): read_checkpoint(path)["global_step"] for path in folder.rglob("*.ckpt")}
    of_user = {"ModelCheckpoint/last.ckpt": 5, "ModelCheckpoint/previous.ckpt": 5, "BestCheckpoint/best.ckpt": 5}
    assert steps == {"last.ckpt": 5, "previous.ckpt": 4, "best.ckpt": 5, "ModelCheckpoint/last-v1.ckpt": 5} | of_user
    alone = next(path for path in folder.glob("*/last*") if "optimizer_states" not in read_checkpoint(path))

    refused("fit", *TINY, f"--ckpt_path={alone}", f"--run_dir={tmp_path / 'start'}", says=["holds no training"])
    run_here("test", *TINY, f"--ckpt_path={alone}", f"--run_dir={tmp_path / 'test'}")

    shutil.copy(alone, folder / "last.ckpt")  # as an older version let it happen
    with pytest.warns(UserWarning, match="last.ckpt holds weights and no state of an optimizer"):
        run_here("fit", *TINY, *own, f"--run_dir={run}", "--resume=auto", "--trainer.max_steps=5")
    shutil.copy(alone, folder / "last.ckpt")
    shutil.copy(alone, folder / "previous.ckpt")
    refused("fit", *TINY, f"--run_dir={run}", "--resume=auto", says=["no training can go on from it"])


@pytest.mark.parametrize(
    ("kind", "own"),
    [
        ("ModelCheckpoint", {"dirpath": "RUN/checkpoints"}),
        ("ModelCheckpoint", {"dirpath": "RUN/x/../checkpoints"}),
        ("ModelCheckpoint", {"filename": "../last"}),
        ("OnExceptionCheckpoint", {"dirpath": "RUN/checkpoints/x", "filename": "../last"}),
    ],
)
def test_own_checkpoint_callbacks_may_not_write_where_we_do(kind: str, own: dict[str, str], tmp_path: Path) -> None:
    given = {name: value.replace("RUN", str(tmp_path / "run")) for name, value in own.items()}
    says = [f"{kind} would write into {tmp_path / 'run' / 'checkpoints'}"]
    refused("fit", *TINY, *callback(kind, **given), f"--run_dir={tmp_path / 'run'}", says=says)
    assert not (tmp_path / "run").exists()


def test_no_fit_starts_from_lightnings_own_save(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At an exception, or for SLURM: Lightning would, without a word of the user's."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(trained / "checkpoints" / "last.ckpt", "on_exception.ckpt")
    fitting = ["fit", *TINY, "--run_dir=run"]
    says = ["on_exception.ckpt is there", "--ckpt_path to go on from it"]
    refused(*fitting, *callback("OnExceptionCheckpoint", dirpath=tmp_path), says=says)
    Path("on_exception.ckpt").rename("hpc_ckpt_1.ckpt")
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    refused(*fitting, says=["hpc_ckpt_1.ckpt is there", "--ckpt_path to go on"])
    torch.save(read_checkpoint(Path("hpc_ckpt_1.ckpt"))["state_dict"], "weights.pth")
    refused("test", *TINY, "--ckpt_path=weights.pth", says=["no training of", "fine_tuning.weights=weights"])
    assert not Path("run").exists()


def test_a_run_folder_holds_everything(trained: Path) -> None:
    """The checkpoint plain keys, no code."""
    names = {path.name.split(".")[0] if "tfevents" in path.name else path.name for path in trained.iterdir()}
    tables = {"confusion.csv", "metrics.csv", "per_rank.csv", "sample_audit.csv", "weights.sha256"}
    settings = yaml.safe_load((trained / "hparams.yaml").read_text())
    assert (settings["model"]["arch"], settings["data"]["batch_size"]) == ("tiny", 16)
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
    run = tmp_path / "my run"
    result = run_here("fit", *TINY, f"--run_dir={run}")
    lines = {line[:12].strip(): line[12:] for line in result.stdout.splitlines()}
    assert lines["result"].startswith("best val/acc 0.")
    assert shlex.split(lines["run folder"]) == [str(run)]
    assert shlex.split(lines["look at it"]) == ["tensorboard", "--logdir", str(run), "--host", "localhost"]
    arguments = shlex.split(lines["test it"])[3:]
    tested = run_here(*arguments, f"--run_dir={tmp_path / 'test'}").stdout
    assert f"{run}/checkpoints/best.ckpt" in tested
    assert counts(tmp_path / "test")["all"][1] == 100


@pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11 copies it
def test_the_code_of_the_page_exports_a_network(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (ROOT / "docs" / "data-and-networks.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n([^`]*torch\.export[^`]*)```", page)
    monkeypatch.chdir(tmp_path)
    Path("RUN").symlink_to(trained)
    scope: dict[str, Any] = {}
    exec(code, scope)
    images = torch.randn(5, 3, 32, 32)
    torch.testing.assert_close(torch.export.load("network.pt2").module()(images), scope["model"](images))


def test_an_optimizer_is_chosen_by_name_and_a_run_that_is_not_validated_warns_of_nothing(tmp_path: Path) -> None:
    flags = ["--model.optimizer=AdamW", "--model.optimizer.lr=1e-3", "--trainer.max_steps=2"]
    flags += ["--model.lr_scheduler=lit_cifar.WarmupDecay", "--model.lr_scheduler.decay=cosine"]
    result = run_here("fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}")
    assert "best " not in result.stdout
    assert f"test {tmp_path / 'run'}\n" in result.stdout
    assert "lr-AdamW" in (tmp_path / "run" / "metrics.csv").read_text()
    chosen = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["model"]["optimizer"]["init_args"]
    assert chosen["weight_decay"] == torch.optim.AdamW([torch.zeros(1)]).defaults["weight_decay"]  # not the default's
    more = ["--trainer.max_steps=4", "--model.optimizer.amsgrad=true", "--resume=auto"]
    refused("fit", *TINY, *flags, *more, f"--run_dir={tmp_path / 'run'}", says=["needs max_exp_avg_sq of"])


def test_callbacks_that_save_come_last_and_the_agreement_first(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[CLI] = []
    monkeypatch.setattr(CLI, "_run_subcommand", lambda cli, subcommand: made.append(cli))
    run_here("fit", *TINY, *callback("stopping.SlowSteps", seconds=0))
    names = [type(each).__name__ for each in made[0].trainer.callbacks]
    assert names[:3] == ["SameStart", "StepBoundary", "Watchdog"]
    assert names[-2:] == ["BestCheckpoint", "LastCheckpoint"]
    assert "SlowSteps" in names[3:-2]


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


WATCHDOG = [f"lit_cifar.checks.watchdog{name}" for name in ("", ".callback")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "rooms", "loaded"),
    [
        ([], ("lit_cifar.strategies", "lit_cifar.checks.watchdog", "lit_cifar.checkpoint.pretrained"), WATCHDOG),
        (mode_flags("ddp"), ("lit_cifar.checks.relations",), []),
    ],
)
def test_fit_imports_what_it_needs(flags: list[str], rooms: tuple[str, ...], loaded: list[str], tmp_path: Path) -> None:
    """On one device no strategy and no monitor; on two no relations."""
    script = tmp_path / "script.py"
    script.write_text(f"""import os, sys
from lit_cifar.cli.main import main
main({["fit", *TINY, *flags, f"--run_dir={tmp_path / 'run'}"]!r})
if not int(os.environ.get("LOCAL_RANK", "0")):
    print("loaded", sorted(name for name in sys.modules if name.startswith({rooms!r})))
""")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"loaded {loaded}"
