"""Pictures that are decoded as they are needed: the same bits as from the file, and workers that outlive a stop."""

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
from commands import TINY, launch, mode_flags, run_here
from data_files import draw_pictures
from test_exact_resume import EVERY_STEP, assert_same_end, stop_after

from lit_cifar import CIFAR10DataModule, ConfigError, DataError
from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.data import Pictures
from lit_cifar.data.images import Batch

NEEDED = ["--data.pictures.decode=as_needed", "--data.pictures.num_workers=2"]
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


def opened(root: Path, **options: Any) -> CIFAR10DataModule:
    """Set up to train, with `options` of `Pictures`."""
    data = CIFAR10DataModule(root, 40, dataset="folder", image_size=24, val_size=9, pictures=Pictures(**options))
    data.setup("fit")
    return data


def batches(data: CIFAR10DataModule, epoch: int) -> list[Batch]:
    """Those of an epoch behind `epoch` steps, and of the validation."""
    train = data.train_dataloader()
    train.sampler.behind = lambda: epoch
    train.sampler.set_epoch(epoch)
    return [*train, *data.val_dataloader()]


@pytest.mark.parametrize(("workers", "options"), [(0, {"decoded_size": 28}), (2, {})])
def test_batches_are_those_of_the_file(pictures: Path, workers: int, options: dict[str, Any]) -> None:
    """Those of 40 are more than a worker decodes at a time. Strides count too: convolutions round by them."""
    file, needed = opened(pictures, **options), opened(pictures, decode="as_needed", num_workers=workers, **options)
    generator = torch.get_rng_state()
    for epoch in range(2):
        expected, found = batches(file, epoch), batches(needed, epoch)
        assert len(found) == 4 - epoch
        for ours, theirs in zip(found, expected, strict=True):
            assert all(torch.equal(*pair) for pair in zip(ours[:3], theirs[:3], strict=True))
            assert (ours.images.stride(), ours.weight) == (theirs.images.stride(), theirs.weight)
    assert torch.equal(torch.get_rng_state(), generator)
    for ids in (torch.tensor([5, 2]), torch.tensor([], dtype=torch.int64)):  # a rank may have none of a batch
        expected_images = file.sets["val"].gather(ids)
        assert torch.equal(needed.sets["val"].gather(ids), expected_images)
        assert torch.equal(*needed.sets["val"].gather_each([ids]), expected_images)


GROWTH = """
import sys, psutil, torch
from lit_cifar.data import CIFAR10DataModule, Pictures
if __name__ == "__main__":
    pictures = Pictures(decode="as_needed", num_workers=1)
    data = CIFAR10DataModule(sys.argv[1], 90, dataset="folder", image_size=224, pictures=pictures)
    data.setup("fit")
    own = []
    for number, _ in enumerate(data.sets["train"].gather_each([torch.arange(32)] * 60)):
        if number % 40 == 10:
            (worker,) = [its for its in psutil.Process().children(recursive=True) if not its.children()][-1:]
            memory = worker.memory_full_info()
            own.append(memory.rss - memory.shared)
    print(own[1] - own[0])
"""


@pytest.mark.slow
def test_a_worker_keeps_no_memory_of_what_it_has_decoded(pictures: Path, tmp_path: Path) -> None:
    """Of forty parts, 5 MB each. The server of the tests has other imports, with which memory is used otherwise."""
    program = tmp_path / "growth.py"
    program.write_text(GROWTH)
    grown = subprocess.run([sys.executable, program, pictures], capture_output=True, text=True, check=True)
    assert int(grown.stdout.splitlines()[-1]) < 60_000_000


def test_a_picture_that_cannot_be_read_is_named_when_it_is(pictures: Path, tmp_path: Path) -> None:
    root = shutil.copytree(pictures, tmp_path / "pictures")
    torn = root / "dog" / "7.jpg"
    torn.write_bytes(torn.read_bytes()[:500])
    data = opened(root, decode="as_needed", num_workers=1)
    with pytest.raises(DataError, match=r"a picture cannot be read: .*/dog/7\.jpg: OSError: Truncated") as error:
        batches(data, 0)
    assert "--resume=auto" in error.value.remedy
    shutil.copy(pictures / "dog" / "7.jpg", torn)
    assert len(batches(data, 0)) == 4


@pytest.mark.parametrize(
    ("options", "problem", "remedy"),
    [
        ({"num_workers": 2}, "num_workers=2 is not for --data.pictures.decode=once", "pictures.decode=as_needed"),
        ({"skip_unreadable": True, "decode": "as_needed"}, "skip_unreadable=True is not", "pictures.decode=once"),
    ],
)
def test_options_without_effect_are_refused(pictures: Path, options: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=problem) as error:
        CIFAR10DataModule(pictures, dataset="folder", pictures=Pictures(**options))
    assert f"--data.{remedy}" in error.value.remedy


def fitting(root: Path, run: Path) -> list[str]:
    """79 pictures in batches of 16: four steps and a ragged one an epoch, ten steps in all."""
    of_data = ["--data.dataset=folder", f"--data.root={root}", "--data.num_train=95", "--trainer.max_epochs=2"]
    return ["fit", *TINY, *of_data, "--trainer.num_sanity_val_steps=0", EVERY_STEP, f"--run_dir={run}"]


@pytest.mark.timeout(300)
def test_a_training_ends_as_from_the_file_after_a_stop_too(pictures: Path, tmp_path: Path) -> None:
    one = mode_flags("single")
    run_here(*fitting(pictures, tmp_path / "file"), *one)
    run = fitting(pictures, tmp_path / "needed")
    assert run_here(*run, *one, *NEEDED, *stop_after(3), check=False).status == 143
    run_here(*run, *one, *NEEDED, "--resume=auto")
    assert_same_end(tmp_path / "needed", tmp_path / "file")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_train_as_from_the_file(pictures: Path, tmp_path: Path) -> None:
    """Each has workers of its own. The server of this process forks them, as it has forked these."""
    for name, more in (("file", []), ("needed", NEEDED)):
        launch(*fitting(pictures, tmp_path / name), *mode_flags("ddp"), *more, timeout_s=280)
    for name in (DIGESTS, "sample_audit.csv"):
        assert (tmp_path / "needed" / name).read_bytes() == (tmp_path / "file" / name).read_bytes()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("end", "status"), [("os.kill(os.getpid(), 9)", -signal.SIGKILL), ("sys.exit(143)", 143)])
def test_workers_outlive_a_request_to_stop_but_not_the_process_that_trains(
    pictures: Path, end: str, status: int
) -> None:
    """A scheduler's SIGTERM and Ctrl-C reach all of a job. That nothing is left is what every test looks at."""
    code = f"""if True:
        import os, signal, subprocess, sys
        import torch
        from pathlib import Path
        from test_encoded_pictures import opened
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: None)
        images = opened(Path({str(pictures)!r}), decode="as_needed", num_workers=2).sets["train"]
        parts = torch.split(torch.arange(90), 5)  # many more than are decoded ahead
        decoded = images.gather_each(parts)
        next(decoded), next(decoded)  # now both workers have begun
        for name in ("TERM", "INT"):
            subprocess.run(["kill", "-" + name, "--", str(-os.getpgid(0))], start_new_session=True, check=True)
        assert len(list(decoded)) == 16
        held = images.gather_each(parts)
        next(held)
        {end}
    """
    environment = os.environ | {"PYTHONPATH": f"{TESTS}:{Path(TESTS).parent}"}
    command = [sys.executable, "-c", code]
    # Workers that are left would keep stderr open.
    done = subprocess.run(command, env=environment, start_new_session=True, stderr=subprocess.PIPE, timeout=300)
    assert done.returncode == status, done.stderr.decode()
    assert b"Traceback" not in done.stderr
