"""Checkpoints in parts: whole or absent after a kill; any number of processes read the bits that were written."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoints import assert_same_checkpoint, before_each_line
from commands import TINY, callback, last_checkpoint, launch, run_here
from threads import on_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lit_cifar.checkpoint import atomic, sharded
from lit_cifar.checkpoint.atomic import LAST, PREVIOUS, index_of, newest_valid, write_checkpoint
from lit_cifar.checkpoint.files import read_by_first, read_checkpoint, read_whole
from lit_cifar.checkpoint.pretrained import start_from_file
from lit_cifar.checkpoint.sharded import read_parts, save_parts
from lit_cifar.errors import CheckpointError, SaveError
from lit_cifar.strategies.state_dicts import full


class Training:
    """A layer that is shared out over all processes, and its optimizer; both hold their step in every number."""

    def __init__(self, step: int) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.layer = nn.Linear(3, 5)
        for name, whole in [*self.layer.named_parameters()]:
            values = torch.arange(whole.numel()).view(whole.shape) + 100.0 * step
            setattr(self.layer, name, nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])))
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0, momentum=0.5)
        for parameter in self.layer.parameters():
            parameter.grad = parameter.detach().clone()
        self.optimizer.step()
        self.step = step

    def checkpoint(self) -> dict[str, Any]:
        states = [self.optimizer.state_dict()]
        return {"global_step": self.step, "state_dict": self.layer.state_dict(), "optimizer_states": states}

    def save(self, path: Path) -> None:
        save_parts(self.checkpoint(), path)

    def read(self, path: Path) -> dict[str, Any]:
        return self.part_of(path, [self.optimizer])

    def part_of(self, path: Path, optimizers: list[Any]) -> dict[str, Any]:
        return read_parts(lambda: read_checkpoint(index_of(path)), path, network=self.layer, optimizers=optimizers)


def save(folder: Path, step: int, *, ranks: int = 1) -> list[Any]:
    """What went wrong on each."""

    def run(rank: int) -> Any:
        try:
            Training(step).save(folder / LAST)
        except SaveError as error:
            return error.problem

    return on_ranks(ranks, run)


def step_of(path: Path) -> int:
    """As one process reads it that trains nothing, if all of it is of one step."""
    found = read_checkpoint(path)
    entries = [entry["momentum_buffer"] for entry in found["optimizer_states"][0]["state"].values()]
    step, tensors = found["global_step"], [*found["state_dict"].values(), *entries]
    assert len(tensors) == 4
    assert all(tensor.flatten().equal(torch.arange(tensor.numel()) + 100.0 * step) for tensor in tensors)
    return int(step)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_other_processes_read_what_some_have_written(tmp_path: Path, readers: int) -> None:
    assert save(tmp_path, 7, ranks=2) == [None, None]
    assert step_of(tmp_path / LAST) == 7

    def run(rank: int) -> dict[str, Any]:
        found = Training(0).read(tmp_path / LAST)
        assert {type(tensor) for tensor in found["state_dict"].values()} == {DTensor}
        evaluated = Training(0).part_of(tmp_path / LAST, [])
        assert evaluated["state_dict"]["weight"].full_tensor().equal(found["state_dict"]["weight"].full_tensor())
        return full(found)

    (expected,) = on_ranks(1, lambda rank: full(Training(7).checkpoint()))
    for found in on_ranks(readers, run):
        assert torch.equal(found["state_dict"]["weight"], expected["state_dict"]["weight"])
        momentum = expected["optimizer_states"][0]["state"][1]["momentum_buffer"]
        assert torch.equal(found["optimizer_states"][0]["state"][1]["momentum_buffer"], momentum)


def test_a_new_training_starts_from_the_weights_in_all_parts(tmp_path: Path) -> None:
    save(tmp_path, 7, ranks=2)
    layer = nn.Linear(3, 5)
    start_from_file(layer, tmp_path / LAST, num_classes=5)
    assert layer.weight.flatten().equal(torch.arange(15) + 700.0)


def test_a_process_killed_at_any_line_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """What is in the folder before each line of the code that saves step 3 where steps 1 and 2 are."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    found: set[Any] = set()

    def look() -> None:
        path, refused = newest_valid(tmp_path)
        found.add((path and path.name, path and step_of(path), *refused))

    def run(rank: int) -> None:
        training = Training(3)
        with before_each_line(atomic, sharded, look=look):
            training.save(tmp_path / LAST)

    on_ranks(1, run)
    assert found == {(LAST, 2), (PREVIOUS, 2), (LAST, 3)}
    assert (step_of(tmp_path / LAST), step_of(tmp_path / PREVIOUS)) == (3, 2)
    (tmp_path / f"{LAST}.part").mkdir()
    (tmp_path / f"{LAST}.part" / "rank0.ckpt").write_bytes(b"of a process that was killed")
    save(tmp_path, 4)
    write_checkpoint({"global_step": 5, "optimizer_states": []}, tmp_path / LAST)  # a file in place of a folder
    assert (read_checkpoint(tmp_path / LAST)["global_step"], step_of(tmp_path / PREVIOUS)) == (5, 4)
    save(tmp_path, 6)
    assert (step_of(tmp_path / LAST), read_checkpoint(tmp_path / PREVIOUS)["global_step"]) == (6, 5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LAST, PREVIOUS]


FAULTS = {
    "missing": "cannot be read: No such file",
    "damaged": "is damaged",
    "of another save": "rank1.ckpt is not of the same save as index.ckpt",
    "of another rank": "rank1.ckpt is not of the same save as index.ckpt",
    "of another number of processes": "rank1.ckpt is not of the same save as index.ckpt",
    "all of another number of processes": "rank0.ckpt is not of the same save as index.ckpt",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_is_damaged_or_of_another_save_is_told_on_every_process(tmp_path: Path, fault: str) -> None:
    """Before it is read, in place of the checkpoint before it, unless only its content shows that."""
    save(tmp_path / "3", 2, ranks=3)
    save(tmp_path, 1, ranks=2)
    save(tmp_path, 2, ranks=2)
    path = tmp_path / LAST / "rank1.ckpt"
    if fault == "missing":
        path.unlink()
    elif fault == "damaged":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif fault == "of another rank":
        shutil.copy(path.with_name("rank0.ckpt"), path)
    else:
        source = tmp_path / (PREVIOUS if fault == "of another save" else f"3/{LAST}")
        for name in ("rank0.ckpt", "rank1.ckpt") if fault.startswith("all") else ("rank1.ckpt",):
            shutil.copy(source / name, path.with_name(name))
    newest, refused = newest_valid(tmp_path)
    assert newest == tmp_path / (LAST if fault == "damaged" else PREVIOUS)
    assert fault == "damaged" or FAULTS[fault] in refused[0]

    def run(rank: int) -> str:
        with pytest.raises(CheckpointError) as caught:
            Training(0).read(tmp_path / LAST)
        return caught.value.problem

    first, second = on_ranks(2, run)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / LAST)
    assert first == second == caught.value.problem
    assert FAULTS[fault] in first


@pytest.mark.parametrize("ranks", [1, 2])
def test_who_reads_while_another_saves_sees_one_save(
    ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever has been read of the one before: its index alone, or parts of it too."""
    reads = {"index.ckpt": 0, "rank0.ckpt": 0, "rank1.ckpt": 0}
    for name in reads:
        for step in (1, 2, 3):
            save(tmp_path / name / str(step), step, ranks=2)
    verify = atomic.verify_checkpoint

    def replace_meanwhile(path: Path) -> None:
        verify(path)
        if reads.pop(path.name, None) is not None and path.parts[-3] == path.name:  # the first time
            folder = path.parents[1]
            shutil.rmtree(path.parent)
            shutil.copytree(folder / "3" / LAST, path.parent)

    monkeypatch.setattr(atomic, "verify_checkpoint", replace_meanwhile)
    for name in [*reads]:
        reads = {name: 0}
        shutil.copytree(tmp_path / name / "2" / LAST, tmp_path / name / LAST)
        if ranks == 1:
            assert step_of(tmp_path / name / LAST) == 3
            continue

        def run(rank: int, path: Path = tmp_path / name / LAST) -> float:
            training = Training(0)
            read_index = lambda: read_by_first(lambda: read_whole(index_of(path)))  # noqa: E731
            found = read_parts(read_index, path, network=training.layer, optimizers=[training.optimizer])
            return float(found["state_dict"]["bias"].full_tensor()[0])

        assert on_ranks(2, run) == [300.0, 300.0]


@pytest.mark.parametrize("there", ["a damaged file", "a damaged folder", "a link to nothing", "a link to a folder"])
def test_what_cannot_be_resumed_is_in_nobodys_way(there: str, tmp_path: Path) -> None:
    save(tmp_path / "elsewhere", 7)
    if there == "a damaged file":
        (tmp_path / LAST).write_bytes(b"damaged")
    elif there == "a damaged folder":
        (tmp_path / LAST).mkdir()
    else:
        (tmp_path / LAST).symlink_to("nothing" if "nothing" in there else f"elsewhere/{LAST}")
        (tmp_path / PREVIOUS).symlink_to(f"elsewhere/{LAST}")
    assert save(tmp_path, 1) == [None]
    assert save(tmp_path, 2) == [None]
    assert (step_of(tmp_path / LAST), step_of(tmp_path / PREVIOUS)) == (2, 1)
    assert step_of(tmp_path / "elsewhere" / LAST) == 7


def test_a_disk_that_one_process_cannot_write_to_is_told_on_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1, ranks=2)
    write = atomic._write_synced

    def full_disk(path: Path, content: bytes) -> None:
        if "rank1" in path.name:
            raise OSError(28, "No space left on device")
        write(path, content)

    monkeypatch.setattr(atomic, "_write_synced", full_disk)
    first, second = save(tmp_path, 2, ranks=2)
    assert first == second
    said = f"{tmp_path / LAST} could not be saved: No space left on device\nearlier checkpoints are unchanged: {LAST}"
    assert first == said
    assert step_of(tmp_path / LAST) == 1
    assert [path.name for path in tmp_path.iterdir()] == [LAST]


SHARDED = "--last_checkpoint.sharded=true"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("ignore:the training before had")
def test_a_run_that_is_stopped_and_resumed_from_parts_has_the_same_bits(tmp_path: Path) -> None:
    """The end is a file too. One device then goes on from the parts, and writes a file."""
    flags = [*TINY, SHARDED, "--trainer.strategy=fsdp2", "--trainer.max_epochs=2"]
    flags += ["--best_checkpoint.save_top_k=-1", "--last_checkpoint.every_n_steps=1"]
    undisturbed, run, alone = (tmp_path / name for name in ("undisturbed", "run", "alone"))
    launch("fit", *flags, "--trainer.devices=2", f"--run_dir={undisturbed}", ranks=2, timeout_s=250)
    stop = callback("stopping.SignalAfter", step=7, rank=1)
    resumed = [*flags, "--trainer.devices=2", f"--run_dir={run}", "--resume=auto"]
    assert launch("fit", *resumed, *stop, ranks=2, check=False, timeout_s=250).status == 143
    assert (run / "checkpoints" / LAST).is_dir()
    launch("fit", *resumed, ranks=2, timeout_s=250)
    ends = [folder / "checkpoints" / name for folder in (run, undisturbed) for name in (LAST, "best-v1.ckpt")]
    assert [path.is_dir() for path in ends] == [True, False] * 2
    first, *others = map(read_checkpoint, ends)
    for other in others:
        assert_same_checkpoint(first, other, tolerance=0)
        assert (first["position"], first["sample_audit"]) == (other["position"], other["sample_audit"])
    path = f"--ckpt_path={run / 'checkpoints' / LAST}"
    plain = [*TINY, "--trainer.max_epochs=3", path, f"--run_dir={alone}"]
    run_here("fit", *plain)  # on one device
    assert last_checkpoint(alone)["position"]["epoch"] == 3
