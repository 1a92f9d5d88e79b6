"""Folders of the user's own pictures: their splits, classes and files."""

import os
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, zip_longest
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

import numpy as np
from lightning.pytorch.utilities import rank_zero_warn
from numpy.typing import NDArray

from lit_cifar.data.dataset import Split
from lit_cifar.data.picture_files import SUFFIXES, is_hidden, list_files
from lit_cifar.errors import DataError, nearest, printable

# The usual names of folders to train, validate and test on, in any case.
SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_SPLIT_WORD = re.compile(
    r"(?<![a-z])(train|training|val|valid|validation|test|testing|dev|eval|evaluation|holdout)(set)?s?(?![a-z])"
)
_IMAGES = {"image", "img", "jpegimage", "picture", "photo"}
_TARGETS = {"mask", "label", "annotation", "segmentation", "groundtruth", "ground_truth", "gt", "json", "xml"}
_TARGETS |= {"preview", "thumbnail", "overlay", "depth", "bbox", "imageset", "segmentationclas", "segmentationobject"}
# What may tell the labels of pictures that are in no folders of classes, by the end of its name.
_LABELS = {".mdb": "an LMDB data base", ".tar": "a webdataset"}
_LABELS |= dict.fromkeys((".npy", ".npz", ".h5", ".hdf5", ".mat", ".pt", ".tfrecord"), "a file of arrays")
_LABELS |= dict.fromkeys((".zip", ".gz", ".tgz"), "an archive")
_LABELS |= dict.fromkeys((".csv", ".tsv", ".txt", ".json", ".jsonl", ".parquet", ".xlsx"), "a table")
_PAGE = "docs/data-and-networks.md has lines of Python that make folders of it"
_CLASS_WANTED = "put pictures of the class into it, or remove it if there is no such class"


class File(NamedTuple):
    path: str  # relative to the folder of the split
    label: int


@dataclass(frozen=True)
class PictureFolders:
    """`root/train/CLASS/*` or `root/CLASS/*`, with `root/val/CLASS/*` and `root/test/CLASS/*` if there are such.

    Or other usual names of these. In the name of a class control characters and bytes that are not UTF-8 are escaped,
    and letters with accents are composed (NFC). A folder that looks like a split and is not used is an error, as it
    would be a class, or be missed.
    """

    root: Path
    splits: dict[Split, Path]  # folders in `root` that hold a split
    classes: dict[str, Path]  # folders of pictures to train on, by the printable names of their classes, sorted by name
    unused: list[str]  # files and folders beside these, relative to `root`
    _places: dict[Split, NDArray[np.int64]] = field(default_factory=dict)  # places of the files of a listed split

    @classmethod
    def of(cls, root: Path) -> "PictureFolders":
        """The picture folders of `root`. Raise a `DataError` for one that looks like a split and is not used."""
        splits = _splits(root)
        folder = splits.get("train", root)
        classes = {name: path for name, path in _by_class(folder).items() if path not in splits.values()}
        if not classes:
            problem = f"{folder} holds no folders of pictures"
            raise DataError(problem, remedy=f"{_told_elsewhere(root, folder)}put pictures into {folder}/CLASS/")
        used = {folder, *splits.values(), *classes.values()}
        beside = [path for path in sorted({*root.iterdir(), *folder.iterdir()} - used) if not is_hidden(path.name)]
        _check_beside(root, beside, classes)
        _check_classes(folder, classes, [*splits.values()])
        return cls(root, splits, classes, [printable(str(path.relative_to(root))) for path in beside])

    def folder(self, split: Split) -> Path:
        """The folder of a split, whether it exists or not."""
        return self.splits.get(split) or (self.root if split == "train" else self.root / split)

    def files(self, split: Split) -> list[File]:
        """The files of a split: one of each class in turn, in the order of their names."""
        folder = self.folder(split)
        of_split = self.classes if split == "train" else _by_class(folder)
        if unknown := [path for name, path in of_split.items() if name not in self.classes]:
            meant = nearest(_name(unknown[0]).strip(), self.classes)
            problem = f"{printable(str(unknown[0]))} is a class without pictures to train on"
            other = _told_elsewhere(folder) + (f"rename it to {meant}, " if meant else "")
            raise DataError(problem, remedy=f"{other}move it away, or put pictures of it beside those to train on")
        by_class: list[list[File]] = []
        places: list[int] = []
        for label, name in enumerate(self.classes):
            if own := of_split.get(name):
                files = list_files(own, remedy=_CLASS_WANTED)
                _check_within(own, files, self.classes)
                places += filter(None, files.values())
                by_class.append([File(f"{own.name}/{path}", label) for path in files])
        if not by_class:
            predict = f"; without labels {shlex.quote(f'--data.predict_dir={folder}')} of predict classifies them"
            remedy = f"{_told_elsewhere(folder)}put pictures into {folder}/CLASS/{predict if split == 'test' else ''}"
            raise DataError(f"{folder} holds no folders of classes", remedy=remedy)
        self._tell_again(split, places)
        return [file for turn in zip_longest(*by_class) for file in turn if file is not None]

    def _tell_again(self, split: Split, places: list[int]) -> None:
        """Warn of files of `split`, in these `places`, that are there twice or in another split that was listed."""
        own = np.unique(np.array(places, dtype=np.int64))
        again = {split: len(places) - len(own)}
        for other, theirs in self._places.items():
            if other != split:
                again[other] = len(np.intersect1d(own, theirs, assume_unique=True))
        for other, number in again.items():
            if number:
                here, there = (printable(str(self.folder(each))) for each in (split, other))
                links = f"{number:,} of {len(places):,} files in {here} are in {there} too, by links"
                rank_zero_warn(f"{links}: they count twice, or what is measured on them is of pictures that are known")
        self._places[split] = own


def _split_of(name: str) -> Split | None:
    return next((split for split, names in SPLITS.items() if name.lower() in names), None)


def _like_split(name: str) -> bool:
    """Whether `name` contains a word of a split, such as `seg_train`, `testA` or `ValidationSet`."""
    return _SPLIT_WORD.search(re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower()) is not None


def _splits(root: Path) -> dict[Split, Path]:
    found: dict[Split, Path] = {}
    for folder in sorted(_folders(root)):
        split = _split_of(folder.name)
        if split in found:
            problem = f"{found[split]} and {folder} are for the same pictures by their names"
            raise DataError(problem, remedy="move the pictures of one of them into the other, or move it away")
        if split is not None:
            found[split] = folder
            if len({each.resolve() for each in found.values()}) < len(found):
                raise DataError(f"{folder} is a link to pictures of another split", remedy="remove it")
    flat = next((folder for folder in found.values() if not _inner(folder)), None)
    if flat is not None and "train" not in found:
        problem = f"{flat} has no folders of classes: it may be a class, or a split whose classes nobody knows"
        raise DataError(problem, remedy=f"if it is a class, move all of them into {root}/train/; if not, move it away")
    return found


def _name(folder: Path) -> str:
    """The name of a folder's class, NFC: macOS writes letters with accents in two parts."""
    return printable(normalize("NFC", folder.name))


def _by_class(folder: Path) -> dict[str, Path]:
    """The folders in `folder`, by the names of their classes, sorted."""
    found: dict[str, Path] = {}
    for path in sorted(_folders(folder), key=lambda path: normalize("NFC", path.name)):
        if found.setdefault(_name(path), path) != path:
            raise DataError(f"two folders in {folder} have the same name when printed", remedy="rename one of them")
    return found


def _inner(folder: Path) -> set[str]:
    with os.scandir(folder) as entries:
        return {_name(Path(entry.name)) for entry in entries if not is_hidden(entry.name) and entry.is_dir()}


def _check_beside(root: Path, beside: Iterable[Path], classes: dict[str, Path]) -> None:
    """Refuse pictures that would not be used."""
    for path in filter(Path.is_dir, beside):
        if _like_split(path.name) or {_name(path), *_inner(path)} & classes.keys():
            problem = f"{printable(str(path))} looks like pictures to train, validate or test on, and would not be used"
            raise DataError(problem, remedy=f"move it away, or into {root}/train, {root}/val or {root}/test")


def _check_classes(folder: Path, classes: dict[str, Path], splits: Iterable[Path]) -> None:
    """Refuse splits that would be classes: their names, or the names of their folders, tell."""
    for path in classes.values():
        if not _like_split(path.name) or not (inner := _inner(path)):
            continue
        others = set().union(*(_inner(other) for other in (*classes.values(), *splits) if other != path))
        if inner & (others | classes.keys()):
            problem = f"{printable(str(path))} looks like pictures to train, validate or test on, and would be a class"
            remedy = "name it train, val or test; if it is a class, put its pictures into it without folders"
            raise DataError(problem, remedy=remedy)
    _check_level(folder, classes)
    if len(classes) == 1:
        (only,) = classes.values()
        problem = f"{printable(str(folder))} holds one class, {printable(only.name)}: there is nothing to tell apart"
        remedy = f"{_told_elsewhere(folder, only)}add a folder of another class; if this one holds the classes, pass "
        raise DataError(problem, remedy=remedy + shlex.quote(f"--data.root={only}"))


def _told_elsewhere(*places: Path) -> str:
    """The beginning of a remedy where something else than folders may tell the classes; "" if nothing is seen."""
    found = {_LABELS.get(path.suffix.lower()) for place in places for path in islice(place.iterdir(), 1000)} - {None}
    return f"{found.pop()} may tell the classes: {_PAGE}; or " if found else ""


def _check_level(folder: Path, classes: dict[str, Path]) -> None:
    """Refuse folders of patients, folds or sources, each of which holds the same classes, and targets beside images."""
    words = {name.lower().removesuffix("s") for name in classes}
    if words & _IMAGES and words & _TARGETS and words <= _IMAGES | _TARGETS:
        problem = f"{printable(str(folder))} holds {' and '.join(classes)}, which are no classes"
        raise DataError(problem, remedy=f"make a folder of each class with its pictures, {folder}/CLASS/")
    inner = {name: _inner(path) for name, path in classes.items()}
    counted = Counter(name for names in inner.values() for name in names)
    beside = {
        entry.suffix.lower() for path in classes.values() for entry in path.iterdir() if not is_hidden(entry.name)
    }
    if beside and beside <= _LABELS.keys():
        remedy = f"{_told_elsewhere(*classes.values())}put pictures into {folder}/CLASS/"
        raise DataError(f"the classes of {printable(str(folder))} hold no pictures", remedy=remedy)
    if len(counted) > 1 and all(inner.values()) and min(counted.values()) > 1 and not beside & SUFFIXES:
        named = ", ".join(sorted(counted)[:3])
        problem = f"each of {', '.join([*classes][:3])} holds folders of the same names, {named}, perhaps the classes"
        remedy = f"make a folder of each class, as {folder}/{min(counted)}/, with pictures and no folders in it"
        raise DataError(problem, remedy=remedy)


def _check_within(folder: Path, files: Iterable[str], classes: dict[str, Path]) -> None:
    """Refuse splits or several classes within a class, `folder`."""
    below = {tuple(file.split("/")[:-1][:2]) for file in files if "/" in file}
    inner = {name: _split_of(name) for name, *_ in below}
    nested = any(inner[name] for name, *deeper in below if deeper)
    if nested or len({*inner.values()} - {None}) > 1 or len(inner.keys() & classes.keys()) > 1:
        names = ", ".join(map(printable, sorted(inner)[:5]))
        problem = f"{printable(str(folder))} would be a class, and holds others or splits: {names}"
        remedy = "make folders ROOT/train/CLASS, ROOT/val/CLASS and ROOT/test/CLASS, and pass --data.root=ROOT"
        raise DataError(problem, remedy=remedy)


def _folders(folder: Path) -> list[Path]:
    """The folders in `folder` that are not hidden."""
    if not folder.is_dir():
        if folder.exists():
            raise DataError(f"{folder} is a file", remedy=f"unpack it into folders of pictures, ROOT/CLASS/; {_PAGE}")
        raise DataError(f"there is no folder {folder}", remedy=f"put pictures into {folder}/CLASS/")
    entries = [path for path in folder.iterdir() if not is_hidden(path.name)]
    broken = next((path for path in entries if path.is_symlink() and not path.exists()), None)
    if broken is not None:  # it may be a class, or pictures to validate on
        problem = f"{printable(str(broken))} is a link to {printable(str(broken.readlink()))}, which is not there"
        remedy = f"put it back, as by mounting its disk, or remove the link: rm {shlex.quote(str(broken))}"
        raise DataError(problem, remedy=remedy)
    return [path for path in entries if path.is_dir()]
