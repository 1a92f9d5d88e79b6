"""Exported files compute what the checkpoint does, by themselves; what is damaged or has changed is refused."""

import errno
import importlib.util
import json
import shutil
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, graded, own_network, refused, run_here
from data_files import draw_pictures
from torch import Tensor, nn

from lit_cifar import ConfigError, LitResNet
from lit_cifar.data.synthetic import Synthetic
from lit_cifar.models import build_network
from lit_cifar.tools.export import FORMATS, Classifier, trace

TORCH = "--format=torch"
MISSING = [name for name in FORMATS["onnx"].packages if importlib.util.find_spec(name) is None]
KINDS = {name: kind for name, kind in FORMATS.items() if name == "torch" or not MISSING}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The last of a short training."""
    run = tmp_path_factory.mktemp("trained") / "run"
    run_here("fit", *TINY, f"--run_dir={run}")
    return run / "checkpoints" / "last.ckpt"


def some_images(num: int, side: int = 32) -> Tensor:
    return torch.randint(0, 256, (num, 3, side, side), dtype=torch.uint8)


def test_each_file_computes_by_itself_what_the_checkpoint_does(checkpoint: Path) -> None:
    """As without any options: in the run's own folder."""
    result = run_here("export", checkpoint, *([TORCH] if MISSING else []))
    assert "network.pt2: logits within " in result.stdout
    folder = checkpoint.parents[1] / "export"
    record = json.loads((folder / "export.json").read_text())
    assert record["checkpoint"]["file"] == "last.ckpt"
    assert record["network"] == "tiny with the imagenet stem and 10 classes"
    assert record["classes"] == [*Synthetic.classes]
    assert record["images"].startswith("uint8 (n, 3, 32, 32)")
    assert {path.name for path in folder.iterdir()} == {"export.json", *record["files"]}
    trained = LitResNet.load_from_checkpoint(checkpoint).eval()
    for kind in KINDS.values():
        network, entry = kind.load(folder / kind.file), record["files"][kind.file]
        for images in (some_images(1), some_images(7)):
            expected = trained((images.float() / 255 - Synthetic.mean[0]) / Synthetic.std[0])
            torch.testing.assert_close(network(images), expected, rtol=1e-4, atol=1e-4)
        assert 0.0 <= entry["largest_difference"] <= 1e-4
        assert entry["sha256"] == sha256((folder / kind.file).read_bytes()).hexdigest()
    refused("export", checkpoint, TORCH, says=(f"{folder} is not an empty folder", "--output FOLDER"))


@pytest.mark.skipif(bool(MISSING), reason=f"the extra `export` is not installed: {', '.join(MISSING)}")
def test_onnx_names_its_axes(tmp_path: Path) -> None:
    import onnxruntime

    classifier = Classifier(build_network("tiny", stem="imagenet", num_classes=4, image_size=16), mean=[0], std=[1])
    (tmp_path / "network.onnx").write_bytes(FORMATS["onnx"].content(trace(classifier, (3, 16, 16))))
    session = onnxruntime.InferenceSession(tmp_path / "network.onnx", providers=["CPUExecutionProvider"])
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.shape) == ("images", ["batch", 3, 16, 16])
    assert (logits.name, logits.shape) == ("logits", ["batch", 4])


MORE = ("resnet18", "resnet50", "wide_resnet50_2", "vit_tiny", "tiny_bottleneck", "fast")


@pytest.mark.parametrize("arch", graded("vit_micro", exhaustive=MORE))
def test_every_network_can_be_traced(arch: Any, tmp_path: Path) -> None:
    network = build_network(arch, stem=None, num_classes=4, image_size=16).eval().requires_grad_(False)
    for parameter in network.parameters():
        if not parameter.any():  # as the filters of `fast` before a fit
            torch.nn.init.normal_(parameter)
    classifier = Classifier(network, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3))
    program, images = trace(classifier, (3, 16, 16)), some_images(5, side=16)
    for kind in KINDS.values():
        (tmp_path / kind.file).write_bytes(kind.content(program))
        found = kind.load(tmp_path / kind.file)(images)
        torch.testing.assert_close(found, classifier(images), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- what is refused


def test_damage_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    path = Path(shutil.copy(checkpoint, tmp_path))
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    words = (f"{path} is damaged: its content does not match the hash it carries", "best.ckpt")
    refused("export", path, TORCH, f"--output={tmp_path / 'out'}", says=words)
    assert not (tmp_path / "out").exists()


def test_a_wrong_file_is_not_kept(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its network takes the red channel for the blue one."""
    swapped = lambda self, images: self.network((images.flip(1) - self.mean) / self.std)  # noqa: E731
    monkeypatch.setattr(Classifier, "forward", swapped)
    result = run_here("export", checkpoint, TORCH, f"--output={tmp_path / 'out'}", check=False)
    assert (result.status, result.stdout) == (1, "")
    assert "nothing was exported" in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_folder_that_is_there_is_not_replaced(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be a mount, a link, or the working directory."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path / "link")
    run_here("export", checkpoint, TORCH, "--output=.")
    assert {path.name for path in (tmp_path / "real").iterdir()} == {"export.json", "network.pt2"}
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link"}


def test_a_full_disk_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    words = (f"{tmp_path / 'out'} cannot be written: No space left on device", "--output")
    refused("export", checkpoint, TORCH, f"--output={tmp_path / 'out'}", says=words)
    assert not any(tmp_path.iterdir())


def test_onnx_says_what_is_to_be_installed(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.tools.export.find_spec", lambda name: None)
    words = ("onnx, onnxscript, onnxruntime", "pip install 'lit-cifar[export]'", "--format torch")
    refused("export", checkpoint, f"--output={tmp_path / 'out'}", says=words)


# ---------------------------------------------------------------- networks and pictures of one's own


def test_own_network_and_pictures(tmp_path: Path) -> None:
    """Trained in float64; the classes are folders."""
    pictures, run = tmp_path / "pictures", tmp_path / "run"
    draw_pictures(pictures / "cat", 9)
    draw_pictures(pictures / "dog", 8, seed=1)
    flags = ["--data.dataset=folder", f"--data.root={pictures}", "--data.image_size=24", "--data.batch_size=8"]
    own = ["--model.network=own_networks.Chain", "--model.network.width=4", "--trainer.precision=64-true"]
    sizes = ["--data.num_train=null", "--data.num_test=null", "--data.val_size=2", "--model.test_views=2"]
    run_here("fit", *own_network("Chain"), *flags, *own, *sizes, f"--run_dir={run}")
    path, config = run / "checkpoints" / "last.ckpt", f"--config={run / 'config.yaml'}"

    root = f"--data.root={pictures}"
    refused("export", path, TORCH, root, says=("no code is run because a checkpoint names it", "own_networks.Chain"))
    moved = pictures.rename(tmp_path / "moved")
    assert "means over 2 views of an image, and a file computes one" in run_here("export", path, TORCH, config).stdout
    assert json.loads((run / "export" / "export.json").read_text())["classes"] == ["cat", "dog"]
    (moved / "dog").rename(moved / "fox")
    words = (
        "class 1 is dog in the checkpoint and fox in these data; it was trained on 2 classes (cat, dog), and these",
    )
    refused("export", path, TORCH, config, f"--data.root={moved}", f"--output={tmp_path / 'again'}", says=words)
    assert not (tmp_path / "again").exists()


class Branching(nn.Module):
    """Computes something else for dark images."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3)) if float(images.sum()) > 0 else images.amax(dim=(2, 3))


def test_a_network_that_cannot_be_traced_is_named() -> None:
    classifier = Classifier(Branching(), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    with pytest.raises(ConfigError, match=r"(?s)cannot follow Branching: .*\n.*branch on values of tensors"):
        trace(classifier, (3, 8, 8))
