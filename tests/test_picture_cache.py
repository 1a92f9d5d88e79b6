"""Pictures that are decoded once: the same batches as from memory, whatever interrupts, changes or damages the file."""

import errno
import fcntl
import multiprocessing
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from data_files import draw_pictures

from lit_cifar import CIFAR10DataModule, ConfigError, DataError
from lit_cifar.data import Augment, Pictures, picture_cache, pictures
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.pictures import read_image

SIZE = 24


@dataclass
class Folder:
    """19 pictures of two classes, a cache, and a list of the pictures that were decoded."""

    root: Path
    cache: Path
    log: Path

    def data(self, **options: Any) -> CIFAR10DataModule:
        """Set up to train; `options` are those of `Pictures` too."""
        settings: dict[str, Any] = {"batch_size": 4, "image_size": SIZE, "val_size": 3}
        of_pictures = {name: options.pop(name) for name in [*options] if name in Pictures.__dataclass_fields__}
        pictures = Pictures(**{"cache_dir": self.cache} | of_pictures)
        data = CIFAR10DataModule(self.root, dataset="folder", pictures=pictures, **settings | options)
        data.setup("fit")
        return data

    def decoded(self) -> list[str]:
        """Since the last call."""
        names = self.log.read_text().split() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return names

    def files(self) -> list[Path]:
        return [path for path in self.cache.rglob("*") if path.is_file() and path.name != ".lock"]

    def in_memory(self) -> ImageSet:
        """As they were kept before there was a cache."""
        cats, dogs = ([self.root / name / f"{i}.png" for i in range(num)] for name, num in (("cat", 10), ("dog", 9)))
        files = [*(path for pair in zip(cats, dogs, strict=False) for path in pair), cats[-1]]
        images = [image for path in files if isinstance(image := read_image(path, size=SIZE), torch.Tensor)]
        return ImageSet(torch.stack(images), torch.tensor([0, 1] * 9 + [0]), ("cat", "dog"))


def log_decoding(log: Path, replace: Callable[[Any, str, Any], None], *, die_at: int | None = None) -> None:
    """Note each picture that is decoded from now on; SIGKILL this process in place of the one at `die_at`."""

    def read(path: Path | str, *, size: int) -> Any:
        if die_at is not None and log.exists() and len(log.read_text().split()) == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        with log.open("a") as file:
            file.write(f"{Path(path).parent.name}/{Path(path).name}\n")
        return read_image(path, size=size)

    replace(pictures, "read_image", read)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    made = Folder(tmp_path / "pictures", tmp_path / "cache", tmp_path / "decoded")
    draw_pictures(made.root / "cat", 10)
    draw_pictures(made.root / "dog", 9, seed=1)
    log_decoding(made.log, monkeypatch.setattr)
    return made


@pytest.mark.parametrize("chunk", [3, 64], ids=["in workers", "in this process"])
def test_batches_are_those_of_pictures_in_memory(folder: Folder, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_cache, "_CHUNK", chunk)
    generator = torch.get_rng_state()
    data = folder.data()
    assert torch.equal(torch.get_rng_state(), generator)
    assert len(folder.decoded()) == 19
    images = folder.in_memory()
    held_out = torch.isin(torch.arange(19), data.source.hold_out(images.labels, 3))
    expected = {"train": images.subset((~held_out).nonzero()[:, 0]), "val": images.subset(held_out.nonzero()[:, 0])}
    for epoch in range(2):
        sampler = data.train_sampler()
        sampler.set_epoch(epoch)
        of_memory = BatchLoader(expected["train"], sampler, augmentation=data.augmentation)
        for ours, theirs in zip(
            BatchLoader(data.sets["train"], sampler, augmentation=data.augmentation), of_memory, strict=True
        ):
            assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs[:3], strict=True))
    val = list(data.val_dataloader())
    assert torch.equal(torch.cat([batch.images for batch in val]), expected["val"].images)
    assert torch.equal(torch.cat([batch.labels for batch in val]), expected["val"].labels)


def test_windows_and_centres_of_pictures_that_are_decoded_larger(folder: Folder) -> None:
    """What is evaluated and classified is the centre; so is what is trained on without augmentation."""
    data, plain = folder.data(decoded_size=32), folder.data(decoded_size=32, augment=False)
    assert len(folder.decoded()) == 19
    files = sorted((folder.root / "cat").iterdir())
    data.predict_dir = folder.root / "cat"
    data.setup("predict")
    (predicted,) = data.predict_dataloader()
    decoded = torch.stack([read_image(path, size=32) for path in files])
    assert torch.equal(predicted.images, decoded)
    mean, std = (255 * torch.tensor(values)[:, None, None] for values in (data.source.mean, data.source.std))
    centre = (decoded[:, :, 4:28, 4:28] - mean) / std
    torch.testing.assert_close(data.on_after_batch_transfer(predicted, 0).images, centre)
    of_plain, of_windows = (torch.cat([batch.images for batch in each.train_dataloader()]) for each in (plain, data))
    ids = torch.cat([batch.ids for batch in data.train_dataloader()])
    assert torch.equal(of_plain, data.sets["train"].gather(ids))
    assert data.augmentation == Augmentation(seed=0, resized_to=SIZE)
    assert torch.equal(of_windows, data.augmentation(of_plain, data.augmentation.draw(ids, (32, 32), epoch=0)))
    for size in (SIZE - 1, 2 * SIZE + 1):
        with pytest.raises(
            ConfigError, match=rf"--data.pictures.decoded_size={size} is not between --data.image_size=24"
        ) as error:
            folder.data(decoded_size=size)
        assert "--data.pictures.decoded_size=27" in error.value.remedy
    with pytest.raises(ConfigError, match=r"--data.pictures.decoded_size crops images that are not padded"):
        folder.data(decoded_size=32, augment=Augment(reflect=True))


def test_nothing_is_decoded_or_copied_when_it_is_there(folder: Folder) -> None:
    folder.data()
    folder.decoded()
    data = folder.data(val_size=5)
    assert folder.decoded() == []
    train, val = (data.sets[name].images for name in ("train", "val"))
    assert train.data_ptr() == val.data_ptr()
    mapped = [line for line in Path("/proc/self/maps").read_text().splitlines() if str(folder.files()[0]) in line]
    assert {line.split()[1] for line in mapped} == {"r--s"}  # shared with all processes, and nobody can write to it


def _set_up_and_die(folder: Folder) -> None:
    log_decoding(folder.log, setattr, die_at=11)
    folder.data()


def test_after_a_kill_it_goes_on(folder: Folder) -> None:
    process = multiprocessing.get_context("forkserver").Process(target=_set_up_and_die, args=(folder,))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert [path.suffix for path in folder.files()] == [".part"]
    assert len(folder.decoded()) == 11
    # One that was being written when the machine lost power.
    with folder.files()[0].open("r+b") as file:
        file.seek(2 * 3 * SIZE * SIZE)
        file.write(bytes(100))
    data = folder.data()
    assert sorted(folder.decoded()) == sorted(
        ["cat/1.png", *(f"dog/{i}.png" for i in range(5, 9)), *(f"cat/{i}.png" for i in range(6, 10))]
    )
    assert torch.equal(data.source.load("train").gather(torch.arange(19)), folder.in_memory().images)
    assert [path.suffix for path in folder.files()] == [".pixels"]


def test_a_changed_folder_or_format_is_decoded_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    def changed(num_pictures: int) -> bool:
        folder.data()
        assert len(folder.files()) == 1  # the old one is gone
        return len(folder.decoded()) == num_pictures

    assert changed(19)
    picture = folder.root / "cat" / "3.png"
    os.utime(picture, ns=(0, 12345))
    assert changed(19)
    picture.rename(picture.with_name("33.png"))
    assert changed(19)
    picture.with_name("33.png").unlink()
    assert changed(18)
    monkeypatch.setattr(pictures, "FORMAT", picture_cache.FORMAT + 1)
    assert changed(18)
    assert not changed(18)


def test_pictures_that_cannot_be_read_are_counted_and_may_be_left_out(folder: Folder) -> None:
    torn = [folder.root / "cat" / f"{i}.png" for i in (2, 4, 5, 6)]
    whole = torn[0].read_bytes()
    for path in torn:
        path.write_bytes(whole[:500])
    with pytest.raises(
        DataError, match=r"4 of 19 files cannot be read as pictures: .*2.png: .*4.png: .*5.png: .*; \.\.\."
    ) as error:
        folder.data()
    assert "--data.pictures.skip_unreadable=true" in error.value.remedy
    assert set(folder.decoded()) >= {"cat/9.png"}  # all are found at once
    with pytest.warns(
        UserWarning, match=r"4 of 19 files cannot be read as pictures and are left out; the first is .*2.png"
    ):
        data = folder.data(skip_unreadable=True)
    assert sorted(folder.decoded()) == [f"cat/{i}.png" for i in (2, 4, 5, 6)]  # once more, and these alone
    assert (len(data.sets["train"]), len(data.sets["val"])) == (12, 3)
    with pytest.warns(UserWarning, match="are left out"):
        left = folder.data(skip_unreadable=True).source.load("train")
    kept = torch.tensor([i for i in range(19) if i not in (4, 8, 10, 12)])
    for path in torn:
        path.write_bytes(whole)
    expected = folder.in_memory().subset(kept)
    assert torch.equal(left.gather(torch.arange(15)), expected.images)
    assert torch.equal(left.labels, expected.labels)


def test_a_picture_that_could_not_be_read_once_is_tried_at_each_start(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its size and time are the same when the disk is well again; those that were read are not read again."""
    readable, images = pictures.read_image, folder.in_memory().images

    def fail(path: Path | str, *, size: int) -> Any:
        found = readable(path, size=size)
        return "Stale file handle" if str(path).endswith(("cat/3.png", "dog/5.png")) else found

    monkeypatch.setattr(pictures, "read_image", fail)
    with pytest.raises(DataError, match=r"2 of 19 .*3.png: Stale file handle; .*5.png: Stale file handle"):
        folder.data()
    with pytest.warns(UserWarning, match="2 of 19 files cannot be read as pictures and are left out"):
        assert len(folder.data(skip_unreadable=True).source.load("train")) == 17
    monkeypatch.setattr(pictures, "read_image", readable)
    folder.decoded()
    whole = folder.data(skip_unreadable=True).source.load("train")
    assert folder.decoded() == ["cat/3.png", "dog/5.png"]
    assert torch.equal(whole.gather(torch.arange(19)), images)
    assert len(folder.data().source.load("train")) == 19
    assert folder.decoded() == []


def test_a_damaged_picture_is_found_before_it_is_used(folder: Folder) -> None:
    folder.data()
    folder.decoded()
    (file,) = folder.files()
    content = bytearray(file.read_bytes())
    content[7 * 3 * SIZE * SIZE + 100] ^= 1
    file.write_bytes(content)
    with pytest.raises(DataError, match=rf"picture 7 in {file} is damaged") as error:
        folder.data().source.load("train").gather(torch.arange(19))
    subprocess.run(shlex.split(error.value.remedy.partition(": ")[2]), check=True)
    again = folder.data().source.load("train")
    assert folder.decoded() == ["dog/3.png"]
    assert torch.equal(again.gather(torch.arange(19)), folder.in_memory().images)
    file.write_bytes(content[:-100])
    folder.data()
    assert len(folder.decoded()) == 19


def test_of_two_processes_one_decodes_and_the_other_waits(folder: Folder) -> None:
    """Both find nothing; the second has the lock when the first is done, and looks again."""
    context = multiprocessing.get_context("forkserver")
    both = [context.Process(target=_set_up_slowly, args=(folder,)) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join()
    assert [process.exitcode for process in both] == [0, 0]
    assert len(folder.decoded()) == 19


def _set_up_slowly(folder: Folder) -> None:
    log_decoding(folder.log, setattr)
    logged = pictures.read_image
    pictures.read_image = lambda path, *, size: (time.sleep(0.05), logged(path, size=size))[1]
    folder.data()


def test_a_cache_stands_beside_dead_links_and_on_file_systems_that_allocate_nothing(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the C library writes zeros, which a file that is opened to append refuses."""
    (folder.cache / "other").mkdir(parents=True)
    (folder.cache / "other" / "lock").symlink_to("nowhere")
    allocate = os.posix_fallocate

    def write(file: int, start: int, size: int) -> None:
        if fcntl.fcntl(file, fcntl.F_GETFL) & (os.O_APPEND | os.O_ACCMODE) != os.O_RDWR:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        allocate(file, start, size)

    monkeypatch.setattr(os, "posix_fallocate", write)
    folder.data()
    assert len(folder.decoded()) == 19


def test_too_much_for_the_cache_or_the_disk(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"hold 3\.3e-05 GB of --data.pictures.cache_limit_gb=1e-05") as error:
        folder.data(cache_limit_gb=1e-5)
    assert "--data.pictures.cache_limit_gb=3.33e-05" in error.value.remedy
    assert "--data.pictures.decode=as_needed" in error.value.remedy

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DataError, match=r"cannot be written to .*: No space left on device"):
        folder.data()
    assert (folder.files(), folder.decoded()) == ([], [])
