"""The data receipt: as tables without processes, in whole runs of one process, and in two real ones."""

import csv
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from commands import TINY, run_here
from counting import Operators
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F

from lit_cifar.checkpoint.exact_resume import ExactResume
from lit_cifar.checkpoint.sample_audit.callback import SampleAudit, write_epoch
from lit_cifar.checkpoint.sample_audit.digest import EMPTY, Receipt, Tally, chain, order_settings, planned, prove
from lit_cifar.cli.main import main
from lit_cifar.data import Batch, CIFAR10DataModule
from lit_cifar.data.batch_split import BatchSplit
from lit_cifar.data.samplers import BatchIds, TrainSampler
from lit_cifar.errors import CheckpointError, ConfigError, SampleAuditError

CPU = torch.device("cpu")


def sampler_of(num_ranks: int = 1, *, rank: int = 0, epoch: int = 3, **settings: Any) -> TrainSampler:
    """100 samples in batches of 24: the last one has four."""
    batch_split = BatchSplit(dp_size=num_ranks, dp_rank=rank)
    return TrainSampler(**({"num_samples": 100, "batch_size": 24} | settings), batch_split=batch_split, epoch=epoch)


def used(num_ranks: int = 1, *, loader_steps: int | None = None, **settings: Any) -> Tensor:
    """The sum of the tallies of all ranks after so many batches, by default a whole epoch."""
    return sum(
        tally_of(sampler_of(num_ranks, rank=rank, **settings), loader_steps=loader_steps).uses
        for rank in range(num_ranks)
    )


def tally_of(sampler: TrainSampler, *, loader_steps: int | None = None, tally: Tally | None = None) -> Tally:
    """What a rank counts while it iterates."""
    tally = tally or Tally(sampler.num_samples, epoch=sampler.epoch, device=CPU)
    for part in list(sampler)[:loader_steps]:
        tally.count(part.ids, accumulation=sampler.accumulation)
    return tally


def digest_by_hand(batches: list[list[int]], *, start: str = EMPTY) -> str:
    """The definition, in other words than the code's."""
    for ids in batches:
        start = sha256(bytes.fromhex(start) + b"".join(struct.pack("<q", i) for i in sorted(ids))).hexdigest()
    return start


def batches_of(sampler: TrainSampler) -> list[list[int]]:
    return [batch.tolist() for batch in sampler.order().split(sampler.batch_size)][: sampler.num_batches]


CUTS = [(num_ranks, accumulation) for num_ranks in (1, 2, 3, 4) for accumulation in (1, 2, 3)]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_an_epoch_is_proven_and_has_one_digest_however_it_is_cut(
    num_ranks: int, accumulation: int, drop_last: bool
) -> None:
    settings = {"accumulation": accumulation, "drop_last": drop_last}
    sampler = sampler_of(num_ranks, **settings)
    uses = used(num_ranks, **settings)
    prove(uses, sampler, loader_steps=len(sampler))
    assert int(uses.count_nonzero()) == (96 if drop_last else 100)
    batches = batches_of(sampler_of(drop_last=drop_last))
    assert len(batches) == sampler.num_batches == (4 if drop_last else 5)
    for num_steps in range(sampler.num_batches + 1):
        assert chain(EMPTY, uses, num_steps=num_steps) == digest_by_hand(batches[:num_steps])


@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_every_part_of_an_epoch_is_proven_and_no_other(num_ranks: int, accumulation: int) -> None:
    """Also within an optimizer step, where a limit on the batches of an epoch may end it."""
    sampler = sampler_of(num_ranks, accumulation=accumulation)
    # Of the four samples of the last batch there are none for some batches of some ranks, or of all.
    tallies = [used(num_ranks, accumulation=accumulation, loader_steps=n) for n in range(len(sampler) + 1)]
    for steps, uses in enumerate(tallies):
        prove(uses, sampler, loader_steps=steps)
        for others, other in enumerate(tallies):
            if not other.equal(uses):
                with pytest.raises(SampleAuditError, match="missing" if others > steps else "in another step"):
                    prove(uses, sampler, loader_steps=others)


def test_digests_differ_when_two_samples_change_places_between_steps_and_only_then() -> None:
    sampler = sampler_of()
    (a, b, *ids) = sampler.order().tolist()
    *_, y, z = ids

    def digest(order: list[int]) -> str:
        planted = replace(sampler)
        planted.order = lambda: torch.tensor(order)  # type: ignore[method-assign]
        return chain(EMPTY, tally_of(planted).uses, num_steps=5)

    assert digest([a, b, *ids]) == digest([b, a, *ids]) == digest([a, b, *ids[:-2], z, y])
    assert digest([a, b, *ids]) != digest([z, b, *ids[:-1], a])


def test_digests_differ_by_seed_and_epoch_and_carry_on_over_epochs() -> None:
    runs = [{}, {"seed": 1}, {"epoch": 4}, {"batch_size": 20}, {"shuffle": False}]
    digests = [chain(EMPTY, used(**settings), num_steps=5) for settings in runs]
    assert len(set(digests)) == len(runs)
    assert chain(digests[0], used(epoch=4), num_steps=5) not in digests
    assert chain(digests[0], used(), num_steps=0) == digests[0]


def complaint(uses: Tensor, sampler: TrainSampler, *, loader_steps: int) -> list[str]:
    """Its first line says where, the others what."""
    with pytest.raises(SampleAuditError) as error:
        prove(uses, sampler, loader_steps=loader_steps)
    where, *what = str(error.value).splitlines()
    assert where == f"broken data receipt of epoch 3 after {loader_steps} of 5 optimizer steps"
    return what


def tally_in_order(*parts: list[int], batches: int = 0) -> Tensor:
    """So many batches as planned, and then others."""
    tally = tally_of(sampler_of(shuffle=False), loader_steps=batches)
    for part in parts:
        tally.count(torch.tensor(part), accumulation=1)
    return tally.uses


CHANGED_PLACES = torch.tensor([50, *range(1, 50), 0, *range(51, 100)]).split(24)
LAST_TEN = [*range(90, 100)]


@pytest.mark.parametrize(
    ("uses", "loader_steps", "expected"),
    [
        (
            tally_in_order([*range(24, 47), 7], batches=1),
            2,
            ["missing: 1 samples, ids 47", "used more than once: 1 samples, ids 7"],
        ),
        (
            tally_in_order(LAST_TEN, LAST_TEN, batches=2),
            5,
            [
                "missing: 42 samples, ids 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, ...",
                "used more than once: 10 samples, ids 90, 91, 92, 93, 94, 95, 96, 97, 98, 99",
            ],
        ),
        (
            tally_in_order(*(part.tolist() for part in CHANGED_PLACES)),
            5,
            ["used in another step than planned: 2 samples, ids 0, 50"],
        ),
        (
            2 * tally_of(sampler_of(2, shuffle=False)).uses,
            5,
            [
                "missing: 50 samples, ids 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, ...",
                "used more than once: 50 samples, ids 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, ...",
            ],
        ),
    ],
    ids=["one for another", "ten of many", "in other steps", "both processes read the part of the first"],
)
def test_samples_that_are_wrong_are_named(uses: Tensor, loader_steps: int, expected: list[str]) -> None:
    assert complaint(uses, sampler_of(shuffle=False), loader_steps=loader_steps) == expected


def test_an_order_that_is_no_permutation_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan comes from the same order as the samples, and yet does not excuse it."""
    monkeypatch.setattr(TrainSampler, "order", lambda self: torch.tensor([5, *range(1, 100)]))
    assert complaint(used(), sampler_of(), loader_steps=5) == ["used more than once: 1 samples, ids 5"]


def test_a_sampler_that_ignores_its_offset_is_found() -> None:
    sampler = sampler_of(shuffle=False, start=2)
    tally = Tally.resumed(sampler, step=2, device=CPU)
    prove(tally_of(sampler, tally=tally).uses, sampler, loader_steps=5)

    tally = Tally.resumed(sampler, step=2, device=CPU)
    uses = tally_of(replace(sampler, start=0), tally=tally, loader_steps=1).uses
    assert complaint(uses, sampler, loader_steps=3) == [
        "missing: 24 samples, ids 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, ...",
        "used more than once: 24 samples, ids 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...",
    ]


@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_a_resumed_tally_goes_on_to_the_whole_epoch(num_ranks: int, accumulation: int, step: int) -> None:
    samplers = [sampler_of(num_ranks, rank=rank, accumulation=accumulation, start=step) for rank in range(num_ranks)]
    tallies = [Tally.resumed(sampler, step=step, device=CPU) for sampler in samplers]
    for sampler, tally in zip(samplers, tallies, strict=True):
        tally_of(sampler, tally=tally)
        assert tally.loader_steps == len(sampler)
    assert sum(tally.uses for tally in tallies).equal(used())


def test_counting_takes_one_operation_and_reads_nothing_back() -> None:
    tally = Tally(100, epoch=0, device=CPU)
    tally.count(torch.arange(0), accumulation=2)
    ids = torch.arange(24)
    with Operators() as operators:
        tally.count(ids, accumulation=2)
    assert operators.counts == {"expand": 1, "index_add_": 1}


SETTINGS = {"dataset": "synthetic", "val_size": 20}


def receipt_at(step: int, **settings: Any) -> Receipt:
    sampler = sampler_of(**settings)
    uses = planned(sampler, loader_steps=step * sampler.accumulation)
    return Receipt(
        epoch=sampler.epoch,
        step=step,
        start=EMPTY,
        digest=chain(EMPTY, uses, num_steps=step),
        settings=order_settings(sampler, **SETTINGS),
    )


def test_a_receipt_survives_a_checkpoint_that_holds_tensors_and_primitives_alone(tmp_path: Path) -> None:
    receipt = receipt_at(2)
    checkpoint: dict[str, Any] = {}
    receipt.write(checkpoint)
    torch.save(checkpoint, tmp_path / "file")
    assert Receipt.read(torch.load(tmp_path / "file", weights_only=True)) == receipt
    assert Receipt.read({}) is None
    for damaged in ({"receipt": 3}, {"receipt": {"epoch": 0}}):
        with pytest.raises(CheckpointError, match="not the entries"):
            Receipt.read(damaged)


@pytest.mark.parametrize(("num_ranks", "accumulation"), CUTS)
def test_a_receipt_fits_any_number_of_processes(num_ranks: int, accumulation: int) -> None:
    sampler = sampler_of(num_ranks, rank=num_ranks - 1, accumulation=accumulation)
    for step in range(6):
        receipt_at(step).check(sampler, order_settings(sampler, **SETTINGS))


@pytest.mark.parametrize(
    ("changed", "problem", "remedy"),
    [
        ({"seed": 1}, "--data.seed=1", "--data.seed=0"),
        ({"batch_size": 20}, "--data.batch_size=20", "--data.batch_size=24"),
        ({"shuffle": False}, "--data.shuffle=false", "--data.shuffle=true"),
        ({"frozen": True}, "--data.frozen_order=true", "--data.frozen_order=false"),
        ({"drop_last": True}, "--data.drop_last=true", "--data.drop_last=false"),
        ({"num_samples": 110}, "--data.num_train=130", "--data.num_train=120"),
        ({"val_size": 10, "num_samples": 110}, "--data.val_size=10", "--data.val_size=20"),
        ({"dataset": "cifar10"}, "--data.dataset=cifar10", "--data.dataset=synthetic"),
    ],
    ids=str,
)
def test_other_settings_are_refused_within_an_epoch_and_named(
    changed: dict[str, Any], problem: str, remedy: str
) -> None:
    about_data = SETTINGS | {name: value for name, value in changed.items() if name in SETTINGS}
    sampler = sampler_of(**{name: value for name, value in changed.items() if name not in SETTINGS})
    settings = order_settings(sampler, **about_data)
    with pytest.raises(ConfigError) as error:
        receipt_at(2).check(sampler, settings)
    assert f"after 2 optimizer steps of epoch 3 with {remedy}; {problem} would" in error.value.problem
    assert error.value.remedy.startswith(f"pass {remedy}, or")
    receipt_at(0).check(sampler, settings)


def test_another_order_from_the_same_settings_is_refused() -> None:
    sampler = sampler_of()
    with pytest.raises(ConfigError, match="whose samples are not those"):
        replace(receipt_at(2), start="00" * 32).check(sampler, order_settings(sampler, **SETTINGS))
    with pytest.raises(ConfigError, match="whose samples are not those"):
        replace(receipt_at(2), step=1).check(sampler, order_settings(sampler, **SETTINGS))


def test_an_epoch_that_is_proven_again_replaces_its_line_and_those_after_it(tmp_path: Path) -> None:
    for epoch, digest in ((0, "a"), (1, "b"), (2, "c"), (1, "d")):
        write_epoch(tmp_path, epoch, 5, 100, digest)
    assert (tmp_path / "receipt.csv").read_text() == "epoch,steps,samples,digest\n0,5,100,a\n1,5,100,d\n"
    assert [path.name for path in tmp_path.iterdir()] == ["receipt.csv"]


# Whole runs with Lightning's own loops, of a network that costs nothing.


class Colours(L.LightningModule):
    """Classifies images by their mean colour."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.image_shape = nn.Linear(3, 10), (3, 32, 32)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.mean(dim=(2, 3)))

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch.images), batch.labels)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Nothing to see."""

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class SaveAt(L.Callback):
    """Writes a checkpoint at a step boundary, before the other callbacks see the next batch."""

    def __init__(self, path: Path, *, epoch: int, step: int) -> None:
        self.path, self.at = path, (epoch, step)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        step, rest = divmod(batch_idx, trainer.accumulate_grad_batches)
        if not rest and (trainer.current_epoch, step) == self.at:
            trainer.save_checkpoint(self.path)


def data(**settings: Any) -> CIFAR10DataModule:
    """80 images in 5 batches of 16, or as `settings` say."""
    defaults = {"dataset": "synthetic", "num_train": 96, "num_test": 10, "val_size": 16, "batch_size": 16}
    return CIFAR10DataModule(**(defaults | {"augment": False} | settings))


def fit(
    run: Path, *callbacks: L.Callback, resume: Path | None = None, of: CIFAR10DataModule | None = None, **options: Any
) -> L.Trainer:
    """A run with a receipt in a folder of its own."""
    defaults = {"max_epochs": 2, "limit_val_batches": 0, "log_every_n_steps": 1, "accelerator": "cpu", "devices": 1}
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = L.Trainer(
        **(defaults | quiet | options),
        logger=CSVLogger(run, name="", version=""),
        callbacks=[*callbacks, ExactResume(), SampleAudit()],
    )
    trainer.fit(Colours(), datamodule=of or data(), ckpt_path=resume, weights_only=True)
    return trainer


def receipt_of(checkpoint: Path) -> Receipt:
    receipt = Receipt.read(torch.load(checkpoint, weights_only=True))
    assert receipt is not None
    return receipt


def lines(run: Path) -> list[list[str]]:
    with (run / "receipt.csv").open(newline="") as file:
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
        ({}, {}, {}),
        ({}, {"accumulate_grad_batches": 2}, {}),
        ({"batch_size": 24}, {}, {"batch_size": 24}),
        ({"batch_size": 24, "drop_last": True}, {}, {"batch_size": 24, "drop_last": True}),
        ({"seed": 5}, {"limit_train_batches": 3}, {"seed": 5, "num_steps": 3}),
        ({}, {"limit_train_batches": 4, "accumulate_grad_batches": 2}, {"num_steps": 2}),
        ({"frozen_order": True}, {}, {"frozen": True}),
        ({}, {"max_epochs": -1, "max_steps": 7}, {"num_epochs": 1}),
    ],
    ids=str,
)
def test_a_run_writes_a_line_for_every_whole_epoch(
    settings: dict[str, Any], options: dict[str, Any], expected: dict[str, Any], tmp_path: Path
) -> None:
    fit(tmp_path, of=data(**settings), **options)
    assert lines(tmp_path) == expected_lines(**expected)


def test_a_limit_may_cut_the_last_step_of_an_epoch_short(tmp_path: Path) -> None:
    fit(tmp_path, limit_train_batches=3, accumulate_grad_batches=2)
    assert [row[:3] for row in lines(tmp_path)] == [["0", "2", "24"], ["1", "2", "24"]]


def test_a_run_without_a_folder_is_proven_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_out() -> None:
        trainer = L.Trainer(fast_dev_run=2, accelerator="cpu", devices=1, callbacks=[audit], limit_val_batches=0)
        trainer.fit(Colours(), datamodule=data())

    audit = SampleAudit()
    try_out()
    monkeypatch.setattr(TrainSampler, "__iter__", _divided_wrongly)
    with pytest.raises(SampleAuditError, match="missing: 16 samples"):
        try_out()


_iterate = TrainSampler.__iter__


def _without_offset(self: TrainSampler) -> Iterator[BatchIds]:
    return _iterate(replace(self, start=0))


def _divided_wrongly(self: TrainSampler) -> Iterator[BatchIds]:
    """One process reads as if there were another one, or two read the same."""
    return _iterate(replace(self, batch_split=BatchSplit(dp_size=2)))


def _one_step_short(self: TrainSampler) -> Iterator[BatchIds]:
    return iter(list(_iterate(self))[:-1])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints after two steps of the second epoch, and between the first two."""
    folder = tmp_path_factory.mktemp("saved")
    saves = [SaveAt(folder / f"{step}.ckpt", epoch=1, step=step) for step in (0, 2)]
    fit(folder / "run", *saves)
    return folder


def test_a_checkpoint_holds_the_digest_of_what_was_used(saved: Path) -> None:
    first, second = lines(saved / "run")
    receipt = receipt_of(saved / "2.ckpt")
    assert (receipt.epoch, receipt.step, receipt.start) == (1, 2, first[3])
    batches = batches_of(sampler_of(num_samples=80, batch_size=16, epoch=1))
    assert receipt.digest == digest_by_hand(batches[:2], start=first[3])
    assert digest_by_hand(batches[2:], start=receipt.digest) == second[3]
    between = receipt_of(saved / "0.ckpt")
    assert (between.epoch, between.step, between.start, between.digest) == (1, 0, first[3], first[3])


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"max_epochs": 3}], ids=str)
@pytest.mark.parametrize("step", [0, 2])
def test_a_resumed_run_ends_with_the_digest_of_the_undisturbed_one(
    step: int, options: dict[str, Any], saved: Path, tmp_path: Path
) -> None:
    fit(tmp_path, resume=saved / f"{step}.ckpt", **options)
    assert lines(tmp_path) == expected_lines(options.get("max_epochs", 2))[1:]


def test_a_run_that_max_steps_ended_within_an_epoch_goes_on(tmp_path: Path) -> None:
    trainer = fit(tmp_path / "first", max_epochs=-1, max_steps=7)
    trainer.save_checkpoint(tmp_path / "end.ckpt")
    receipt = receipt_of(tmp_path / "end.ckpt")
    assert (receipt.epoch, receipt.step) == (1, 2)
    fit(tmp_path / "second", resume=tmp_path / "end.ckpt")
    assert lines(tmp_path / "second") == expected_lines()[1:]


def test_a_resumed_run_whose_sampler_ignores_its_offset_is_stopped(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainSampler, "__iter__", _without_offset)
    with pytest.raises(
        SampleAuditError, match=r"of epoch 1 after 5 of 5 optimizer steps\nmissing: 32 .*\nused more than"
    ):
        fit(tmp_path / "to the end", resume=saved / "2.ckpt")
    assert not (tmp_path / "to the end" / "receipt.csv").exists()
    with pytest.raises(SampleAuditError, match="of epoch 1 after 3 of 5 optimizer steps"):
        fit(tmp_path / "saves", SaveAt(tmp_path / "late.ckpt", epoch=1, step=3), resume=saved / "2.ckpt")
    assert not (tmp_path / "late.ckpt").exists()
    fit(tmp_path / "between epochs", resume=saved / "0.ckpt")


@pytest.mark.parametrize(
    ("mistake", "text"), [(_divided_wrongly, "missing: 40 samples"), (_one_step_short, "missing: 16 samples")]
)
def test_a_run_that_loses_samples_is_stopped(
    mistake: Any, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainSampler, "__iter__", mistake)
    with pytest.raises(SampleAuditError, match=f"of epoch 0 after 5 of 5 optimizer steps\n{text}"):
        fit(tmp_path, max_epochs=1)


class SaveAfterValidation(L.Callback):
    """Writes a checkpoint where one of the best network is written: at the end of an epoch that has not ended yet."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if not trainer.sanity_checking and trainer.current_epoch == 1:
            trainer.save_checkpoint(self.path)


def test_a_run_goes_on_from_the_end_of_an_epoch_that_it_still_has_to_prove(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    fit(tmp_path / "first", SaveAfterValidation(path), limit_val_batches=1)
    receipt = receipt_of(path)
    assert (receipt.epoch, receipt.step, receipt.digest) == (1, 5, expected_lines()[1][3])
    fit(tmp_path / "second", resume=path, max_epochs=3, limit_val_batches=1)
    assert lines(tmp_path / "second") == expected_lines(3)[1:]


def test_a_run_that_goes_on_elsewhere_than_its_receipt_ends_is_stopped(saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved / "2.ckpt", weights_only=True)
    checkpoint["position"]["step"] = 1
    torch.save(checkpoint, tmp_path / "behind.ckpt")
    with pytest.raises(SampleAuditError, match="continues with batch 1 of epoch 1, but batch 2 of epoch 1 is next"):
        fit(tmp_path / "run", resume=tmp_path / "behind.ckpt")


def test_another_batch_size_waits_for_the_next_epoch(saved: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data\.batch_size=40 would order the rest of it otherwise"):
        fit(tmp_path, resume=saved / "2.ckpt", of=data(batch_size=40))
    fit(tmp_path, resume=saved / "0.ckpt", of=data(batch_size=40))
    assert [row[:3] for row in lines(tmp_path)] == [["1", "2", "80"]]


def test_a_checkpoint_without_a_receipt_leaves_its_epoch_unproven(saved: Path, tmp_path: Path) -> None:
    checkpoint = torch.load(saved / "2.ckpt", weights_only=True)
    del checkpoint["receipt"]
    torch.save(checkpoint, tmp_path / "old.ckpt")
    save = SaveAt(tmp_path / "next.ckpt", epoch=1, step=4)
    with pytest.warns(UserWarning, match="no data receipt: the samples of its epoch are not checked"):
        fit(tmp_path / "run", save, resume=tmp_path / "old.ckpt", max_epochs=3)
    assert [row[:3] for row in lines(tmp_path / "run")] == [["2", "5", "80"]]
    assert "receipt" not in torch.load(tmp_path / "next.ckpt", weights_only=True)


def test_evaluation_needs_no_receipt(saved: Path, tmp_path: Path) -> None:
    """Neither a warning nor a check: its settings may be others."""
    trainer = L.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=[SampleAudit()], enable_progress_bar=False
    )
    trainer.test(Colours(), datamodule=data(seed=1), ckpt_path=saved / "2.ckpt", weights_only=True, verbose=False)


# The command line, and two processes.


def test_the_command_line_writes_receipts(tmp_path: Path) -> None:
    run = tmp_path / "run"
    result = run_here("fit", *TINY, "--trainer.accumulate_grad_batches=2", f"--run_dir={run}")
    assert result.status == 0, result.stderr
    assert lines(run) == expected_lines(1)
    assert receipt_of(run / "checkpoints" / "last.ckpt").digest == lines(run)[-1][3]


class ShardWrongly(L.Callback):
    """Lets every process read what the first one reads."""

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Plant the mistake."""
        sampler = trainer.train_dataloader.sampler
        sampler.batch_split = replace(sampler.batch_split, dp_rank=0)


def run_two_processes(folder: Path) -> None:
    """The body of the script that torchrun starts twice: sound runs, then a broken one."""
    ddp = {"strategy": "ddp", "devices": 2}
    save = SaveAt(folder / "2.ckpt", epoch=1, step=2)
    fit(folder / "ddp", save, **ddp)
    fit(folder / "resumed", resume=folder / "2.ckpt", accumulate_grad_batches=2, **ddp)
    pipeline = ["--trainer.strategy=pp", "--trainer.devices=2", "--trainer.limit_val_batches=0"]
    main(["fit", *TINY, *pipeline, f"--run_dir={folder / 'pp'}"])
    try:
        fit(folder / "wrong", ShardWrongly(), **ddp)
    except SampleAuditError as error:
        (folder / f"error{os.environ['RANK']}").write_text(str(error))


@pytest.mark.slow
def test_two_processes_prove_what_they_used_together(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nfrom pathlib import Path\n\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_sample_audit import run_two_processes\n\n"
        "if __name__ == '__main__':\n    run_two_processes(Path(sys.argv[1]))\n"
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*torchrun, str(script), str(tmp_path)], env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-4000:]
    assert lines(tmp_path / "ddp") == expected_lines(2)
    assert lines(tmp_path / "resumed") == expected_lines(2)[1:]
    fit(tmp_path / "alone", resume=tmp_path / "2.ckpt")
    assert lines(tmp_path / "alone") == expected_lines(2)[1:]
    assert lines(tmp_path / "pp") == expected_lines(1)
    errors = [(tmp_path / f"error{rank}").read_text().splitlines() for rank in range(2)]
    assert errors[0] == errors[1]
    assert errors[0][0] == "broken data receipt of epoch 0 after 5 of 5 optimizer steps"
    assert [line.split(",")[0] for line in errors[0][1:]] == [
        "missing: 40 samples",
        "used more than once: 40 samples",
    ]


def test_a_refused_checkpoint_is_named(tmp_path: Path) -> None:
    assert run_here("fit", *TINY, "--trainer.max_steps=2", f"--run_dir={tmp_path / 'run'}").status == 0
    checkpoint = tmp_path / "run" / "checkpoints" / "last.ckpt"
    result = run_here(
        "fit", *TINY, "--data.batch_size=20", f"--ckpt_path={checkpoint}", f"--run_dir={tmp_path / 'new'}"
    )
    assert result.status == 2
    assert f"{checkpoint}: " in result.stderr
    assert "--data.batch_size=16" in result.stderr
