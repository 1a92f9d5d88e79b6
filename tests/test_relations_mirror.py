"""The user's files as a run sees them."""

import os
from pathlib import Path

import pytest

from lit_cifar.checks.relations import mirror as mirrors
from lit_cifar.checks.relations.mirror import mirror, mirrored, root_of


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A git tree with data and a folder of runs."""
    tree = tmp_path / "tree"
    for folder in (tree / ".git", tree / "data", tree / "own" / "work", tree / "own" / "runs"):
        folder.mkdir(parents=True)
    for name in ("own/work/a.py", "own/work/out.txt", *(f"data/{number}.png" for number in range(9))):
        (tree / name).touch()
    return tree


def test_a_mirror_has_what_is_near_and_links_what_is_large(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, place = tree / "own" / "work", tree.parent / "mirror"
    monkeypatch.setattr(mirrors, "_MOST", 12)
    mirror(place, [own])
    there = mirrored(place, own)
    assert {path.name: path.is_symlink() for path in there.iterdir()} == {"a.py": False, "out.txt": True}
    assert [(there.parents[depth] / name).is_symlink() for depth, name in ((1, "data"), (0, "runs"))] == [True, False]
    assert (there.parents[1] / "data" / "8.png").exists()
    assert mirrored(place, Path(os.__file__)) == Path(os.__file__)


def test_the_root_is_that_of_a_git_tree_or_package_but_no_home(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tree / "own" / "work"
    assert root_of(own) == tree
    monkeypatch.setenv("HOME", str(tree))
    assert root_of(own) == own
    (own / "__init__.py").touch()
    assert root_of(own) == own.parent
