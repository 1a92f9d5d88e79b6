"""Exported files compute what the checkpoint does, by themselves; what is damaged or has changed is refused."""

import errno
import importlib.util
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, Result, run_here
from test_own_network import draw_pictures
from torch import Tensor, nn

from lit_cifar import ConfigError, LitResNet
from lit_cifar.data.synthetic import Synthetic
from lit_cifar.models import build_network
from lit_cifar.tools.export import formats
from lit_cifar.tools.export.classifier import Classifier
from lit_cifar.tools.export.formats import FORMATS, Onnx, TorchExport, trace

MISSING = [name for name in Onnx.packages if importlib.util.find_spec(name) is None]
needs_onnx = pytest.mark.skipif(bool(MISSING), reason=f"the extra `export` is not installed: {', '.join(MISSING)}")


def fit(run: Path, *flags: str) -> Path:
    """The last checkpoint of a short training."""
    result = run_here("fit", *TINY, *flags, f"--run_dir={run}")
    assert result.status == 0, result.stderr
    return run / "checkpoints" / "last.ckpt"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fit(tmp_path_factory.mktemp("trained") / "run")


@pytest.fixture(scope="module")
def exported(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("exported") / "torch"
    result = run_here("export", checkpoint, "--format=torch", f"--output={folder}")
    assert result.status == 0, result.stderr
    assert "network.pt2: 100 of 100 images in the same class" in result.stdout
    return folder


def logits_of(checkpoint: Path, images: Tensor) -> Tensor:
    """With the normalisation written out."""
    pixels = (images.float() / 255 - Synthetic.mean[0]) / Synthetic.std[0]
    return LitResNet.load_from_checkpoint(checkpoint).eval()(pixels)


def some_images(num: int) -> Tensor:
    return torch.randint(0, 256, (num, 3, 32, 32), dtype=torch.uint8)


def refused(result: Result, *words: str) -> None:
    assert result.status == 2, result.stderr
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) <= 5
    for word in words:
        assert word in result.stderr


def test_the_file_needs_torch_alone_and_takes_any_number_of_images(checkpoint: Path, exported: Path) -> None:
    network = torch.export.load(exported / "network.pt2").module()
    for images in (some_images(1), some_images(7)):
        torch.testing.assert_close(network(images), logits_of(checkpoint, images), rtol=1e-4, atol=1e-4)


def test_the_record_says_what_goes_in_and_out(exported: Path) -> None:
    record = json.loads((exported / "export.json").read_text())
    assert record["checkpoint"]["file"] == "last.ckpt"
    assert record["network"] == "tiny with the imagenet stem and 10 classes"
    assert record["classes"] == [*Synthetic.classes]
    assert record["images"].startswith("uint8 (n, 3, 32, 32)")
    assert record["files"]["network.pt2"]["images_compared"] == 100
    checked = run_here("export", f"--check={exported}")
    assert (checked.status, checked.stdout) == (0, "unchanged since they were compared: network.pt2\n")


@needs_onnx
def test_onnx_runs_without_torch(checkpoint: Path) -> None:
    """Beside network.pt2, in the run's own folder, as without any options."""
    import onnxruntime

    result = run_here("export", checkpoint)
    assert result.status == 0, result.stderr
    folder = checkpoint.parents[1] / "export"
    assert {path.name for path in folder.iterdir()} == {"export.json", "network.onnx", "network.pt2"}
    session = onnxruntime.InferenceSession(folder / "network.onnx", providers=["CPUExecutionProvider"])
    (images,), (logits,) = session.get_inputs(), session.get_outputs()
    assert (images.shape, logits.shape) == (["batch", 3, 32, 32], ["batch", 10])
    for images in (some_images(1), some_images(7)):
        (found,) = session.run(["logits"], {"images": images.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), logits_of(checkpoint, images), rtol=1e-4, atol=1e-4)
    assert run_here("export", "--check", folder).status == 0
    refused(run_here("export", checkpoint), f"{folder} is not an empty folder", "--output FOLDER")


@pytest.mark.parametrize(
    "arch",
    [
        "vit_micro",
        *(
            pytest.param(arch, marks=pytest.mark.exhaustive)
            for arch in ("resnet18", "resnet50", "wide_resnet50_2", "vit_tiny", "tiny_bottleneck")
        ),
    ],
)
def test_every_network_can_be_traced(arch: Any, tmp_path: Path) -> None:
    network = build_network(arch, stem=None, num_classes=4, image_size=16).eval().requires_grad_(False)
    classifier = Classifier(network, mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.3)).eval()
    program = trace(classifier, (3, 16, 16))
    images = torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)
    kinds = [TorchExport] if MISSING else FORMATS.values()
    for kind in kinds:
        (tmp_path / kind.file).write_bytes(kind.content(program))
        found = kind.run(tmp_path / kind.file, [images[:1], images[1:]])
        torch.testing.assert_close(found, classifier(images), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- what is refused


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def save_again(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True), path)


def keep_weights(path: Path) -> None:
    torch.save(torch.load(path, weights_only=True)["state_dict"], path)


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (flip_a_bit, "is damaged: its content does not match the hash it carries"),
        (truncate, "is truncated, or not a checkpoint"),
        (save_again, "carries no hash of its content"),
        (keep_weights, "carries no hash of its content"),
        (Path.unlink, "cannot be read: No such file"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_damaged_checkpoint_is_refused(
    checkpoint: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    path = Path(shutil.copy(checkpoint, tmp_path))
    damage(path)
    refused(
        run_here("export", path, "--format=torch", f"--output={tmp_path / 'out'}"), f"{path} {problem}", "best.ckpt"
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("damage", "problem"),
    [(flip_a_bit, "has changed since it was compared"), (truncate, "has changed"), (Path.unlink, "cannot be read")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_changed_export_is_refused(
    exported: Path, tmp_path: Path, damage: Callable[[Path], None], problem: str
) -> None:
    folder = shutil.copytree(exported, tmp_path / "copy")
    damage(folder / "network.pt2")
    refused(run_here("export", f"--check={folder}"), f"{folder / 'network.pt2'} {problem}")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"files": {"network.pt2": {}}}'])
def test_a_folder_without_a_record_is_no_export(tmp_path: Path, content: str) -> None:
    refused(run_here("export", f"--check={tmp_path}"), "export.json cannot be read")
    (tmp_path / "export.json").write_text(content)
    refused(run_here("export", f"--check={tmp_path}"), "export.json cannot be read", "lit_cifar export")


def test_a_file_that_computes_something_else_is_not_kept(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its network takes the red channel for the blue one."""
    monkeypatch.setattr(
        Classifier, "forward", lambda self, images: self.network((images.flip(1) - self.mean) / self.std)
    )
    result = run_here("export", checkpoint, "--format=torch", f"--output={tmp_path / 'out'}")
    assert (result.status, result.stdout) == (1, "")
    assert "nothing was exported" in result.stderr
    assert not any(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    result = run_here("export", checkpoint, "--format=torch", f"--output={tmp_path / 'out'}")
    refused(result, f"{tmp_path / 'out'} cannot be written: No space left on device", "--output")
    assert not any(tmp_path.iterdir())


def test_onnx_without_its_packages_says_what_to_install(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "find_spec", lambda name: None)
    result = run_here("export", checkpoint, f"--output={tmp_path / 'out'}")
    refused(result, "onnx, onnxscript, onnxruntime", "pip install 'lit-cifar[export]'", "--format torch")


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ([], "export needs a checkpoint"),
        (["some.ckpt", "--check=folder"], "takes nothing else"),
        (["--check=folder", "--format=onnx"], "takes nothing else"),
        (["some.ckpt", "--format=onxx"], "choose from"),
        (["some.ckpt", "--format=torch", "--model.network=no_such.Net"], "no_such"),
        (["some.ckpt", "--format=torch", "--trainer.devices=2"], "trainer.devices"),
        (["some.ckpt", "--format=torch", "--config=no_such.yaml"], "--config=no_such.yaml is not a run's"),
    ],
)
def test_arguments_that_cannot_work(
    flags: list[str], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    refused(run_here("export", *flags), problem)


# ---------------------------------------------------------------- networks and pictures of one's own


def test_own_network_and_pictures(tmp_path: Path) -> None:
    """Trained in float64; there is no folder `test`, and fewer than 100 pictures."""
    pictures, run = tmp_path / "pictures", tmp_path / "run"
    draw_pictures(pictures / "cat", 9)
    draw_pictures(pictures / "dog", 8, seed=1)
    flags = ["--data.dataset=folder", f"--data.root={pictures}", "--data.image_size=24", "--data.batch_size=8"]
    own = ["--model.network=own_networks.Chain", "--model.network.width=4", "--trainer.precision=64-true"]
    result = run_here(
        "fit", *[flag for flag in TINY if "model." not in flag], *flags, *own, "--data.num_train=null",
        "--data.num_test=null", "--data.val_size=2", f"--run_dir={run}",
    )  # fmt: skip
    assert result.status == 0, result.stderr
    path, config = run / "checkpoints" / "last.ckpt", f"--config={run / 'config.yaml'}"

    def export(*more: str) -> Result:
        return run_here("export", path, "--format=torch", *more)

    refused(export(f"--data.root={pictures}"), "no code is run because a checkpoint names it", "own_networks.Chain")
    refused(export(*own[:1], f"--data.root={pictures}"), "(4, 3, 3, 3) in the checkpoint, (8, 3, 3, 3) in the model")
    refused(export(*own[:2]), "there is no folder data", "--data.root=FOLDER", "config.yaml")
    moved = pictures.rename(tmp_path / "moved")
    refused(export(config), f"there is no folder {pictures}", "--data.root=FOLDER")
    done = export(config, f"--data.root={moved}")
    assert done.status == 0, done.stderr
    assert "network.pt2: 17 of 17 images in the same class" in done.stdout
    assert json.loads((run / "export" / "export.json").read_text())["classes"] == ["cat", "dog"]

    again = f"--output={tmp_path / 'again'}"
    (moved / "cat" / "0.png").write_bytes(b"no picture")
    refused(export(config, f"--data.root={moved}", again), f"{moved / 'cat' / '0.png'} cannot be read as a picture")
    (moved / "dog").rename(moved / "fox")
    refused(
        export(config, f"--data.root={moved}", again), "was trained on folder of cat, dog, not on folder of cat, fox"
    )
    assert not (tmp_path / "again").exists()


class Branching(nn.Module):
    """Computes something else for dark images."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3)) if float(images.sum()) > 0 else images.amax(dim=(2, 3))


def test_a_network_that_cannot_be_traced_is_named() -> None:
    classifier = Classifier(Branching(), mean=(0.5, 0.5, 0.5), std=(0.2, 0.2, 0.2))
    with pytest.raises(ConfigError, match=r"(?s)cannot follow Branching: .*\n.*branch on values of tensors"):
        trace(classifier, (3, 8, 8))
