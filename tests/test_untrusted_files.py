"""Neither a checkpoint nor a data file can run code: what is read from disk is never unpickled unchecked.

A pickle can name any function to call. Each crafted one here would make a file; none may appear. Nor does a name from a
file steer the terminal, the shell of who pastes a remedy, a spreadsheet, or Pillow to a program.
"""

import ast
import csv
import hashlib
import json
import pickle
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, run_here
from data_files import load, prepare
from PIL import EpsImagePlugin, Image
from torchvision.datasets import CIFAR10

import lit_cifar
from lit_cifar.checkpoint import files as checkpoint_files
from lit_cifar.checkpoint.files import LAST, PREVIOUS, newest_valid, verify_checkpoint, write_checkpoint
from lit_cifar.checkpoint.format import read_checkpoint
from lit_cifar.checkpoint.lightning_io import CheckpointFiles
from lit_cifar.data import cifar10
from lit_cifar.data.predict_files import FORMATS, read_image
from lit_cifar.errors import CheckpointError, DataError, printable
from lit_cifar.reporting import output
from lit_cifar.reporting.files import replace_split
from lit_cifar.reporting.run_reader import read_table

REPOSITORY = Path(lit_cifar.__file__).parents[1]
# Modules that unpickle, or can be made to.
UNPICKLERS = {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Calls that take `weights_only`, by the last part of their name; of `load` only torch's.
READERS = {"load_checkpoint", "load_from_checkpoint", "load_state_dict_from_url", "pl_load"}


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


def as_torch(content: Any, path: Path) -> None:
    torch.save(content, path)


def as_old_torch(content: Any, path: Path) -> None:
    torch.save(content, path, _use_new_zipfile_serialization=False)


def with_hash(content: Any, path: Path) -> None:
    """As whoever knows the format of our files would."""
    path.write_bytes(checkpoint_files._serialise(content))
    verify_checkpoint(path)


WRITERS = [as_pickle, as_torch, as_old_torch, with_hash]
Writer = Callable[[Any, Path], None]


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
def test_no_reader_of_checkpoints_runs_code(tmp_path: Path, marker: Path, writer: Writer) -> None:
    path = tmp_path / "evil.ckpt"
    writer({"state_dict": {}, "extra": Payload(marker)}, path)
    for read in (read_checkpoint, CheckpointFiles().load_checkpoint):
        with pytest.raises(CheckpointError, match="not a readable checkpoint"):
            read(path)


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("writer", WRITERS)
def test_a_run_does_not_go_on_from_it(tmp_path: Path, marker: Path, writer: Writer) -> None:
    write_checkpoint({"global_step": 1}, tmp_path / PREVIOUS)
    writer({"global_step": 2, "extra": Payload(marker)}, tmp_path / LAST)
    path, refused = newest_valid(tmp_path)
    assert path == tmp_path / PREVIOUS
    assert len(refused) == 1


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("subcommand", ["fit", "validate", "test", "predict"])
def test_the_command_line_runs_no_code(tmp_path: Path, marker: Path, writer: Writer, subcommand: str) -> None:
    path = tmp_path / "evil.ckpt"
    writer({"state_dict": {}, "extra": Payload(marker)}, path)
    for more in ([], ["--weights_only=false"]):
        result = run_here(subcommand, *TINY, f"--ckpt_path={path}", f"--run_dir={tmp_path / 'run'}", *more)
        assert result.status == 2
        assert "not a readable checkpoint" in result.stderr


@pytest.mark.usefixtures("trusting")
@pytest.mark.filterwarnings("ignore:not used")
def test_a_resumed_run_runs_no_code(tmp_path: Path, marker: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    for name in (LAST, PREVIOUS):
        with_hash({"state_dict": {}, "extra": Payload(marker)}, folder / name)
    run_here("fit", *TINY, "--resume=auto", f"--run_dir={tmp_path / 'run'}")


@pytest.mark.parametrize("crafted", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
@pytest.mark.parametrize("split", ["train", "test"])
def test_the_python_edition_runs_no_code(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, crafted: str, split: cifar10.Split
) -> None:
    """All other files are those that torchvision expects."""
    folder = tmp_path / CIFAR10.base_folder
    folder.mkdir()
    images = {"data": torch.zeros(20, 3072, dtype=torch.uint8).numpy(), "labels": [0, 1] * 10}
    for list_name in ("train_list", "test_list"):
        names = [name for name, _ in getattr(CIFAR10, list_name)]
        for name in names:
            as_pickle(images, folder / name)
        monkeypatch.setattr(CIFAR10, list_name, [(name, _md5(folder / name)) for name in names])
    as_pickle({"label_names": list(cifar10.CLASSES)}, folder / "batches.meta")
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": _md5(folder / "batches.meta")})
    prepare("cifar10", tmp_path, download=False)

    as_pickle(Payload(marker), folder / crafted)
    with pytest.raises(DataError, match="differs from the official files by md5"):
        load("cifar10", tmp_path, split=split)
    with pytest.raises(DataError, match="differs from the official files by md5"):
        prepare("cifar10", tmp_path, download=False)


def _md5(path: Path) -> str:
    return hashlib.md5(path.read_bytes()).hexdigest()


@pytest.mark.usefixtures("trusting")
@pytest.mark.parametrize("writer", [as_pickle, as_torch, as_old_torch])
def test_torchvisions_old_cache_of_fashion_mnist_runs_no_code(tmp_path: Path, marker: Path, writer: Writer) -> None:
    """It still reads these two files, if they are there, in place of the raw ones."""
    folder = tmp_path / "FashionMNIST" / "processed"
    folder.mkdir(parents=True)
    for name in ("training.pt", "test.pt"):
        writer((Payload(marker), Payload(marker)), folder / name)
    with pytest.raises(DataError):
        prepare("fashion_mnist", tmp_path, download=False)
    with pytest.raises(DataError):
        load("fashion_mnist", tmp_path, split="train")


STEERING = "a\x1b]0;owned\x07\x9b2J\r\u202eb"


def test_an_error_does_not_steer_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / STEERING / "last.ckpt"
    result = run_here("test", *TINY, f"--ckpt_path={path}", f"--run_dir={tmp_path / 'run'}")
    assert result.status == 2
    assert str(tmp_path) in result.stderr
    assert r"a\x1b]0;owned\x07\x9b2J\r\u202eb" in result.stderr
    assert all(char.isprintable() or char == "\n" for char in result.stderr)


def test_neither_does_a_warning_nor_what_a_run_prints(capsys: pytest.CaptureFixture[str]) -> None:
    form = output._own_form(UserWarning(STEERING), UserWarning, lit_cifar.__file__)
    assert form == f"lit_cifar: warning: {printable(STEERING, lines=True)}\n"
    assert printable(f"{STEERING}\n\udcff", lines=True) == "a\\x1b]0;owned\\x07\\x9b2J\\r\\u202eb\n\\xff"


def test_a_remedy_is_quoted_for_the_shell(tmp_path: Path) -> None:
    folder = tmp_path / "my runs;$(touch owned)"
    folder.mkdir()
    (folder / "file").touch()
    torch.save({}, folder / "x.ckpt")
    remedies = []
    for flags in (["fit", f"--run_dir={folder}"], ["fit", f"--trainer.default_root_dir={folder}"]):
        remedies.append(run_here(*flags, *TINY).stderr.splitlines()[-1])
    with pytest.raises(CheckpointError) as refused:
        verify_checkpoint(folder / "x.ckpt")
    for remedy in [*remedies, refused.value.remedy]:
        last = shlex.split(remedy)[-1]
        assert last.startswith("--")
        assert last.partition("=")[2].startswith(str(folder))


def test_the_content_of_a_picture_decides_and_no_program_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_a_name_is_no_formula_in_a_spreadsheet_and_is_read_back(tmp_path: Path) -> None:
    names = ["=1+1", "+cmd|x", "-2+3", "@SUM(1)", "'=quoted", "it's", "plain", "'", "=", "-"]
    numbers = ["-0.5", "+1e9", "-inf", *(["7"] * 7)]
    path = tmp_path / "x.csv"
    replace_split(path, ["split", *names], "val", [numbers, names])
    replace_split(path, ["split", *names], "test", [numbers])
    cells = [cell for line in csv.reader(path.read_text().splitlines()) for cell in line]
    risky = {cell for cell in cells if cell.startswith(("=", "+", "-", "@"))}
    assert risky == {"-0.5", "+1e9", "-inf"}
    rows = [row.cells for row in read_table(path)]
    assert [*rows[0]] == ["split", *names]
    assert [[*row.values()] for row in rows] == [["val", *numbers], ["val", *names], ["test", *numbers]]


def doubtful(source: str) -> list[str]:
    """The lines of a program that could run code from a file, each with its number."""
    nodes = [node for node in ast.walk(ast.parse(source)) if _is_doubtful(node)]
    return [f"{node.lineno}: {ast.unparse(node).splitlines()[0]}" for node in nodes]  # type: ignore[attr-defined]


def _is_doubtful(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] in UNPICKLERS for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        names = {alias.name for alias in node.names}
        return (node.module or "").split(".")[0] in UNPICKLERS or (node.module == "torch" and "load" in names)
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    last = name.rpartition(".")[2]
    keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    if name == "torch.load" or last in READERS:
        return keywords.get("weights_only") != "True"
    if last in ("read_pickle", "unsafe_load", "add_safe_globals") or name in ("eval", "exec", "torch.jit.load"):
        return True
    if name == "yaml.load":
        return "Safe" not in keywords.get("Loader", "")
    return keywords.get("allow_pickle", "False") != "False"


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path)",
        "torch.load(path, mmap=True, weights_only=None)",
        "torch.load(path, weights_only=False)",
        "Model.load_from_checkpoint(path)",
        "trainer.strategy.load_checkpoint(path)",
        "from torch import load",
        "import pickle",
        "from pickle import loads",
        "import numpy as np, joblib",
        "np.load(path, allow_pickle=True)",
        "pd.read_pickle(path)",
        "yaml.load(file, Loader=yaml.Loader)",
        "torch.serialization.add_safe_globals([Path])",
        "eval(text)",
    ],
)
def test_a_doubtful_line_is_found(source: str) -> None:
    assert doubtful(f"x = 1\n{source}\n")[0].startswith("2: ")


@pytest.mark.parametrize(
    "source",
    [
        "torch.load(path, weights_only=True)",
        "model.load_state_dict(state)",
        "model.eval()",
        "json.load(file)",
        "np.load(path)",
        "sources.load('cifar10', root, split='train')",
    ],
)
def test_a_harmless_line_is_not(source: str) -> None:
    assert doubtful(source) == []


def python_sources() -> Iterator[tuple[str, str]]:
    """The repository's programs and the cells of its notebooks, by name."""
    for folder in ("lit_cifar", "benchmarks", "configs"):
        for path in sorted((REPOSITORY / folder).rglob("*.py")):
            yield str(path.relative_to(REPOSITORY)), path.read_text()
    for path in sorted((REPOSITORY / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
        for number, cell in enumerate(cells):
            lines = "".join(cell["source"]).splitlines()
            yield (
                f"{path.name}, cell {number}",
                "\n".join("" if line.startswith(("%", "!")) else line for line in lines),
            )


def test_every_load_of_the_project_reads_tensors_and_primitives_alone() -> None:
    sources = dict(python_sources())
    assert "lit_cifar/checkpoint/format.py" in sources
    assert any(name.endswith("cell 0") for name in sources)
    found = [f"{name}:{line}" for name, source in sources.items() for line in doubtful(source)]
    assert not found, "\n".join(found)
