"""Neither a checkpoint nor a data file can run code: what is read from disk is never unpickled unchecked.

A pickle can name any function to call. Each crafted one here would make a file; none may appear. Nor does a name from a
file steer the terminal, the shell of who pastes a remedy, or Pillow to a program.
"""

import copy
import json
import math
import os
import pickle
import re
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial, reduce
from itertools import pairwise
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, refused, run_here
from data_files import write_python_edition
from PIL import EpsImagePlugin, Image
from torchvision.datasets import CIFAR10

import lit_cifar
from lit_cifar.checkpoint.atomic import LAST, PREVIOUS, newest_valid, write_checkpoint
from lit_cifar.checkpoint.callbacks import BestCheckpoint
from lit_cifar.checkpoint.files import CheckpointFiles
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.data import cifar10
from lit_cifar.data.dataset import open_dataset
from lit_cifar.data.picture_files import FORMATS, read_image
from lit_cifar.errors import CheckpointError, DataError, printable
from lit_cifar.reporting import output

REPOSITORY = Path(lit_cifar.__file__).parents[1]
# What unpickles or could be made to, readers of checkpoints without `weights_only=True`, and what runs a text.
DOUBTFUL = re.compile(
    r"^[ \t]*(?:import|from)\b[^\n]*\b(?:_?pickle|cloudpickle|dill|joblib|marshal|shelve)\b"
    r"|\b(?:torch\.load|(?<!def )load_from_checkpoint|strategy\.load_checkpoint)\((?!.{0,200}weights_only=True)"
    r"|\b(?:load_state_dict_from_url|read_pickle|unsafe_load|add_safe_globals|yaml\.load|torch\.jit\.load)\("
    r"|\ballow_pickle=True|(?<![.\w])(?:eval|exec)\(|from torch import [^\n]*\bload\b",
    re.MULTILINE | re.DOTALL,
)


class Payload:
    """Pickles to a call that leaves a file behind."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """The file that no test may find; torch may be told from outside to read whatever a file holds."""
    path = tmp_path / "owned"
    yield path
    assert not path.exists(), "code from a file has run"


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's variable by which every load that does not say `weights_only=True` unpickles anything."""
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")


def as_pickle(content: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(content, protocol=2))


EVIL = {"class_path": "this.Net", "init_args": {}}  # what Python has, and nobody imports
WRITERS = [as_pickle, torch.save, partial(torch.save, _use_new_zipfile_serialization=False)]


def test_the_payload_works(tmp_path: Path) -> None:
    """Or the others would prove nothing."""
    for writer in WRITERS:
        writer({"state_dict": Payload(tmp_path / "made")}, tmp_path / "evil.ckpt")
        if writer is as_pickle:
            pickle.loads((tmp_path / "evil.ckpt").read_bytes())
        else:
            torch.load(tmp_path / "evil.ckpt", weights_only=False)
        (tmp_path / "made").unlink()


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("writer", WRITERS)
def test_no_reader_of_checkpoints_runs_code(tmp_path: Path, marker: Path, writer: Callable[[Any, Path], None]) -> None:
    """And a run goes on from the one before."""
    write_checkpoint({"global_step": 1, "optimizer_states": []}, tmp_path / PREVIOUS)
    writer({"global_step": 2, "state_dict": {}, "extra": Payload(marker)}, tmp_path / LAST)
    for read in (read_checkpoint, CheckpointFiles().load_checkpoint):
        with pytest.raises(CheckpointError, match="not a readable checkpoint"):
            read(tmp_path / LAST)
    path, problems = newest_valid(tmp_path)
    assert (path, len(problems)) == (tmp_path / PREVIOUS, 1)


@pytest.mark.parametrize(
    "named", [{"test_views": 2}, {"_instantiator": "lightning.pytorch.cli.instantiate_module", "network": EVIL}]
)
def test_a_checkpoint_chooses_no_argument_of_the_module(tmp_path: Path, trained: Path, named: dict[str, Any]) -> None:
    content = read_checkpoint(trained / "checkpoints" / LAST)
    torch.save(content | {"hyper_parameters": named}, tmp_path / "evil.ckpt")
    assert lit_cifar.LitResNet.load_from_checkpoint(tmp_path / "evil.ckpt").test_views == 1
    assert "this" not in sys.modules


def test_a_checkpoint_that_holds_itself_is_refused(tmp_path: Path) -> None:
    doubled: list[Any] = []
    for _ in range(40):
        doubled = [doubled, doubled]  # a file of 2 KB
    for within in (doubled, content := {"state_dict": {}}, [content]):
        content["itself"] = within
        torch.save(content, tmp_path / "endless.ckpt")
        with pytest.raises(CheckpointError, match="too many objects in one another"):
            read_checkpoint(tmp_path / "endless.ckpt")


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("flags", [["fit"], ["predict"], ["test", "--weights_only=false"]])
def test_the_command_line_runs_no_code(tmp_path: Path, marker: Path, flags: list[str]) -> None:
    path = tmp_path / "evil.ckpt"
    torch.save({"state_dict": {}, "extra": Payload(marker)}, path)
    said = refused(*flags, *TINY, f"--ckpt_path={path}", f"--run_dir={tmp_path / 'run'}")
    assert "not a readable checkpoint" in said


@pytest.mark.parametrize("crafted", ["data_batch_1", "test_batch", "batches.meta"])
def test_pickled_data_run_no_code(tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, crafted: str) -> None:
    """All other files are those that torchvision expects."""
    images = {"data": torch.zeros(20, 3072, dtype=torch.uint8).numpy(), "labels": [0, 1] * 10}
    contents: dict[str, object] = {name: images for name, _ in (*CIFAR10.train_list, *CIFAR10.test_list)}
    contents["batches.meta"] = {"label_names": list(cifar10.CLASSES)}
    folder = write_python_edition(tmp_path, CIFAR10, contents, monkeypatch)
    data = open_dataset("cifar10", tmp_path)
    data.prepare(download=False)

    as_pickle(Payload(marker), folder / crafted)
    for read in (partial(data.load, "train"), partial(data.load, "test"), partial(data.prepare, download=False)):
        with pytest.raises(DataError, match="differs from the official files by md5"):
            read()


LINKS = [".lock", "metrics.csv", "config.yaml.part", "checkpoints/last.ckpt.part", "checkpoints", "gone"]


@pytest.mark.parametrize(
    ("name", "more"), [*((name, ["--resume=auto"]) for name in LINKS), (".lock", []), ("gone", [])]
)
def test_nothing_outside_of_a_run_folder_is_written_through_links(tmp_path: Path, name: str, more: list[str]) -> None:
    run, outside = tmp_path / "run", tmp_path / "outside"
    (run / name).parent.mkdir(parents=True)
    outside.mkdir()
    (outside / "last.ckpt").write_text("of somebody else")
    (run / name).symlink_to({"checkpoints": outside, "gone": outside / "gone"}.get(name, outside / "last.ckpt"))
    says = ["outside of the run folder"] if more or name == ".lock" else ["is not empty"]
    refused("fit", *TINY, f"--run_dir={run}", *more, says=says)
    assert {path.name: path.read_text() for path in outside.iterdir()} == {"last.ckpt": "of somebody else"}


def test_a_run_folder_may_be_a_link_have_links_inside_and_a_table_that_is_no_text(tmp_path: Path) -> None:
    run, flags = tmp_path / "run", ["fit", *TINY, f"--run_dir={tmp_path / 'link'}", "--resume=auto"]
    run.mkdir()
    (tmp_path / "link").symlink_to(run)
    run_here(*flags)
    (run / "inside").symlink_to("metrics.csv")
    (run / "circle").symlink_to("circle")
    table = run / "metrics.csv"
    table.write_bytes(b"\n".join(line + b",caf\xe9" for line in table.read_bytes().splitlines()) + b"\n")
    with pytest.warns(UserWarning, match="total_steps=5"):
        run_here(*flags, "--trainer.max_epochs=2")
    assert table.read_bytes().count(b"caf\xe9") > 5  # the header, and the rows of before


STEERING = "a\x1b]0;owned\x07\x9b2J\r\u202eb"


def test_neither_an_error_nor_a_warning_steers_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / STEERING / "last.ckpt"
    said = refused("test", *TINY, f"--ckpt_path={path}", f"--run_dir={tmp_path / 'run'}")
    assert r"a\x1b]0;owned\x07\x9b2J\r\u202eb" in said
    assert all(char.isprintable() or char == "\n" for char in said)
    assert printable(f"{STEERING}\n\udcff", lines=True) == "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202eb\n\\xff"
    form = output._own_form(UserWarning(STEERING), UserWarning, lit_cifar.__file__)
    assert form == f"lit_cifar: warning: {printable(STEERING, lines=True)}\n"


def test_a_remedy_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my runs;$(touch owned)"
    (folder / "checkpoints").mkdir(parents=True)
    torch.save({"optimizer_states": []}, folder / "checkpoints" / LAST)
    run = f"--run_dir={folder}"
    for flags in ([run], [f"--trainer.default_root_dir={folder}"], [run, "--resume=auto"]):
        last = shlex.split(refused("fit", *TINY, *flags).splitlines()[-1])[-1]
        assert last.startswith("--")
        assert last.partition("=")[2].startswith(str(folder))


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Replaces an entry of a checkpoint; a function makes the value of the old one."""

    def change(content: dict[str, Any]) -> None:
        held = reduce(getitem, path[:-1], content)
        held[path[-1]] = value(held[path[-1]]) if callable(value) else value

    return change


def without(*path: Any) -> Callable[[dict[str, Any]], None]:
    return lambda content: reduce(getitem, path[:-1], content).pop(path[-1])


BEST_STATE = BestCheckpoint().state_key
WEIGHT = ("state_dict", "conv1.weight")
FIRST = ("optimizer_states", 0, "state", 0)
LOOP = ("loops", "fit_loop")
STEPS = (*LOOP, "epoch_loop.automatic_optimization.optim_progress", "optimizer", "step")
OF_EVERY_COMMAND = [
    (put("lit_cifar", value=[]), "its lit_cifar is []"),
    (put("lit_cifar", "arch", value="tiny; touch owned #"), "its lit_cifar.arch is 'tiny; touch owned #'"),
    (put("lit_cifar", "stem", value="$(touch owned)"), "its lit_cifar.stem is"),
    (put("lit_cifar", "num_classes", value=True), "its lit_cifar.num_classes is True"),
    (put("lit_cifar", "num_classes", value=10**30), "its lit_cifar.num_classes is 1000"),
    (put("lit_cifar", "image_size", value="`touch owned`"), "its lit_cifar.image_size is"),
    (put("lit_cifar", "network", value="os.system"), "pass the flags of its training, which RUN_FOLDER"),
    (put("lit_cifar", "network", value="a\nlit_cifar: done"), r"its lit_cifar.network is 'a\nlit_cifar: done'"),
    (put("trained_on", value={"dataset": 5}), "its trained_on.dataset is 5"),
    (put("trained_on", "classes", 3, value="a\u202eb"), r"its trained_on.classes.3 is 'a\u202eb'"),
    (put("pytorch-lightning_version", value="abc"), "its pytorch-lightning_version is 'abc'"),
    (put("pytorch-lightning_version", value="0.1.0"), "its pytorch-lightning_version is '0.1.0'"),
    (without("pytorch-lightning_version"), "its pytorch-lightning_version is missing"),
    (put("state_dict", value=[1]), "its state_dict is [1]"),
    (put("state_dict", "a\x1b[2J\nb", value=torch.ones(1)), r"holds the name 'a\x1b[2J\nb'"),
    (put(*WEIGHT, value="x"), "its state_dict.conv1.weight is 'x'"),
    (put(*WEIGHT, value=torch.Tensor.long), "conv1.weight is int64 (64, 3, 7, 7) in"),
    (put(*WEIGHT, value=lambda held: held.to(torch.complex64)), "conv1.weight is complex64 (64, 3, 7, 7) in"),
    (put(*WEIGHT, value=lambda held: held.to(torch.float8_e5m2)), "conv1.weight is float8_e5m2 (64, 3, 7, 7) in"),
    (put(*WEIGHT, value=lambda held: held.to("meta")), "conv1.weight is meta (64, 3, 7, 7) in"),
    (put(*WEIGHT, value=torch.Tensor.to_sparse), "conv1.weight is sparse_coo (64, 3, 7, 7) in"),
    (put(*WEIGHT, value=torch.tensor(1.0)), "conv1.weight is () in"),
]
OF_A_FIT = [
    OF_EVERY_COMMAND[1],
    (put(*WEIGHT, value=lambda held: held.fill_(torch.nan)), "the weights are not finite: conv1.weight"),
    (put("optimizer", value="SGD; touch owned #"), "pass --model.optimizer as in its training"),
    (put("lr_scheduler", value="$(touch owned)"), "pass --model.lr_scheduler as in its training"),
    (put("optimizer_states", value=[]), "its optimizer_states is []"),
    (put("optimizer_states", 0, "state", value={}), "holds no state of the optimizer for 41 of 41 parameters"),
    (put("optimizer_states", 0, "state", value={"a": {}}), "it holds no state of the optimizer"),
    (put(*FIRST, value=5), "its optimizer_states.0.state.0 is 5"),
    (put(*FIRST, value={}), "its optimizer_states.0.state.0.momentum_buffer is missing"),
    (put(*FIRST, "momentum_buffer", value=torch.zeros(3)), "its optimizer_states.0.state.0.momentum_buffer is (3,)"),
    (put(*FIRST, "momentum_buffer", value=lambda held: held.fill_(torch.nan)), "its optimizer holds nan"),
    (put(*FIRST, value=lambda held: held | {"step": torch.tensor(-6.0)}), "the step of its optimizer is negative"),
    (put("state_dict", "bn1.running_var", value=torch.neg), "the weights are negative variances: bn1.running_var"),
    (without("optimizer_states", 0, "param_groups"), "its optimizer_states.0.param_groups is missing"),
    (put("optimizer_states", 0, "param_groups", 0, "lr", value=math.nan), "its optimizer holds nan"),
    (put("optimizer_states", 0, "param_groups", 0, "lr", value=math.inf), "its learning rates are [inf, "),
    (put("lr_schedulers", 0, "base_lrs", 0, value=math.nan), "its schedule holds nan"),
    (put("optimizer_states", 0, "param_groups", 0, "lr", value="x"), "its optimizer_states.0.param_groups.0.lr is 'x'"),
    (put("optimizer_states", 0, "param_groups", 0, "params", value=lambda held: held[::-1]), "numbers them otherwise"),
    (put("lr_schedulers", value=[]), "its lr_schedulers is []"),
    (put("lr_schedulers", 0, "last_epoch", value="x"), "its lr_schedulers.0.last_epoch is 'x'"),
    (put("lr_schedulers", 0, "last_epoch", value=10**12), "its schedule has taken 1000000000000 steps, and its opt"),
    (put("settings", "optimizer.lr", value=torch.zeros(3)), "its settings.optimizer.lr is (3,)"),
    (put("settings", "optimizer.lr", value="x\ny"), r"its settings.optimizer.lr is 'x\ny'"),
    (without("position"), "its position is None"),
    (put("sample_audit", "epoch", value=7), "its sample audit is of another step than its position"),
    (put("lr_schedulers", value=lambda held: held * 2), "its lr_schedulers are 2"),
    (put("current_model_state", value={}), "its averaging_state is missing"),
    (put("callbacks", BEST_STATE, "best_k_models", value={"/etc/hosts": torch.tensor(0.0)}), "outside of their folder"),
    (put("position", "step", value=-1), "its position.step is -1"),
    (put("position", "started", value=1), "its position.started is 1"),
    (put("position", "epoch", value=10**6), "contradicts its epoch=1"),
    (put("position", value=lambda held: held | {"step": 6, "epoch": 0}), "contradicts its"),
    (put("global_step", value=3), "contradicts its epoch=1 and global_step=3"),
    (put(*STEPS, "total", "completed", value=7), "its loops and its global_step say 7 and 5 optimizer steps"),
    (without(*STEPS, "current"), "optimizer.step.current is missing"),
    (put(*LOOP, "epoch_loop.scheduler_progress", "total", value={}), "scheduler_progress.total.ready is missing"),
    (put("metrics", "train_loss", "total", value=torch.zeros(3)), "its metrics.train_loss.total is (3,)"),
    (put("sample_audit", "start", value="zz"), "its sample_audit.start is 'zz'"),
    (put("CIFAR10DataModule", value=[1]), "its settings of the data is [1]"),
    (put("CIFAR10DataModule", "seed", value="1; touch owned #"), "its settings of the data.seed is '1; touch owned #'"),
    (put("callbacks", BEST_STATE, value=7), "its callbacks.BestCheckpoint is 7"),
    (put("callbacks", BEST_STATE, "best_k_models", value={"../../x": "y"}), "best_k_models.../../x is 'y'"),
    (without("callbacks", BEST_STATE, "best_model_path"), "of BestCheckpoint in it cannot be loaded: KeyError"),
    *((put("stopped", value=each), "its stopped") for each in (True, [], [1], {"max_epochs": 1})),
    (put("stopped", value=[{"max_epochs": torch.ones(2)}]), "its stopped.0.max_epochs is (2,)"),
]


@pytest.mark.parametrize(
    ("command", "change", "says"),
    [*(("test", *row) for row in OF_EVERY_COMMAND), *(("fit --trainer.max_epochs=2", *row) for row in OF_A_FIT)],
)
@pytest.mark.filterwarnings("ignore:(Validating sparse tensor|the checkpoint does not say which images)")
def test_a_malformed_checkpoint_is_refused_in_a_sentence(
    tmp_path: Path, trained: Path, command: str, change: Callable[[dict[str, Any]], None], says: str
) -> None:
    """And no text of it is part of a command, or steers the terminal."""
    content = copy.deepcopy(read_checkpoint(trained / "checkpoints" / LAST))
    change(content)
    torch.save(content, tmp_path / "x.ckpt")
    name, *flags = command.split()
    flags += [f"--ckpt_path={tmp_path / 'x.ckpt'}", f"--run_dir={tmp_path / 'run'}"]
    said = refused(name, *TINY, *flags, says=[says])
    assert "owned" not in said.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_what_may_be_right_is_said(tmp_path: Path, trained: Path) -> None:
    content = read_checkpoint(trained / "checkpoints" / LAST)
    content["optimizer_states"][0]["state"].pop(0)
    torch.save(content, tmp_path / "less.ckpt")
    content["state_dict"]["conv1.weight"].fill_(torch.nan)
    torch.save(content, tmp_path / "nan.ckpt")
    torch.save(content["state_dict"], tmp_path / "nan.pth")
    more = "--trainer.max_epochs=2"
    for name, command, says in [
        ("less.ckpt", ["fit", more], "no state of the optimizer for 1 of 41 parameters"),
        ("nan.ckpt", ["test"], "not finite: conv1.weight"),
    ]:
        flags = [f"--ckpt_path={tmp_path / name}", f"--run_dir={tmp_path / name}.run"]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run_here(*command, *TINY, *flags)
        assert any(says in str(each.message) for each in caught), name
    weights = f"--model.fine_tuning.weights={tmp_path / 'nan.pth'}"
    refused("fit", *TINY, weights, says=["nan.pth: the weights are not finite: conv1.weight"])


def test_damage_is_said_before_anything_that_it_causes(tmp_path: Path, trained: Path) -> None:
    content = bytearray((trained / "checkpoints" / LAST).read_bytes())
    content[content.index(b"layer1.0.conv1.weight") + 3] ^= 1
    (path := tmp_path / "x.ckpt").write_bytes(content)
    flag = f"--ckpt_path={path}"
    for command in (("test", flag), ("validate", flag), ("fit", flag), ("fit", f"--model.fine_tuning.weights={path}")):
        refused(*command, *TINY, f"--run_dir={tmp_path / 'run'}", says=["is damaged"])


BOMB = "".join(f"{name}: &{name} [{','.join([f'*{before}'] * 9)}]\n" for before, name in pairwise("abcdefghi"))
BOMB = f"a: &a [x,x,x,x,x,x,x,x,x]\n{BOMB}"
NESTED = "a: " + "[" * 5000 + "]" * 5000


@pytest.mark.parametrize("name", ["metrics.csv", "weights.sha256", "checkpoints/last.ckpt"])
def test_no_pipe_in_a_run_folder_is_waited_for(tmp_path: Path, trained: Path, name: str) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / name).unlink()
    os.mkfifo(run / name)
    refused("fit", *TINY, f"--run_dir={run}", "--resume=auto", says=["is neither a file nor a folder"])


def test_a_folder_in_the_place_of_a_file_is_said_in_a_sentence(tmp_path: Path, trained: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "environment.json").unlink()
    (run / "environment.json").mkdir()
    result = run_here("fit", *TINY, "--trainer.max_epochs=2", f"--run_dir={run}", "--resume=auto", check=False)
    assert (result.status, "environment.json could not be saved: Is a directory" in result.stderr) == (1, True)


@pytest.mark.parametrize("content", [BOMB, "[" * 5000, NESTED, "a: *b", "x" * 2**21, "- 1", "\xff"], ids=range(7))
def test_a_run_folders_settings_are_few(tmp_path: Path, trained: Path, content: str) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "config.yaml").write_bytes(content.encode("latin1"))
    refused("test", run, says=["config.yaml is not what a run writes there"])


@pytest.mark.parametrize("target", ["/dev/zero", "/proc/self/environ", None])
def test_a_run_folders_settings_are_a_file_in_it(tmp_path: Path, trained: Path, target: str | None) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to(target) if target else os.mkfifo(run / "config.yaml")
    refused("test", run, says=["no config.yaml in the run folder"])


def test_a_pictures_content_decides_and_no_program_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow gives EPS to Ghostscript, whatever the file is called."""
    started: list[Any] = []
    drawn = Image.new("L", (8, 8)).im
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **__: started.append(args) or drawn)
    path = tmp_path / "x.png"
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n%%EOF\n")
    with Image.open(path) as image:
        image.load()
    assert started  # or the file would prove nothing
    started.clear()
    assert read_image(path, size=4) == "not an image (PNG, JPEG, GIF, BMP, TIFF, WEBP, PPM)"
    assert not started
    for form in FORMATS:
        Image.new("RGB", (8, 8)).save(path, form)
        assert isinstance(read_image(path, size=4), torch.Tensor), form


def test_every_load_of_the_project_reads_tensors_and_primitives_alone() -> None:
    """Nor is anything else in it that unpickles or runs a text."""
    for line in ("torch.load(path)", "from pickle import loads", "model.eval(); eval(text)", "yaml.load(file)"):
        assert DOUBTFUL.search(f"x = 1\n{line}\n"), line
    folders = ("lit_cifar", "benchmarks", "examples", "notebooks")
    paths = [path for folder in folders for path in (REPOSITORY / folder).rglob("*.py")]
    sources = {path: path.read_text() for path in paths}
    for path in (REPOSITORY / "notebooks").glob("*.ipynb"):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        sources[path] = "\n".join("".join(cell["source"]) for cell in cells)
    # The runs of a relation write these into a temporary folder, which only their user can open.
    for name in ("loaders.py", "runs.py", "child.py"):
        del sources[REPOSITORY / "lit_cifar" / "checks" / "relations" / name]
    found = [f"{path}: {match[0]}" for path, source in sources.items() for match in DOUBTFUL.finditer(source)]
    assert not found, "\n".join(found)
