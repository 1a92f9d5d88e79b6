"""`python -m lit_cifar export`: a checkpoint's network as torch.export and ONNX, compared before it is kept."""

import argparse
import json
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import file_digest
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml  # type: ignore[import-untyped]
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from lit_cifar.checkpoint.atomic import best_of, read_checked
from lit_cifar.checkpoint.format import Header, TrainedOn, naming
from lit_cifar.configured import own_network
from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.errors import CheckpointError, ConfigError, DataError
from lit_cifar.reporting.environment import versions
from lit_cifar.reporting.run_folder import CONFIG
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.terminal import CommandParser, exit_orderly_when_terminated

RECORD = "export.json"
_PART = ".part"  # the end of a draft's name
BOUND = 1e-4
"""Largest difference of a logit, in units of the largest logit. Kernels differ by about 1e-6 in rounding."""
_NUM_IMAGES = 100
_CONFIG = "--config RUN_FOLDER/config.yaml"
_DESCRIPTION = """\
Write the network of a checkpoint to files for other programs: network.pt2 (torch.export) and network.onnx. The
normalisation is part of them: they take images as bytes and return logits. Each file is run again and compared with the
checkpoint before anything is said to be exported. export.json beside them has the names of the classes, what was
compared, and a hash of each file."""


def main(args: list[str]) -> int:
    """Export; return 0, or 1 if a file does not compute what the checkpoint does."""
    options = export_parser().parse_args(args)
    formats = [*FORMATS.values()] if options.format == "both" else [FORMATS[options.format]]
    for form in formats:
        form.check()
    path = Path(options.checkpoint)
    run_folder = path.parent.parent if path.parent.name == "checkpoints" else path.parent
    if (path / CONFIG).is_file():
        run_folder, path, options.config = path, best_of(path), options.config or str(path / CONFIG)
    folder = run_folder / "export" if options.output is None else Path(options.output)
    if folder.exists() and (not folder.is_dir() or any(path.name != _PART for path in folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder", remedy="choose another: --output FOLDER")
    exit_orderly_when_terminated()
    config = _configuration(options.config)
    root = options.root or config["data"].get("root", "data")
    network = own_network(config["model"].get("network"))
    module, data = open_checkpoint(path, network=network, dataset=config["data"].get("dataset"), root=root)
    found = export(module, data, formats, folder=folder, checkpoint=path)
    lines = [f"{file}: logits within {gap:.0e} of the checkpoint's" for file, gap in found.items()]
    if (views := config["model"].get("test_views", 1)) > 1:
        lines.append(f"the run's val/ and test/ are means over {views} views of an image, and a file computes one")
    if all(gap <= BOUND for gap in found.values()):
        print(*lines, f"exported to {folder}; {RECORD} there says what goes in and out", sep="\n")
        return 0
    print(*lines, "nothing was exported: a file computes something else", sep="\n", file=sys.stderr)
    return 1


def export_parser() -> argparse.ArgumentParser:
    parser = CommandParser("export", description=_DESCRIPTION)
    parser.add_argument("checkpoint", metavar="RUN_FOLDER", help="A run, or a checkpoint of one.")
    parser.add_argument("--format", choices=[*FORMATS, "both"], default="both", help="What to write (default: both).")
    parser.add_argument("--output", metavar="FOLDER", help="A new folder (default: RUN_FOLDER/export).")
    parser.add_argument("--data.root", dest="root", metavar="FOLDER", help="Where the data set is (default: data).")
    of_run = "Where the data are, and the network if it is your own (default: the run folder's config.yaml)."
    parser.add_argument("--config", metavar="FILE", help=of_run)
    return parser


class Classifier(nn.Module):
    """A network in evaluation mode, behind the normalisation of its data set, in units of the full range."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, *, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network = network
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None])
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None])
        self.eval().requires_grad_(False)

    def forward(self, images: Tensor) -> Tensor:
        """Logits, float32 (n, num_classes), of images, uint8 (n, 3, height, width)."""
        logits: Tensor = self.network((images.to(torch.float32) - self.mean) / self.std)
        return logits


def _configuration(file: str | None) -> dict[str, dict[str, Any]]:
    """The settings of model and data in a run's `config.yaml`; empty without one."""
    if file is None:
        return {"model": {}, "data": {}}
    try:
        found = yaml.safe_load(Path(file).read_text())
        return {name: dict(found[name]) for name in ("model", "data")}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        problem = f"--config={file} is not a run's configuration: {type(error).__name__}: {error}"
        raise ConfigError(problem, remedy=f"pass {_CONFIG}") from error


def open_checkpoint(
    path: Path, *, network: nn.Module | None, dataset: str | None, root: str | Path
) -> tuple[LitResNet, CIFAR10DataModule]:
    """Read a checkpoint whose hash is right: its network, in evaluation mode, and the data set of its training.

    `network` is the user's own, if it has one, and `dataset` a name in place of the checkpoint's. `root` holds the data
    set, and is needed where the classes are folders that the checkpoint does not name.
    """
    try:
        content = read_checked(path)
    except CheckpointError as error:
        remedy = "export another of the run's checkpoints, e.g. RUN_FOLDER/checkpoints/best.ckpt"
        raise CheckpointError(error.problem, remedy=remedy) from error
    with naming(path):
        header, trained = Header.of(content), TrainedOn.of(content)
    if header.network is not None and network is None:
        problem = f"{path} holds {header}, and no code is run because a checkpoint names it"
        raise CheckpointError(problem, remedy=f"pass {_CONFIG}")
    name = dataset or trained.dataset
    if name is None:
        raise CheckpointError(f"{path} does not say which data it was trained on", remedy=f"pass {_CONFIG}")
    data = CIFAR10DataModule(root, dataset=name, image_size=header.image_size)
    try:
        trained.name_classes(data.source)
    except DataError as error:
        remedy = f"pass --data.root=FOLDER with the data of the training, or {_CONFIG}"
        raise DataError(error.problem, remedy=remedy) from error
    try:
        trained.check(TrainedOn(*data.meaning), normalised=True)
    except CheckpointError as error:
        remedy = f"pass {_CONFIG}, and --data.root=FOLDER if the data have been moved"
        raise CheckpointError(f"{path}: {error.problem}", remedy=remedy) from error
    arguments: dict[str, Any] = {} if network is None else {"network": network}
    with naming(path):
        module = LitResNet.load_from_checkpoint(path, map_location="cpu", weights_only=True, **arguments)
    return module.eval(), data


def trace(classifier: Classifier, image_shape: tuple[int, ...]) -> ExportedProgram:
    """The network as a graph of operators, for any number of images of `image_shape`, (3, height, width)."""
    images = torch.zeros(2, *image_shape, dtype=torch.uint8)
    try:
        return torch.export.export(classifier, (images,), dynamic_shapes={"images": {0: Dim("batch")}})
    except Exception as error:  # torch raises a dozen types here
        reason = str(error).strip().splitlines() or [""]
        raise ConfigError(
            f"torch.export cannot follow {type(classifier.network).__name__}: {type(error).__name__}: {reason[0]}",
            remedy="let its forward() neither branch on values of tensors nor fix the batch size",
        ) from error


class Format(NamedTuple):
    file: str  # name of the file in the folder
    packages: tuple[str, ...]  # names of the modules that it needs beside torch
    content: Callable[[ExportedProgram], bytes]  # its caller writes the bytes: a full disk is then one kind of error
    load: Callable[[Path], Callable[[Tensor], Tensor]]  # maps images to logits, by the file alone

    def check(self) -> None:
        if missing := [name for name in self.packages if find_spec(name) is None]:
            problem = f"ONNX needs packages that are not installed: {', '.join(missing)}"
            raise ConfigError(problem, remedy="pip install 'lit-cifar[export]', or pass --format torch")


def _torch_content(program: ExportedProgram) -> bytes:
    buffer = BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _load_torch(file: Path) -> Callable[[Tensor], Tensor]:
    """Load a file that this process wrote: loading can run code from it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # torch 2.11 copies it
        return torch.export.load(file).module()


def _onnx_content(program: ExportedProgram) -> bytes:
    """A model with its weights inside; the number of images is called "batch"."""
    names: Any = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": {"images": {0: "batch"}}}
    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    content: bytes = made.model_proto.SerializeToString()
    return content


def _load_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


FORMATS = {
    "torch": Format("network.pt2", (), _torch_content, _load_torch),
    "onnx": Format("network.onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx_content, _load_onnx),
}


@torch.no_grad()
def export(
    module: LitResNet, data: CIFAR10DataModule, formats: Sequence[Format], *, folder: Path, checkpoint: Path
) -> dict[str, float]:
    """Write the files, run each again, and compare it with the checkpoint; `folder` is made only if all agree.

    Return the largest difference of a logit for each file, on images of random bytes, in units of the largest logit.
    """
    random, ids = torch.Generator().manual_seed(0), torch.arange(_NUM_IMAGES)
    images = torch.randint(256, (_NUM_IMAGES, *module.image_shape), generator=random).to(torch.uint8)
    expected = module(data.on_after_batch_transfer(Batch(images, ids, ids, 1.0), 0).images)  # as `test`, of each view
    program = trace(Classifier(module.network, mean=data.source.mean, std=data.source.std), module.image_shape)
    with _draft(folder) as draft:
        found: dict[str, float] = {}
        files = {}
        for form in formats:
            file = draft / form.file
            file.write_bytes(form.content(program))
            network = form.load(file)
            logits = torch.cat([network(images[:1]), network(images[1:])])  # batches of any size
            found[form.file] = gap = float((logits - expected).abs().max() / expected.abs().max())
            files[form.file] = {"sha256": _digest(file), "images_compared": _NUM_IMAGES, "largest_difference": gap}
        if all(difference <= BOUND for difference in found.values()):
            content = {
                "checkpoint": {"file": checkpoint.name, "sha256": _digest(checkpoint)},
                "data": data.name,
                "network": str(module.header),
                "classes": data.classes,
                "images": f"uint8 (n, {', '.join(map(str, module.image_shape))}), RGB from 0 to 255; "
                "the network normalises them itself",
                "logits": f"float32 (n, {len(data.classes)}); their softmax are probabilities",
                "versions": versions(),
                "files": files,
            }
            (draft / RECORD).write_text(json.dumps(content, indent=2) + "\n")
            _move(draft, folder)
    return found


def _move(draft: Path, folder: Path) -> None:
    """One rename, or one for each file, its record last, if the folder is there: it may be a mount, or where we are."""
    if draft.parent != folder:
        draft.replace(folder)
        return
    for file in sorted(draft.iterdir(), key=lambda file: file.name == RECORD):
        file.replace(folder / file.name)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, or in it if it is there, which is gone afterwards, renamed or removed."""
    draft = folder / _PART if folder.is_dir() else folder.with_name(folder.name + _PART)
    try:
        shutil.rmtree(draft, ignore_errors=True)  # an export that was killed has left it
        draft.mkdir(parents=True)
        yield draft
    except OSError as error:
        problem = f"{folder} cannot be written: {error.strerror or error}"
        raise ConfigError(problem, remedy="choose another: --output FOLDER") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
