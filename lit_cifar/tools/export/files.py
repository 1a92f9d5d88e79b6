"""Exported files: how each is written, run and compared, and a folder that is made whole or not at all."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from hashlib import file_digest
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from lit_cifar.data import CIFAR10DataModule
from lit_cifar.data.images import Batch
from lit_cifar.errors import ConfigError
from lit_cifar.reporting.environment import versions
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.export.classifier import Classifier

RECORD = "export.json"
BOUND = 1e-4
"""How far a logit may differ, in units of the largest logit. Other kernels round otherwise, by about 1e-6."""
_NUM_IMAGES = 100


def trace(classifier: Classifier, image_shape: tuple[int, ...]) -> ExportedProgram:
    """The network as a graph of torch's operators, for any number of images of `image_shape`, (3, height, width).

    Raises:
        ConfigError: torch.export cannot follow the user's own network.
    """
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
    """One kind of file."""

    file: str  # its name in the folder
    packages: tuple[str, ...]  # what it needs beside torch, by the names of the modules
    content: Callable[[ExportedProgram], bytes]  # who calls it writes the bytes: a full disk is then one kind of error
    load: Callable[[Path], Callable[[Tensor], Tensor]]  # from images to logits, by the file alone

    def check(self) -> None:
        """Raise a `ConfigError` if a package is missing."""
        if missing := [name for name in self.packages if find_spec(name) is None]:
            raise ConfigError(
                f"ONNX needs packages that are not installed: {', '.join(missing)}",
                remedy="pip install 'lit-cifar[export]', or pass --format torch",
            )


def _torch_content(program: ExportedProgram) -> bytes:
    buffer = BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _load_torch(file: Path) -> Callable[[Tensor], Tensor]:
    """Loading can run code from the file, so only what this process wrote may be passed."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")  # by torch 2.11, which copies it
        return torch.export.load(file).module()


def _onnx_content(program: ExportedProgram) -> bytes:
    """A model with its weights inside; the number of images is called "batch"."""
    names: Any = {"input_names": ["images"], "output_names": ["logits"], "dynamic_shapes": {"images": {0: "batch"}}}
    made: Any = torch.onnx.export(program, dynamo=True, verbose=False, **names)
    content: bytes = made.model_proto.SerializeToString()
    return content


def _load_onnx(file: Path) -> Callable[[Tensor], Tensor]:
    """By ONNX Runtime, on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(None, {"images": images.numpy()})[0])


FORMATS = {
    "torch": Format("network.pt2", (), _torch_content, _load_torch),
    "onnx": Format("network.onnx", ("onnx", "onnxscript", "onnxruntime"), _onnx_content, _load_onnx),
}


@torch.no_grad()
def export(
    module: LitResNet, data: CIFAR10DataModule, formats: Sequence[Format], *, folder: Path, record: dict[str, Any]
) -> dict[str, float]:
    """Write the files, run each again, and compare it with the checkpoint; `folder` is made only if all agree.

    Args:
        module: With the network, in evaluation mode.
        data: The data set that it was trained on; its images are not read.
        formats: What to write.
        folder: Must not exist, or be empty.
        record: What `export.json` says of the checkpoint.

    Returns:
        By file, the largest difference of a logit on images of random bytes, in units of the largest logit.

    Raises:
        ConfigError: The network cannot be traced, or `folder` cannot be written.
    """
    random, ids = torch.Generator().manual_seed(0), torch.arange(_NUM_IMAGES)
    images = torch.randint(256, (_NUM_IMAGES, *module.image_shape), generator=random).to(torch.uint8)
    expected = module(data.on_after_batch_transfer(Batch(images, ids, ids, 1.0), 0).images)  # as in `test`
    classifier = Classifier(module.network, mean=data.source.mean, std=data.source.std)
    program = trace(classifier, module.image_shape)
    with _draft(folder) as draft:
        found: dict[str, float] = {}
        files = {}
        for form in formats:
            file = draft / form.file
            file.write_bytes(form.content(program))
            network = form.load(file)
            logits = torch.cat([network(images[:1]), network(images[1:])])  # batches of any size
            found[form.file] = gap = float((logits - expected).abs().max() / expected.abs().max())
            files[form.file] = {"sha256": digest(file), "images_compared": _NUM_IMAGES, "largest_difference": gap}
        if all(difference <= BOUND for difference in found.values()):
            content = record | _description(module, data) | {"files": files}
            (draft / RECORD).write_text(json.dumps(content, indent=2) + "\n")
            draft.replace(folder)
    return found


def _description(module: LitResNet, data: CIFAR10DataModule) -> dict[str, Any]:
    shape = ", ".join(map(str, module.image_shape))
    return {
        "network": str(module.header),
        "classes": data.classes,
        "images": f"uint8 (n, {shape}), RGB from 0 to 255; the network normalises them itself",
        "logits": f"float32 (n, {len(data.classes)}); their softmax are probabilities",
        "versions": versions(),
    }


def digest(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


@contextmanager
def _draft(folder: Path) -> Iterator[Path]:
    """A folder beside `folder`, which is gone afterwards, renamed or removed."""
    draft = folder.with_name(f"{folder.name}.part")
    try:
        shutil.rmtree(draft, ignore_errors=True)  # of an export that was killed
        draft.mkdir(parents=True)
        yield draft
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}", remedy="choose another: --output FOLDER"
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
