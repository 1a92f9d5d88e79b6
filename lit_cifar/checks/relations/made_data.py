"""Made samples in place of known data sets, of the same shapes, types, ranges and numbers of classes.

They are the same in each process, and nothing is downloaded. All other data sets stay as they are.
"""

import inspect
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from traceback import walk_tb
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image

from lit_cifar.checks.relations.patching import patched

_TO_TRAIN, _TO_TEST = 300, 150  # samples: more than most batches, and the last one is shorter, as with most real data
_TESTS = ("val", "test", "eval", "dev")  # begin the names of parts that are not trained
_LARGE = 256  # pixels of the side of an image that is a file
# Pixels of a side, channels, whether these come first, and where labels are, of images that are not files.
_IN_MEMORY = {
    "MNIST": (28, 1, False, "targets"),
    "CIFAR10": (32, 3, False, "targets"),
    "SVHN": (32, 3, True, "labels"),
    "STL10": (96, 3, True, "labels"),
}
_MADE = {*_IN_MEMORY, "ImageFolder", "ImageNet"}
# Columns of texts, and the number of classes of the column `label`, of data sets of Hugging Face. Others have both.
_COLUMNS = {"wikitext": (["text"], 0), "ag_news": (["text"], 4), "glue/sst2": (["sentence"], 2)}
_COLUMNS |= dict.fromkeys(("glue/mrpc", "glue/rte"), (["sentence1", "sentence2"], 2))
Made: TypeAlias = dict[str, None]  # the data sets that made samples stand for, in their order
_WORDS = ["the", "made", "words", "of", "a", "text", "that", "nobody", "reads", "to", "learn", "from", "it"]


def make_data(made: Made) -> None:
    """Let the script have made samples where it asks for known data sets."""
    patched(torch.utils.data, "random_split", partial(divided, made))
    for name in _IN_MEMORY:
        patched(f"torchvision.datasets:{name}", "__init__", partial(_make_in_memory, made, name))
    patched("torchvision.datasets:ImageNet", "__init__", _make_imagenet)
    patched("torchvision.datasets:ImageFolder", "__init__", partial(_make_folder, made))
    patched("datasets", "load_dataset", partial(_load, made))


def misses_data(error: BaseException | None) -> bool:
    """Whether an error, or one before it, says that a data set is not there for which there are made samples."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            module, function = frame.f_globals.get("__name__", ""), frame.f_code.co_name
            kinds = {kind.__name__ for kind in type(frame.f_locals.get("self")).__mro__}
            is_made = module.startswith("torchvision.datasets.") and function == "__init__" and bool(kinds & _MADE)
            is_named = (module, function) == ("datasets.load", "load_dataset") and not _files(frame.f_locals)
            if is_made or is_named:
                return not isinstance(error, TypeError | ValueError)  # a mistake in the arguments
        error = error.__cause__ or error.__context__
    return False


def divided(made: Made, split: Any, dataset: Any, lengths: Sequence[float], *args: Any, **own: Any) -> Any:
    """Divide as many samples as there are, where a script counts on those of the real data set."""
    sizes = [abs(length) for length in lengths]  # what is left of fewer samples than some part has is below 0
    total = sum(sizes)
    is_scaled = made and total > 1 and total != len(dataset)
    return split(dataset, [size / total for size in sizes] if is_scaled else lengths, *args, **own)


def _numbers(part: str) -> range:
    """Numbers of the samples of a part of a data set, such as "train"."""
    is_test = part.lower().startswith(_TESTS)
    return range(_TO_TRAIN, _TO_TRAIN + _TO_TEST) if is_test else range(_TO_TRAIN)


def picture(label: int, number: int, *, size: int, channels: int = 3) -> np.ndarray[Any, Any]:
    """An image of a class in bytes: some noise over coarse squares that the class has in common."""
    squares, noise = (np.random.default_rng([kind, key]) for kind, key in enumerate((label, number)))
    of_class = squares.integers(0, 192, (4, 4, channels)).repeat(size // 4, 0).repeat(size // 4, 1)
    return (of_class + noise.integers(0, 64, (size, size, channels))).astype(np.uint8)


def _make_in_memory(made: Made, name: str, make: Any, own: Any, *args: Any, **given: Any) -> None:
    from torchvision import datasets  # which the script has imported

    made[f"torchvision.datasets.{type(own).__name__}"] = None
    bound = inspect.signature(make).bind(own, *args, **given)
    bound.apply_defaults()
    arguments = bound.arguments
    common = {name: arguments[name] for name in ("root", "transform", "target_transform")}
    datasets.VisionDataset.__init__(own, **common)
    if arguments["download"]:  # which makes the folder, where a script may write more
        with suppress(OSError):  # a folder outside, to which no run may write
            Path(own.root).mkdir(parents=True, exist_ok=True)
    vars(own).update({name: arguments[name] for name in ("train", "split") if name in arguments})
    numbers = _numbers("test" if arguments.get("train") is False else arguments.get("split", "train"))
    size, channels, are_first, labels = _IN_MEMORY[name]
    classes = range(100 if isinstance(own, datasets.CIFAR100) else 10)
    if isinstance(own, datasets.EMNIST):
        classes = range(own.split == "letters", len(own.classes_split_dict[own.split]))
    targets = np.array([classes[number % len(classes)] for number in numbers])
    data = np.stack([picture(*pair, size=size, channels=channels) for pair in zip(targets, numbers, strict=True)])
    if name == "MNIST":
        own.data, own.targets = torch.from_numpy(data.squeeze(-1)), torch.from_numpy(targets)
        if isinstance(own, datasets.QMNIST):
            own.targets = own.targets[:, None].repeat(1, 8)
        return
    if name == "STL10" and "unlabeled" in own.split:
        targets[len(targets) // 2 if "+" in own.split else 0 :] = -1
    own.data = data.transpose(0, 3, 1, 2) if are_first else data
    setattr(own, labels, targets if are_first else targets.tolist())
    own.classes = [f"class {number}" for number in classes]
    own.class_to_idx = {name: number for number, name in enumerate(own.classes)}


def _make_imagenet(_: Any, own: Any, root: Any, split: str = "train", **given: Any) -> None:
    from torchvision import datasets

    names = [f"n{number:08d}" for number in range(1000)]
    datasets.ImageFolder.__init__(own, Path(root, split), **given, names=names, allow_empty=True)
    own.root, own.split, own.wnids, own.wnid_to_idx = root, split, own.classes, own.class_to_idx
    own.classes = [(name,) for name in names]


def _make_folder(made: Made, make: Any, own: Any, root: Any, *args: Any, names: Any = None, **given: Any) -> None:
    """Make images in as many classes as the folder has, or in two, which any network can tell apart."""
    made[f"torchvision.datasets.{type(own).__name__}"] = None
    classes = names or sorted(path.name for path in Path(root).glob("*/")) or ["a", "b"]
    place = Path(tempfile.mkdtemp(prefix="made-"))
    for name in classes:
        (place / name).mkdir()
    for number in _numbers(Path(root).name):
        label = number % len(classes)
        image = Image.fromarray(picture(label, number, size=_LARGE // 4)).resize((_LARGE, _LARGE))
        image.save(place / classes[label] / f"{number:05d}.jpg")
    make(own, str(place), *args, **given)
    own.root = root


def _load(made: Made, load: Any, *args: Any, **given: Any) -> Any:
    if load.__module__ != "datasets.load":  # of a script's own module of this name
        return load(*args, **given)
    arguments = inspect.signature(load).bind(*args, **given).arguments
    if _files(arguments):
        return load(*args, **given)
    import datasets  # which the script has imported

    path, name, split = arguments["path"], arguments.get("name"), arguments.get("split")
    known = path.rpartition("/")[2]  # of nyu-mll/glue, as of glue
    made["/".join(filter(None, ("load_dataset of " + path, name)))] = None
    texts, classes = _COLUMNS.get(f"{known}/{name}") or _COLUMNS.get(known) or (["text"], 2)
    label = {"label": datasets.ClassLabel(num_classes=classes)} if classes else {}
    if known == "glue":
        label["idx"] = datasets.Value("int32")
    features = datasets.Features(dict.fromkeys(texts, datasets.Value("string")) | label)

    def rows(part: str) -> Any:
        numbers = _numbers(part)
        columns = {column: [_text(number, place) for number in numbers] for place, column in enumerate(texts)}
        labels = {column: [number if column == "idx" else number % classes for number in numbers] for column in label}
        data = datasets.Dataset.from_dict(columns | labels, features=features)
        return data.to_iterable_dataset() if arguments.get("streaming") else data

    if split is None:
        return datasets.DatasetDict({part: rows(part) for part in ("train", "validation", "test")})
    return [rows(str(part)) for part in split] if isinstance(split, list | tuple) else rows(str(split))


def _files(arguments: Mapping[str, Any]) -> Any:
    """What `load_dataset` is told of files, which a data set of the Hub has not."""
    return arguments.get("data_files") or arguments.get("data_dir") or Path(arguments["path"]).exists()


def _text(number: int, place: int) -> str:
    draws = np.random.default_rng([number, place])
    return " ".join(draws.choice(_WORDS, draws.integers(20, 60)))
