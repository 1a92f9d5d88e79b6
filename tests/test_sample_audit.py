"""The sample audit: as tables without processes, and in whole runs of one process."""

import csv
import struct
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import short_fits
import torch
from counting import Operators
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from tiny_task import TinyTask, tiny_trainer
from torch import Tensor, nn

from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.sample_audit import EMPTY, AuditRecord, Plan, SampleAudit, Tally, chain, failure, write_epoch
from lit_cifar.data import Batch, CIFAR10DataModule, Order
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.errors import CheckpointError, SampleAuditError
from lit_cifar.mode import Layout

CPU = torch.device("cpu")


def sampler_of(num_ranks: int = 1, *, rank: int = 0, epoch: int = 3, **settings: Any) -> TrainSampler:
    """100 samples in batches of 24: the last one has four."""
    layout = Layout(data_parallel_size=num_ranks, data_parallel_rank=rank)
    return TrainSampler(**({"num_samples": 100, "batch_size": 24} | settings), layout=layout, epoch=epoch)


def tallies_of(num_ranks: int = 1, *, loader_steps: int | None = None, step: int = 0, **settings: Any) -> list[Tally]:
    """Of all ranks, after so many batches, by default all; resumed after `step` steps."""
    tallies = []
    for rank in range(num_ranks):
        sampler = sampler_of(num_ranks, rank=rank, **settings)
        tally = Tally(sampler, step=step, device=CPU)
        for part in list(sampler)[step * sampler.accumulation :][:loader_steps]:
            tally.count(part.ids, accumulation=sampler.accumulation)
        tallies.append(tally)
    return tallies


def used(tallies: list[Tally]) -> Tensor:
    return sum(tally.uses for tally in tallies)


def is_proven(tallies: list[Tally], *, loader_steps: int) -> bool:
    return used(tallies).equal(tallies[0].plan.uses(loader_steps))


def digest_by_hand(batches: list[list[int]], *, start: str = EMPTY) -> str:
    """The definition, in other words than the code's."""
    for ids in batches:
        start = sha256(bytes.fromhex(start) + b"".join(struct.pack("<q", i) for i in sorted(ids))).hexdigest()
    return start


def batches_of(sampler: TrainSampler) -> list[list[int]]:
    return [batch.tolist() for batch in sampler.order().split(sampler.batch_size)][: sampler.num_batches]


CUTS = [(1, 1), (1, 2), (2, 1), (3, 2), (4, 3)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_an_epoch_has_one_digest_however_it_is_cut(num_ranks: int, accumulation: int, drop_last: bool) -> None:
    """And however often it is proven."""
    tallies = tallies_of(num_ranks, accumulation=accumulation, drop_last=drop_last)
    batches = batches_of(sampler_of(drop_last=drop_last))
    assert len(batches) == (4 if drop_last else 5)
    num_due = int(tallies[0].plan.uses(len(batches) * accumulation).count_nonzero())
    assert int(used(tallies).count_nonzero()) == num_due == (96 if drop_last else 100)
    digest = EMPTY
    for num_steps in (0, 1, 3, 3, len(batches)):
        # A microbatch of the next step is read, but the step is not whole.
        read = min(num_steps * accumulation + (accumulation > 1), len(batches) * accumulation)
        digest = tallies[0].proceed(digest, loader_steps=read, ends=False)
        assert digest == digest_by_hand(batches[:num_steps])
        assert tallies[0].proven == num_steps


@pytest.mark.parametrize("proven", [0, 2])
@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_every_part_of_an_epoch_is_proven_and_no_other(num_ranks: int, accumulation: int, proven: int) -> None:
    """Also within an optimizer step, where a limit on the batches of an epoch may end it."""
    # Of the four samples of the last batch there are none for some batches of some ranks, or of all.
    numbers = range(proven * accumulation, 5 * accumulation + 1)
    runs = {n: tallies_of(num_ranks, accumulation=accumulation, loader_steps=n) for n in numbers}
    for tally in (tally for tallies in runs.values() for tally in tallies):
        tally.proceed(EMPTY, loader_steps=proven * accumulation, ends=False)
    for steps, tallies in runs.items():
        assert is_proven(tallies, loader_steps=steps)
        for others, other in runs.items():
            if not used(other).equal(used(tallies)):
                assert not is_proven(tallies, loader_steps=others)
                problem = "missing" if others > steps else "in another step"
                assert problem in str(failure(used(tallies), tallies[0].plan, loader_steps=others))


@pytest.mark.parametrize(
    ("used_ids", "expected"),
    [
        ([[*range(23), 24], [23, *range(25, 48)]], ["used in another step than planned: 2 samples, ids 23, 24"]),
        (
            [[*range(24)]] * 2,
            [
                "missing: 24 samples, ids 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, ...",
                "used too often: 24 samples, ids 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...",
            ],
        ),
        ([[*range(24)], [*range(3, 48)]], ["used too often: 21 samples, ids 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, ..."]),
        ([[*range(24)], [*range(24, 48), 90]], ["used in another step than planned: 1 samples, ids 90"]),
    ],
    ids=["in another step", "a batch twice", "those of before as well", "one more"],
)
def test_samples_that_are_wrong_are_named(used_ids: list[list[int]], expected: list[str]) -> None:
    """Those of the second step; with the first one proven before, or not."""
    for proven in (0, 1):
        tally = Tally(sampler_of(shuffle=False), device=CPU)
        tally.proven = proven
        for ids in used_ids:
            tally.count(torch.tensor(ids), accumulation=1)
        assert not is_proven([tally], loader_steps=2)
        where, *what = str(failure(tally.uses, tally.plan, loader_steps=2)).splitlines()
        assert where == "the sample audit of epoch 3 fails after 2 of 5 optimizer steps"
        assert what == expected


def test_an_order_that_is_no_permutation_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan comes from the same order as the samples, and yet does not excuse it."""
    monkeypatch.setattr(TrainSampler, "keys", lambda self: torch.tensor([5, *range(1, 100)]))
    (tally,) = tallies_of()
    assert not is_proven([tally], loader_steps=5)
    assert str(failure(tally.uses, tally.plan, loader_steps=5)).endswith("used too often: 1 samples, ids 5")


def test_a_limit_on_the_batches_of_an_epoch_may_shorten_its_last_step() -> None:
    (tally,) = tallies_of(accumulation=2, loader_steps=3)
    first, second, *_ = batches_of(sampler_of())
    digest = tally.proceed(EMPTY, loader_steps=3, ends=True)
    assert (digest, tally.proven) == (digest_by_hand([first, second[::2]]), 2)
    assert tally.proceed(digest, loader_steps=3, ends=True) == digest


def record_at(step: int) -> AuditRecord:
    digest = chain(EMPTY, *Plan(sampler_of()).due(0, step), first=0, last=step)
    return AuditRecord(epoch=3, step=step, start=EMPTY, digest=digest)


@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_any_number_of_processes_resumes_a_tally(num_ranks: int, accumulation: int) -> None:
    for step in range(6):
        resumed = tallies_of(num_ranks, accumulation=accumulation, step=step)
        assert used(resumed).equal(used(tallies_of()))
        assert is_proven(resumed, loader_steps=5 * accumulation)
        record_at(step).check(Plan(sampler_of(num_ranks, rank=num_ranks - 1, accumulation=accumulation)))


def test_counting_takes_one_operation_and_reads_nothing_back() -> None:
    tally = Tally(sampler_of(), device=CPU)
    tally.count(torch.arange(0), accumulation=2)
    ids = torch.arange(24)
    with Operators() as operators:
        tally.count(ids, accumulation=2)
    assert operators.counts == {"expand": 1, "index_add_": 1}


def test_another_order_from_the_same_settings_is_refused() -> None:
    for changed in ({"start": "00" * 32}, {"step": 1}):
        with pytest.raises(CheckpointError, match="are not those that the same settings give"):
            replace(record_at(2), **changed).check(Plan(sampler_of()))


def test_an_epoch_that_is_proven_again_replaces_its_line_and_those_after_it(tmp_path: Path) -> None:
    for epoch, digest in ((0, "a"), (1, "b"), (2, "c"), (1, "d")):
        write_epoch(tmp_path, epoch, 5, 100, digest)
    lines = ["epoch,steps,samples,digest", "0,5,100,a", "1,5,100,d"]
    assert (tmp_path / "sample_audit.csv").read_text().splitlines() == lines


# Whole runs with Lightning's own loops, of a network that costs nothing.


class Colours(TinyTask):
    """Classifies images by their mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 10))

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        """Nothing to see."""


class SaveAt(L.Callback):
    """Writes a checkpoint at a step boundary, before the other callbacks see the next batch."""

    def __init__(self, path: Path, *, epoch: int, step: int) -> None:
        self.path, self.at = path, (epoch, step)

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        step, rest = divmod(batch_idx, trainer.accumulate_grad_batches)
        if not rest and (trainer.current_epoch, step) == self.at:
            trainer.save_checkpoint(self.path)


data = partial(short_fits.data, num_train=96, val_size=16, augment=False)  # 80 images in 5 batches of 16


def fit(
    run: Path, *callbacks: L.Callback, resume: Path | None = None, of: CIFAR10DataModule | None = None, **options: Any
) -> L.Trainer:
    """A run with an audit in a folder of its own."""
    options = {"max_epochs": 2, "limit_val_batches": 0, "logger": CSVLogger(run, name="", version="")} | options
    trainer = tiny_trainer(run, callbacks=[*callbacks, ExactResume(), SampleAudit()], **options)
    trainer.fit(Colours(), datamodule=of or data(), ckpt_path=resume, weights_only=True)
    return trainer


def lines(run: Path) -> list[list[str]]:
    with (run / "sample_audit.csv").open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == ["epoch", "steps", "samples", "digest"]
    return rows


def expected_lines(num_epochs: int = 2, *, num_steps: int | None = None, **settings: Any) -> list[list[str]]:
    rows, digest = [], EMPTY
    for epoch in range(num_epochs):
        sampler = sampler_of(**({"num_samples": 80, "batch_size": 16} | settings), epoch=epoch)
        batches = batches_of(sampler)[:num_steps]
        digest = digest_by_hand(batches, start=digest)
        rows.append([str(epoch), str(len(batches)), str(sum(map(len, batches))), digest])
    return rows


@pytest.mark.parametrize(
    ("settings", "options", "expected"),
    [
        ({"batch_size": 24}, {"accumulate_grad_batches": 2}, {"batch_size": 24}),
        ({"batch_size": 24, "order": Order(drop_last=True)}, {}, {"batch_size": 24, "drop_last": True}),
        ({"seed": 5}, {"limit_train_batches": 3}, {"seed": 5, "num_steps": 3}),
        ({}, {"limit_train_batches": 4, "accumulate_grad_batches": 2}, {"num_steps": 2}),
        ({"order": Order(frozen=True)}, {}, {"frozen": True}),
        ({}, {"max_epochs": -1, "max_steps": 7}, {"num_epochs": 1}),
    ],
    ids=str,
)
def test_a_run_writes_a_line_for_every_whole_epoch(
    settings: dict[str, Any], options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path, of=data(**settings), **options)
    assert lines(tmp_path) == expected_lines(**expected)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint after two steps of the second epoch."""
    folder = tmp_path_factory.mktemp("saved")
    fit(folder / "run", SaveAt(folder / "2.ckpt", epoch=1, step=2))
    return folder


def test_a_run_that_loses_samples_is_stopped(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads as if there were another process, or begins a resumed epoch anew."""
    iterate, two = TrainSampler.__iter__, Layout(data_parallel_size=2)
    monkeypatch.setattr(TrainSampler, "__iter__", lambda self: iterate(replace(self, layout=two)))
    with pytest.raises(SampleAuditError, match=r"of epoch 0 fails after 5 of 5 optimizer steps\nmissing: 40 samples"):
        fit(tmp_path / "first", max_epochs=1)
    monkeypatch.setattr(TrainSampler, "__iter__", lambda self: iterate(replace(self, behind=None)))
    with pytest.raises(SampleAuditError, match=r"of epoch 1 fails after 5 of 5 .*\nmissing: 32 .*\nused too often"):
        fit(tmp_path / "resumed", resume=saved / "2.ckpt")
    assert not (tmp_path / "resumed" / "sample_audit.csv").exists()
    with pytest.raises(SampleAuditError, match="of epoch 1 fails after 3 of 5 optimizer steps"):
        fit(tmp_path / "saves", SaveAt(tmp_path / "late.ckpt", epoch=1, step=3), resume=saved / "2.ckpt")
    assert not (tmp_path / "late.ckpt").exists()


def test_an_epoch_that_has_ended_is_not_counted_again(tmp_path: Path) -> None:
    """It was saved behind the epoch's end, before the audit heard of it."""
    saves = LambdaCallback(on_train_epoch_end=lambda trainer, _: trainer.save_checkpoint(tmp_path / "1.ckpt"))
    fit(tmp_path / "run", saves, max_epochs=1)
    fit(tmp_path / "resumed", resume=tmp_path / "1.ckpt")
    assert lines(tmp_path / "resumed") == expected_lines()[1:]


class FailsIn(SaveAt):
    """Has an error behind the forward pass, and leaves a checkpoint."""

    def on_before_backward(self, trainer: L.Trainer, pl_module: Any, loss: torch.Tensor) -> None:
        if (trainer.current_epoch, trainer.global_step % 5) == self.at:
            trainer.save_checkpoint(self.path)
            raise MemoryError

    on_train_batch_start = L.Callback.on_train_batch_start


def test_a_step_that_an_error_has_ended_is_not_proven(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="within an optimizer step"), pytest.raises(MemoryError):
        fit(tmp_path / "run", FailsIn(tmp_path / "2.ckpt", epoch=1, step=2))
    fit(tmp_path / "resumed", resume=tmp_path / "2.ckpt")
    assert lines(tmp_path / "resumed") == expected_lines()[1:]


def test_a_checkpoint_without_an_audit_leaves_its_epoch_unproven(saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved / "2.ckpt", weights_only=True)
    del checkpoint["sample_audit"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    save = SaveAt(tmp_path / "next.ckpt", epoch=1, step=4)
    with pytest.warns(UserWarning, match="no sample audit: the samples of its epoch are not checked"):
        fit(tmp_path / "run", save, resume=tmp_path / "old.ckpt", max_epochs=3)
    assert [row[:3] for row in lines(tmp_path / "run")] == [["2", "5", "80"]]
    assert "sample_audit" not in torch.load(tmp_path / "next.ckpt", weights_only=True)
