"""Made samples in place of data sets that are not here."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import run_here
from relation_scripts import DIGITS

# Each name, its arguments, and what is expected: shape, least and largest label, whether all are there, samples.
LOOK = """
import torch, torchvision
from torchvision.transforms import ToTensor
from lit_cifar.checks.relations.made_data import Made, make_data
make_data(Made())
class Own(torchvision.datasets.CIFAR10):
    pass
kinds = vars(torchvision.datasets) | {"Own": Own}
for name, given in GIVEN:
    data = kinds[name]("nowhere", **given, transform=ToTensor())
    inputs, labels = zip(*(data[index] for index in range(len(data))))
    pixels = torch.stack(inputs)
    assert isinstance(data, kinds[name]) and 0 <= pixels.min() < 0.1 and 0.9 < pixels.max() <= 1, pixels.max()
    print(name, len(data), [*inputs[0].shape], min(labels), max(labels), len(set(labels)), len(set(map(type, labels))))
"""
KINDS = {
    ("MNIST", ()): "300 [1, 28, 28] 0 9 10 1",
    ("FashionMNIST", (("train", False), ("download", True))): "150 [1, 28, 28] 0 9 10 1",
    ("QMNIST", ()): "300 [1, 28, 28] 0 9 10 1",
    ("EMNIST", (("split", "letters"),)): "300 [1, 28, 28] 1 26 26 1",
    ("Own", ()): "300 [3, 32, 32] 0 9 10 1",
    ("CIFAR100", (("train", False),)): "150 [3, 32, 32] 0 99 100 1",
    ("SVHN", (("split", "test"),)): "150 [3, 32, 32] 0 9 10 1",
    ("STL10", (("split", "train+unlabeled"),)): "300 [3, 96, 96] -1 9 11 1",
    ("ImageFolder", ()): "300 [3, 256, 256] 0 1 2 1",
}


@pytest.mark.slow
def test_made_samples_have_the_shapes_and_labels_of_the_real_ones(tmp_path: Path) -> None:
    given = [(name, dict(words)) for name, words in KINDS]
    program = LOOK.replace("GIVEN", repr(given))
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    expected = [f"{name} {said}" for (name, _), said in KINDS.items()]
    assert done.stdout.splitlines() == expected, done.stderr
    assert [path.name for path in tmp_path.rglob("*")] == ["nowhere"]  # which a download makes


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    def relations(*words: str, bug: str = "") -> str:
        monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
        monkeypatch.setenv("BUG", bug)
        (tmp_path / "train.py").write_text(DIGITS)
        return run_here("relations", tmp_path / "train.py", "--only=epochs", *words, check=False).stdout

    return relations


def test_a_data_set_that_is_not_there_can_be_made(said: Callable[..., str]) -> None:
    assert re.search(r"^CRASH .*Dataset not found.*; --fake-data makes samples", said(), flags=re.M)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "outcome"), [("", "PASS"), ("same order", "FAIL")])
def test_a_training_on_made_samples_is_judged(bug: str, outcome: str, said: Callable[..., str]) -> None:
    found = said("--fake-data", bug=bug)
    first = r"^PASS +run .* on made samples in place of torchvision.datasets.MNIST$"
    assert re.search(first, found, flags=re.M)
    assert re.search(rf"^{outcome} +order of epochs ", found, flags=re.M)
