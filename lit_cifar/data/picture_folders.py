"""Folders of the user's own pictures: their splits, classes and files."""

import shlex
from collections.abc import Iterable
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple
from unicodedata import normalize

from lightning.pytorch.utilities import rank_zero_warn

from lit_cifar.data.dataset import Split
from lit_cifar.data.picture_files import is_hidden, list_files
from lit_cifar.errors import DataError, nearest, printable

# The usual names of folders to train, validate and test on, in any case.
SPLITS: dict[Split, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation"),
    "test": ("test", "testing"),
}
_IMAGES = {"image", "img", "jpegimage", "picture", "photo"}
_TARGETS = {"mask", "label", "annotation", "segmentation", "groundtruth", "ground_truth", "gt", "json", "xml"}
_TARGETS |= {"preview", "thumbnail", "overlay", "depth", "bbox"}
_PAGE = "docs/data-and-networks.md has lines of Python that make folders of tables, names, folders and archives"
_CLASS_WANTED = "put pictures of the class into it, or remove it if there is no such class"


class File(NamedTuple):
    path: str  # relative to the folder of the split
    label: int


class PictureFolders:
    """`root/train/CLASS/*` or `root/CLASS/*`, with `root/val/CLASS/*` and `root/test/CLASS/*` if there are such.

    Or other usual names of these. In the name of a class control characters and bytes that are not UTF-8 are escaped,
    and letters with accents are composed (NFC). A folder that looks like a split and is not used is a `DataError`.

    Attributes:
        splits: Folders in `root` that hold a split.
        classes: Folders of pictures to train on, by the printable names of their classes, sorted by name.
        unused: Files and folders beside these, relative to `root`.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.splits = root, _splits(root)
        folder = self.folder("train")
        self.classes = {name: path for name, path in _by_class(folder).items() if path not in self.splits.values()}
        if not self.classes:
            problem = f"{folder} holds no folders of pictures"
            raise DataError(problem, remedy=f"put pictures into {folder}/CLASS/; {_PAGE}")
        used = {folder, *self.splits.values(), *self.classes.values()}
        loose = {path for own in self.splits.values() for path in own.iterdir() if not path.is_dir()}
        entries = {*root.iterdir(), *folder.iterdir(), *loose} - used
        beside = [path for path in sorted(entries) if not is_hidden(path.name)]
        _check_beside(root, beside, self.classes)
        _check_classes(folder, self.classes)
        self.unused = [printable(str(path.relative_to(root))) for path in beside]
        self._places: dict[Split, set[int]] = {}  # places of the files of a split that was listed

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
            remedy = f"move it away, or put pictures of it beside those to train on; {_PAGE}"
            raise DataError(problem, remedy=f"rename it to {meant}, {remedy}" if meant else remedy)
        turns: list[tuple[int, File]] = []
        places: list[int] = []
        labels = {name: label for label, name in enumerate(self.classes)}
        for name, own in of_split.items():
            files = list_files(own, remedy=_CLASS_WANTED)
            if inner := sorted({path.split("/")[0] for path in files if "/" in path}):
                names = ", ".join(map(printable, inner[:3]))
                problem = f"{printable(str(own))} would be a class, and holds folders, perhaps the classes: {names}"
                remedy = f"make folders ROOT/{split}/CLASS without inner folders, and pass --data.root=ROOT; {_PAGE}"
                raise DataError(problem, remedy=remedy)
            places += filter(None, files.values())
            turns += enumerate(File(f"{own.name}/{path}", labels[name]) for path in files)
        if not turns:
            predict = f"; without labels {shlex.quote(f'--data.predict_dir={folder}')} of predict classifies them"
            remedy = f"put pictures into {folder}/CLASS/{predict if split == 'test' else ''}; {_PAGE}"
            raise DataError(f"{folder} holds no folders of classes", remedy=remedy)
        self._tell_again(split, places)
        return [file for _, file in sorted(turns, key=itemgetter(0))]

    def _tell_again(self, split: Split, places: list[int]) -> None:
        """Warn of files of `split`, in these `places`, that are there twice or in another split that was listed."""
        self._places[split] = own = set(places)
        again = {other: len(own & theirs) for other, theirs in self._places.items()}
        again[split] = len(places) - len(own)
        for other, number in again.items():
            if number:
                here, there = (printable(str(self.folder(each))) for each in (split, other))
                links = f"{number:,} of {len(places):,} files in {here} are in {there} too, by links"
                rank_zero_warn(f"{links}: they count twice, or what is measured on them is of pictures that are known")


def _splits(root: Path) -> dict[Split, Path]:
    found: dict[Split, Path] = {}
    for folder in sorted(_folders(root)):
        split = next((split for split, names in SPLITS.items() if folder.name.lower() in names), None)
        if split in found:
            problem = f"{found[split]} and {folder} are for the same pictures by their names"
            raise DataError(problem, remedy="move the pictures of one of them into the other, or move it away")
        if split is not None:
            found[split] = folder
            if len({each.resolve() for each in found.values()}) < len(found):
                raise DataError(f"{folder} is a link to pictures of another split", remedy="remove it")
    flat = next((folder for folder in found.values() if not _folders(folder)), None)
    if flat is not None and found.get("train") in (None, flat):
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


def _check_beside(root: Path, beside: Iterable[Path], classes: dict[str, Path]) -> None:
    """Refuse pictures of the classes that would not be used. What else is in unused folders may be broken."""
    known = {name.lower() for name in classes}
    for path in filter(Path.is_dir, beside):
        inner: list[Path] = []
        with suppress(OSError):
            inner = [each for each in path.iterdir() if not each.is_file()]
        if any(_name(each).lower() in known for each in (path, *inner)):
            problem = f"{printable(str(path))} looks like pictures to train, validate or test on, and would not be used"
            raise DataError(problem, remedy=f"move it away, or into {root}/train, {root}/val or {root}/test")


def _check_classes(folder: Path, classes: dict[str, Path]) -> None:
    """Refuse a single class, and images beside their targets."""
    words = {name.lower().removesuffix("s") for name in classes}
    if words & _IMAGES and words & _TARGETS and words <= _IMAGES | _TARGETS:
        problem = f"{printable(str(folder))} holds {' and '.join(classes)}, which are no classes"
        raise DataError(problem, remedy=f"make a folder of each class with its pictures, {folder}/CLASS/; {_PAGE}")
    if len(classes) == 1:
        (only,) = classes.values()
        problem = f"{printable(str(folder))} holds one class, {printable(only.name)}: there is nothing to tell apart"
        root = shlex.quote(f"--data.root={only}")
        remedy = f"add a folder of another class; if this one holds the classes, pass {root}, or name it train; {_PAGE}"
        raise DataError(problem, remedy=remedy)


def _folders(folder: Path) -> list[Path]:
    """The folders in `folder` that are not hidden."""
    try:
        if not folder.is_dir():
            if folder.exists():
                remedy = f"unpack it into folders of pictures, ROOT/CLASS/; {_PAGE}"
                raise DataError(f"{folder} is a file", remedy=remedy)
            raise DataError(f"there is no folder {folder}", remedy=f"put pictures into {folder}/CLASS/")
        entries = [path for path in folder.iterdir() if not is_hidden(path.name)]
        broken = next((path for path in entries if path.is_symlink() and not path.exists()), None)
        if broken is not None:  # it may be a class, or pictures to validate on
            problem = f"{printable(str(broken))} is a link to {printable(str(broken.readlink()))}, which is not there"
            remedy = f"put it back, as by mounting its disk, or remove the link: rm {shlex.quote(str(broken))}"
            raise DataError(problem, remedy=remedy)
        return [path for path in entries if path.is_dir()]
    except OSError as error:
        raise DataError(f"{folder} cannot be listed: {error}", remedy="make it readable, or copy it") from error
