"""Which folders of pictures are for what: usual names of splits, and what would silently be a class or be missed."""

import io
import re
import shutil
import tarfile
from collections import Counter
from pathlib import Path
from unicodedata import normalize

import pytest
import torch
from data_files import draw_pictures
from documents import ROOT

from lit_cifar import CIFAR10DataModule, DataError
from lit_cifar.data.dataset import Split
from lit_cifar.data.picture_folders import SPLITS, PictureFolders

COMPOSED, DECOMPOSED = normalize("NFC", "\u00e9t\u00e9"), normalize("NFD", "\u00e9t\u00e9")


def make(root: Path, *folders: str) -> Path:
    """Each with as many empty files as its last word says; with none if that is no number."""
    for folder in folders:
        name, _, number = folder.rpartition(" ")
        (root / name).mkdir(parents=True, exist_ok=True)
        for index in range(int(number)):
            (root / name / f"{index}.png").touch()
    return root


def counts(root: Path) -> dict[Split, dict[str, int]]:
    folders = PictureFolders(root)
    found: dict[Split, dict[str, int]] = {}
    for split in SPLITS:
        if split in ("train", *folders.splits):
            labels = Counter(file.label for file in folders.files(split))
            found[split] = {name: labels[label] for label, name in enumerate(folders.classes)}
    return found


def both(folder: str, number: int = 1) -> list[str]:
    """So many pictures of each of two classes."""
    return [f"{folder}/cat {number}", f"{folder}/dog {number}"]


THREE = {"train": {"cat": 1, "dog": 1}, "val": {"cat": 2, "dog": 2}, "test": {"cat": 3, "dog": 3}}
LAYOUTS = {
    "no splits": (["cat 3", "dog 2"], {"train": {"cat": 3, "dog": 2}}),
    "val beside": (["cat 3", "dog 2", "val/dog 1"], {"train": {"cat": 3, "dog": 2}, "val": {"cat": 0, "dog": 1}}),
    "three": ([*both("train", 1), *both("val", 2), *both("test", 3)], THREE),
    "three long names": ([*both("training", 1), *both("validation", 2), *both("testing", 3)], THREE),
    "three with capitals": ([*both("TRAINING", 1), *both("Valid", 2), *both("tesT", 3)], THREE),
    "accents in one part and in two": (
        [f"train/{COMPOSED} 3", "train/dog 2", f"val/{DECOMPOSED} 1"],
        {"train": {"dog": 2, COMPOSED: 3}, "val": {"dog": 0, COMPOSED: 1}},
    ),
    "classes like splits, without folders": (
        ["train/valid 3", "train/invalid 2", "train/test tube 1", "train/train 1"],
        {"train": {"invalid": 2, "test tube": 1, "train": 1, "valid": 3}},
    ),
    "what is hidden": (["cat 3", "dog 2", ".val/cat 1", ".git 1"], {"train": {"cat": 3, "dog": 2}}),
    "what a system writes": (
        ["cat 3", "dog 2", "cat/@eaDir 1", "__MACOSX/cat 1", "lost+found 0"],
        {"train": {"cat": 3, "dog": 2}},
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_usual_layouts(layout: str, tmp_path: Path) -> None:
    folders, expected = LAYOUTS[layout]
    assert counts(make(tmp_path, *folders)) == expected


SPLIT = "looks like pictures to train, validate or test on"
HOLDS = "would be a class, and holds folders, perhaps the classes:"
REFUSED = {
    "two for the same": (["train/cat 1", "train/dog 1", "val/cat 1", "Valid/dog 1"], "are for the same pictures"),
    "another name": ([*both("train"), *both("dev")], f"dev {SPLIT}, and would not"),
    "another name, in capitals": ([*both("train"), "Dev/CAT 1", "Dev/DOG 1"], f"Dev {SPLIT}, and would not"),
    "a year": ([*both("train2017"), *both("val2017")], f"train2017 {HOLDS} cat, dog"),
    "one of two": ([*both("seg_train"), *both("test")], "holds one class, seg_train: there is nothing to tell"),
    "a class beside those": (["train/cat 1", "train/dog 1", "cat 1"], f"cat {SPLIT}, and would not be used"),
    "classes beside those": (["train/cat 1", "train/dog 1", "more/cat 1"], f"more {SPLIT}, and would not be used"),
    "classes among those": (["cat 1", "dog 1", "more/cat 1", "more/dog 1"], f"more {HOLDS}"),
    "one folder too many": (["all/train/cat 1", "all/test/cat 1"], "holds one class, all: there is nothing to tell"),
    "classes first": (["cat/train 1", "cat/val 1", "dog/train 1"], f"cat {HOLDS} train, val"),
    "classes first to validate on": (
        [*both("train"), "val/cat/deep 1"],
        f"val/cat {HOLDS} deep\nmake folders ROOT/val/",
    ),
    "patients": ([*both("p1"), *both("p2")], f"p1 {HOLDS}"),
    "folds, one without a class": (["train/1/cat 1", *both("train/2"), "train/3/dog 1"], f"train/1 {HOLDS} cat"),
    "images and masks": (["Images 2", "masks 2"], "holds Images and masks, which are no classes"),
    "of each class": (["cat/images 1", "cat/masks 1", "dog/images 1", "dog/masks 1"], f"cat {HOLDS} images, masks"),
    "and annotations": (["train/images 2", "train/annotations 2", "train/previews 2", "val/images 1"], "no classes"),
    "Pascal VOC": (["JPEGImages 2", "Annotations 2", "ImageSets/Main 1"], f"ImageSets {HOLDS} Main"),
    "a table of a split": (
        [*both("train"), "val/images 1", "val/labels.csv 0"],
        "make folders of tables, names, folders",
    ),
    "a test without labels": ([*both("train"), "test 2"], "predict_dir="),
    "nothing but what is hidden": ([".git 1"], "holds no folders of pictures"),
    "a split without classes": (["cat 1", "dog 1", "test 3"], "test has no folders of classes: it may be a class"),
    "a class like a split": (["valid 3", "invalid 3"], "valid has no folders of classes: it may be a class"),
    "accents twice": ([f"{COMPOSED} 1", f"{DECOMPOSED} 1"], "have the same name when printed"),
    "a class without pictures": (["train/cat 1", "train/dog 0"], "dog holds no files\nput pictures of the class into"),
    "a class that is new": (["train/cat 1", "train/dog 1", "val/Cat 1"], "pictures to train on\nrename it to cat,"),
}


@pytest.mark.parametrize("layout", REFUSED)
def test_what_would_silently_be_a_class_or_be_missed_is_refused(layout: str, tmp_path: Path) -> None:
    folders, problem = REFUSED[layout]
    with pytest.raises(DataError) as error:
        counts(make(tmp_path, *folders))
    assert problem in str(error.value)
    assert len(str(error.value).splitlines()) == 2


@pytest.mark.parametrize(
    ("name", "target", "problem"),
    [
        ("val", "train", "val is a link to pictures of another split"),
        ("train/all", ".", "train/all/all is a link to a folder that it lies in"),
        # As of a disk that is not mounted: the run would go on without those pictures.
        ("val", "/gone", "val is a link to /gone, which is not there"),
        ("train/fox", "/gone", "train/fox is a link to /gone, which is not there"),
        ("more/cat", "/gone", f"more {SPLIT}"),
    ],
)
def test_a_link_to_a_whole_split_or_to_nothing_is_refused(name: str, target: str, problem: str, tmp_path: Path) -> None:
    make(tmp_path, "train/cat 1", "train/dog 1", "more 1")
    (tmp_path / name).symlink_to(target)
    with pytest.raises(DataError, match=problem):
        counts(tmp_path)


def test_links_to_pictures_that_are_there_too_are_counted(tmp_path: Path) -> None:
    """By any kind of link, also to a whole class or by another name; links to what is in no split are none."""
    root = make(tmp_path, "train/cat 3", "train/dog 2", "val/cat 1", "test/cat 1", "test/dog 0", "store 2")
    cats = root / "train" / "cat"
    for index in range(2):
        (cats / f"more{index}.png").symlink_to(root / "store" / f"{index}.png")
    (cats / "broken.png").symlink_to("nothing")
    (cats / "also broken.png").symlink_to("nothing")
    assert len(PictureFolders(root).files("train")) == 9
    (cats / "again.png").symlink_to("0.png")
    (cats / "same.png").hardlink_to(cats / "0.png")
    (root / "train" / "dog" / "store.png").symlink_to(root / "store" / "1.png")
    (root / "val" / "cat" / "link.png").symlink_to(cats / "2.png")
    (root / "val" / "cat" / "same.png").hardlink_to(cats / "1.png")
    (root / "val" / "dog").symlink_to("../train/dog")
    (root / "test" / "dog" / "7.png").symlink_to(root / "val" / "cat" / "0.png")
    folders = PictureFolders(root)
    with pytest.warns(UserWarning, match="^3 of 10 files in .*/train are in .*/train too, by links: they count twice"):
        assert len(folders.files("train")) == 12
    with pytest.warns(UserWarning, match="^5 of 6 files in .*/val are in .*/train too, by links"):
        assert len(folders.files("val")) == 6
    with pytest.warns(UserWarning, match="^1 of 2 files in .*/test are in .*/val too, by links"):
        assert len(folders.files("test")) == 2


def test_what_was_found_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what is beside it, which may be broken. A validation decodes no picture to train on."""
    draw_pictures(tmp_path / "train" / "cat", 17)
    draw_pictures(tmp_path / "train" / "dog", 3)
    make(tmp_path, "test 1", "notes 1", "locked 0")
    (tmp_path / "labels.csv").touch()
    (tmp_path / "notes" / "gone").symlink_to("/gone")
    listed = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed(Path("/gone") if path.name == "locked" else path))
    with pytest.raises(DataError, match="locked cannot be listed"):
        PictureFolders(tmp_path / "locked")
    data = CIFAR10DataModule(tmp_path, dataset="folder")
    for stage, are_encoded in ("validate", [True, False]), ("fit", [False, False]):
        data.setup(stage)
        assert [images.are_encoded for images in data.sets.values()] == are_encoded
    told = ["train/: cat 16, dog 2", "held out: cat 1, dog 1", "not used: labels.csv, locked, notes and 1 more"]
    assert data.source.found(data.sets) == told


@pytest.mark.parametrize(
    ("counts", "num_images", "expected"),
    [
        ([97, 3], 10, [9, 1]),
        ([50, 50], 10, [5, 5]),
        ([80, 15, 5], 20, [16, 3, 1]),
        ([1000, 2, 1], 100, [99, 1, 0]),
        ([1, 1], 1, [1, 0]),
        ([30, 0, 30], 7, [4, 0, 3]),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_held_out_classes(counts: list[int], num_images: int, expected: list[int], seed: int, tmp_path: Path) -> None:
    make(tmp_path, "cat 1", "dog 1")
    source = CIFAR10DataModule(tmp_path, dataset="folder", seed=seed).source
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(7))]
    held_out = source.hold_out(labels, num_images)
    found = torch.bincount(labels[held_out], minlength=len(counts)).tolist()
    assert sum(found) == len(set(held_out.tolist())) == num_images
    assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= (1 if 0 in expected else 0)
    assert source.hold_out(labels, num_images - 1).tolist() == held_out[:-1].tolist()  # fewer are a part of more
    if num_images > 1:
        other = CIFAR10DataModule(tmp_path, dataset="folder", seed=seed + 1).source
        assert set(other.hold_out(labels, num_images).tolist()) != set(held_out.tolist())


def test_other_labels_become_folders_by_the_lines_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make(tmp_path, "images 0"))
    names = {"cat_1.jpg": "cat", "cat_2.jpg": "cat", "dog_1.jpg": "dog"}
    for name in names:
        (tmp_path / "images" / name).write_bytes(name.encode())
    Path("labels.csv").write_text("file,label\n" + "".join(f"{name},{label}\n" for name, label in names.items()))
    with pytest.raises(DataError, match=r"docs/data-and-networks.md has lines of Python"):
        PictureFolders(tmp_path)
    with pytest.raises(DataError, match=r"labels.csv is a file\n.*docs/data-and-networks.md has lines"):
        PictureFolders(tmp_path / "labels.csv")
    for name, label in names.items():
        patient = Path("nested", label, name[:-6])
        patient.mkdir(parents=True, exist_ok=True)
        (patient / name[-5:]).write_bytes(name.encode())
    with tarfile.open("part-0.tar", "w") as tar:
        for name, label in names.items():
            for end, content in (("jpg", name), ("cls", f"{label}\n")):
                entry = tarfile.TarInfo(f"{name.removesuffix('.jpg')}.{end}")
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content.encode()))
    section = (ROOT / "docs" / "data-and-networks.md").read_text().split("### Labels that are not folders")[1]
    programs = re.findall(r"```python\n(.*?)```", section.split("\n### ")[0], flags=re.DOTALL)
    assert len(programs) == 4
    for program in programs:
        exec(program, {})
        found = {path.name: path.parent.name for path in Path("my_pictures").glob("*/*")}
        if "nested" in program or "shard" in program:
            found = {name.replace("-", "_").removeprefix("part_0_"): label for name, label in found.items()}
        assert found == names
        assert all(path.read_text() in path.name.replace("-", "_") for path in Path("my_pictures").glob("*/*"))
        shutil.rmtree("my_pictures")
