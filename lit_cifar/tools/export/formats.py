"""The formats of exported networks: how each is written, and how the file is run."""

from abc import ABC, abstractmethod
from importlib.util import find_spec
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from lit_cifar.errors import ConfigError
from lit_cifar.tools.export.classifier import Classifier


def trace(classifier: Classifier, image_shape: tuple[int, ...]) -> ExportedProgram:
    """The network as a graph of torch's operators, for batches of any size.

    Args:
        classifier: In evaluation mode.
        image_shape: (3, height, width).

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


class Format(ABC):
    """One kind of file.

    Attributes:
        file: Its name in the folder.
        packages: What it needs beside torch, by the names of the modules.
    """

    file: ClassVar[str]
    packages: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def check(cls) -> None:
        """Raise a `ConfigError` if a package is missing."""
        missing = [name for name in cls.packages if find_spec(name) is None]
        if missing:
            raise ConfigError(
                f"ONNX needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
                remedy="pip install 'lit-cifar[export]', or pass --format torch",
            )

    @staticmethod
    @abstractmethod
    def content(program: ExportedProgram) -> bytes:
        """The file's bytes. The caller writes them: a full disk is then one kind of error."""

    @staticmethod
    @abstractmethod
    def run(file: Path, batches: list[Tensor]) -> Tensor:
        """The logits of all batches, computed by the file alone."""


class TorchExport(Format):
    """For `torch.export.load`, and for the compilers that start from it."""

    file = "network.pt2"

    @staticmethod
    def content(program: ExportedProgram) -> bytes:
        """As `torch.export.save` writes it."""
        buffer = BytesIO()
        torch.export.save(program, buffer)
        return buffer.getvalue()

    @staticmethod
    def run(file: Path, batches: list[Tensor]) -> Tensor:
        """By torch. Loading can run code from the file, so only what this process wrote may be passed."""
        network = torch.export.load(file).module()
        return torch.cat([network(batch) for batch in batches])


class Onnx(Format):
    """For ONNX Runtime and everything else that reads ONNX."""

    file = "network.onnx"
    packages = ("onnx", "onnxscript", "onnxruntime")

    @staticmethod
    def content(program: ExportedProgram) -> bytes:
        """A model with its weights inside."""
        made: Any = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["images"], output_names=["logits"]
        )
        model = made.model_proto
        _name_batch_axis(model.graph)
        content: bytes = model.SerializeToString()
        return content

    @staticmethod
    def run(file: Path, batches: list[Tensor]) -> Tensor:
        """By ONNX Runtime, on the CPU."""
        import onnxruntime

        session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
        return torch.cat([torch.from_numpy(session.run(None, {"images": batch.numpy()})[0]) for batch in batches])


def _name_batch_axis(graph: Any) -> None:
    """Call the number of images "batch" wherever it is in an ONNX graph; torch calls it "s34" or the like."""
    name = graph.input[0].type.tensor_type.shape.dim[0].dim_param
    for value in (*graph.input, *graph.output, *graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param == name:
                dim.dim_param = "batch"


FORMATS: dict[str, type[Format]] = {"torch": TorchExport, "onnx": Onnx}
