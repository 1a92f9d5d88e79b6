"""Pictures of one's own, decoded into the memory or by workers: the same bits, and workers that outlive a stop."""

import os
import shutil
import signal
import subprocess
import sys
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, mode_flags, run_here
from data_files import draw_pictures
from documents import ROOT
from test_exact_resume import EVERY_STEP, assert_same_end, stop_after

from lit_cifar import CIFAR10DataModule, DataError
from lit_cifar.data import pictures as module
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.pictures import EncodedImages
from lit_cifar.data.workers import Maker

real_free_memory = module.free_memory
NEEDED = ["--data.memory_gb=0", "--data.num_workers=2"]
TESTS = str(Path(__file__).parent)


@pytest.fixture(scope="module", autouse=True)
def server() -> None:
    """With the imports that `conftest` names, for the tests that follow: it is started once."""
    forkserver.ensure_running()


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """99 JPEG pictures of two classes."""
    root = tmp_path_factory.mktemp("pictures")
    draw_pictures(root / "cat", 50, kind="jpg")
    draw_pictures(root / "dog", 49, seed=1, kind="jpg")
    return root


def opened(root: Path, *, val_size: int = 9, **options: Any) -> CIFAR10DataModule:
    """Set up to train."""
    data = CIFAR10DataModule(root, 40, dataset="folder", image_size=24, val_size=val_size, **options)
    data.setup("fit")
    return data


def batches(data: CIFAR10DataModule, epoch: int) -> list[Batch]:
    """Those of an epoch behind `epoch` steps, and of the validation."""
    train = data.train_dataloader()
    train.sampler.behind = lambda: epoch
    train.sampler.set_epoch(epoch)
    return [*train, *data.val_dataloader()]


def test_what_a_worker_makes_is_shared_before_it_is_sent() -> None:
    """Where the shared memory is full, an error there reaches the training; one in the queue's thread was a hang."""
    assert Maker(torch.zeros_like, None)[torch.ones(2), None].is_shared()


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_those_of_memory(pictures: Path, workers: int) -> None:
    """Those of 40 are more than a worker decodes at a time. Strides count too: convolutions round by them."""
    generator = torch.get_rng_state()
    memory, needed = opened(pictures), opened(pictures, memory_gb=0, num_workers=workers)
    assert (type(memory.sets["train"]), type(needed.sets["train"])) == (ImageSet, EncodedImages)
    for epoch in range(2):
        expected, found = batches(memory, epoch), batches(needed, epoch)
        assert len(found) == 4 - epoch
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs[:3], strict=True))
            assert (ours.images.stride(), ours.weight) == (theirs.images.stride(), theirs.weight)
    assert torch.equal(torch.get_rng_state(), generator)
    for ids in (torch.tensor([5, 2]), torch.tensor([], dtype=torch.int64)):  # a rank may have none of a batch
        assert torch.equal(needed.sets["val"].gather(ids), memory.sets["val"].gather(ids))


def test_what_fits_is_half_of_the_free_memory(pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """90 pictures to train on are 155,520 bytes, 9 to validate with are 15,552."""
    fits = []
    for free in (400_000, 300_000, 20_000):
        monkeypatch.setattr(module, "free_memory", lambda free=free: free)
        images = opened(pictures, memory_gb=0).sets
        fits.append([images[name].in_memory(None, num_processes=1).are_encoded for name in ("train", "val")])
        assert images["val"].in_memory(None, num_processes=100).are_encoded
    assert fits == [[False, False], [True, False], [True, True]]
    assert 0 < real_free_memory() < 1e14
    contents = [("max", "5000"), ("current", "4000"), ("stat", "anon 50\ninactive_file 700\nfile 900"), ("max", "max")]
    for (name, content), free in zip(contents, (1e6, 1000, 1700, 1e6), strict=True):
        (tmp_path / f"memory.{name}").write_text(content)
        assert min(real_free_memory(tmp_path), 1e6) == free


def torn(pictures: Path, folder: Path, *numbers: int) -> Path:
    """A copy of `pictures`, of which some of the dogs are cut off."""
    root = shutil.copytree(pictures, folder)
    for number in numbers:
        path = root / "dog" / f"{number}.jpg"
        path.write_bytes(path.read_bytes()[:500])
    return root


def test_a_picture_that_cannot_be_read_is_named_when_it_is(pictures: Path, tmp_path: Path) -> None:
    root = torn(pictures, tmp_path / "pictures", 7)
    data = opened(root, memory_gb=0, num_workers=1)
    with pytest.raises(DataError, match=r"a picture cannot be read: .*/dog/7\.jpg: OSError: Truncated") as error:
        batches(data, 0)
    assert "--resume=auto" in error.value.remedy
    shutil.copy(pictures / "dog" / "7.jpg", root / "dog" / "7.jpg")
    assert len(batches(data, 0)) == 4


def test_pictures_that_cannot_be_read_are_counted_and_hidden_by_the_lines_of_the_page(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = torn(pictures, tmp_path / "my_pictures", 2, 4, 5, 6)
    wrong = r"4 of 99 files cannot be read as pictures: .*2.jpg: .*4.jpg: .*5.jpg: .*; \.\.\."
    with pytest.raises(DataError, match=rf"{wrong}\n.* by the lines in docs/data-and-networks.md"):
        opened(root, val_size=0)
    page = (ROOT / "docs" / "data-and-networks.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(page.split("hide all that cannot be read, tables and texts too:\n\n```python\n")[1].split("```")[0], {})
    assert len(opened(root, val_size=0).sets["train"]) == 95


def fitting(root: Path, run: Path) -> list[str]:
    """79 pictures in batches of 16: four steps and a ragged one an epoch, ten steps in all."""
    of_data = ["--data.dataset=folder", f"--data.root={root}", "--data.num_train=95", "--trainer.max_epochs=2"]
    return ["fit", *TINY, *of_data, "--trainer.num_sanity_val_steps=0", EVERY_STEP, f"--run_dir={run}"]


@pytest.mark.timeout(300)
def test_a_training_ends_as_from_memory_after_a_stop_too(pictures: Path, tmp_path: Path) -> None:
    one = mode_flags("single")
    run_here(*fitting(pictures, tmp_path / "memory"), *one)
    run = fitting(pictures, tmp_path / "needed")
    assert run_here(*run, *one, *NEEDED, *stop_after(3), check=False).status == 143
    run_here(*run, *one, *NEEDED, "--resume=auto")
    assert_same_end(tmp_path / "needed", tmp_path / "memory")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("end", "status"), [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("sys.exit(143)", 143)])
def test_workers_outlive_a_request_to_stop_but_not_their_process(pictures: Path, end: str, status: int) -> None:
    """A scheduler's SIGTERM and Ctrl-C reach all of a job. That nothing is left is what every test looks at."""
    code = f"""if True:
        import os, signal, subprocess, sys
        import torch
        from functools import partial
        from pathlib import Path
        from lit_cifar.data.workers import made_by_workers
        from test_workers import opened
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        images = opened(Path({str(pictures)!r}), memory_gb=0).sets["train"]
        parts = torch.split(torch.arange(90), 5)  # many more than are decoded ahead
        made = partial(made_by_workers, images, parts, None, augment=None, num_workers=2)
        decoded = made()
        next(decoded), next(decoded)  # now both workers have begun
        for name in ("TERM", "INT"):
            subprocess.run(["kill", "-" + name, "--", str(-os.getpgid(0))], start_new_session=True, check=True)
        assert len(list(decoded)) == 16
        held = made()
        next(held)
        {end}
    """
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{Path(TESTS).parent}"}
    command = [sys.executable, "-c", code]
    # Workers that are left would keep stderr open.
    done = subprocess.run(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    assert b"Traceback" not in done.stderr
