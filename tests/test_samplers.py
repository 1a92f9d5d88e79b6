"""The order contract as tables: how strategies cut a batch, and which samples a process reads; none is started here."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
import torch
from counting import Operators
from library_fits import Watch, make
from lightning.pytorch.strategies import Strategy
from short_fits import data, fit, short

from lit_cifar.data import CIFAR10DataModule, Order
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.loader import _BLOCK_ON_DEVICE, BatchLoader
from lit_cifar.data.samplers import BatchIds, EvaluationSampler, TrainSampler
from lit_cifar.errors import ConfigError
from lit_cifar.mode import Layout, mode_of
from lit_cifar.strategies import PipelineStrategy
from lit_cifar.tools.modes import SILENT

NUM_RANKS = [1, 2, 3, 4, 7]
SECOND = Layout(data_parallel_size=2, data_parallel_rank=1)


@pytest.mark.parametrize(
    ("devices", "strategy", "name", "layout"),
    [
        (1, "auto", "single_device", Layout()),
        (4, "ddp_spawn", "ddp_spawn", Layout(data_parallel_size=4)),
        (2, "dp", "dp", Layout(local_replicas=2)),
        (2, "pp", "pp", Layout(model_parallel_size=2, num_microbatches=4)),
        (5, "pp", "pp", Layout(model_parallel_size=5, num_microbatches=5)),
        (4, "ddp_pp", "ddp_pp", Layout(data_parallel_size=2, model_parallel_size=2, num_microbatches=4)),
        (3, PipelineStrategy(num_stages=1, num_microbatches=1), "ddp_pp", Layout(data_parallel_size=3)),
        (4, "fsdp2", "fsdp2", Layout(data_parallel_size=4)),
        (4, "tp", "tp", Layout(model_parallel_size=4)),
    ],
)
def test_the_layout_is_known_before_a_start(devices: int, strategy: Strategy | str, name: str, layout: Layout) -> None:
    mode = mode_of(L.Trainer(accelerator="cpu", devices=devices, strategy=strategy, **SILENT).strategy)
    assert (mode.name, mode.layout) == (name, layout)


def test_machines_and_replicas_multiply_and_microbatches_are_pieces_of_them() -> None:
    trainer = L.Trainer(accelerator="cpu", devices=2, num_nodes=3, strategy="ddp", **SILENT)
    assert mode_of(trainer.strategy).layout == Layout(data_parallel_size=6)
    layout = Layout(data_parallel_size=3, data_parallel_rank=2, local_replicas=2, num_microbatches=4)
    assert layout.num_replicas == 6
    chunks = GhostBatches(data_parallel_size=3, accumulation=5, local_replicas=2, num_microbatches=4)
    assert GhostBatches.of(layout, accumulation=5) == chunks
    for field in ("data_parallel_size", "accumulation", "local_replicas", "num_microbatches"):
        with pytest.raises(ValueError, match=f"{field}=0"):
            GhostBatches(**{field: 0})


@pytest.mark.parametrize(
    ("cut", "num_samples", "positions"),
    [
        ({}, 4, [[[0, 1, 2, 3]]]),
        # Shards are interleaved.
        ({"data_parallel_size": 2}, 5, [[[0, 2, 4]], [[1, 3]]]),
        ({"data_parallel_size": 4}, 3, [[[0]], [[1]], [[2]]]),
        # Accumulation steps take turns around the shards, and come one after the other.
        ({"accumulation": 2}, 5, [[[0, 2, 4], [1, 3]]]),
        ({"data_parallel_size": 2, "accumulation": 2}, 6, [[[0, 4], [2]], [[1, 5], [3]]]),
        # Replicas of one process get neighbours, as many each as `Tensor.chunk` gives: 5 over 4 leave the last without.
        ({"local_replicas": 4}, 5, [[[0, 1]], [[2, 3]], [[4]]]),
        ({"local_replicas": 2, "data_parallel_size": 2}, 8, [[[0, 2]], [[4, 6]], [[1, 3]], [[5, 7]]]),
        ({"local_replicas": 2, "accumulation": 2}, 8, [[[0, 2], [1, 3]], [[4, 6], [5, 7]]]),
        # Microbatches get neighbours, as many each as `Tensor.tensor_split` gives.
        ({"num_microbatches": 4}, 5, [[[0, 1], [2], [3], [4]]]),
        ({"num_microbatches": 4}, 2, [[[0], [1]]]),
        ({"num_microbatches": 2, "data_parallel_size": 2}, 8, [[[0, 2], [4, 6]], [[1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "accumulation": 2}, 8, [[[0, 2], [4, 6], [1, 3], [5, 7]]]),
        ({"num_microbatches": 2, "local_replicas": 2}, 8, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        ({"data_parallel_size": 2, "local_replicas": 2, "num_microbatches": 2, "accumulation": 2}, 0, []),
        # Synchronised ranks share a chunk for each accumulation step.
        ({"data_parallel_size": 2, "accumulation": 2, "synchronised": True}, 7, [[[0, 1, 4, 5], [2, 3, 6]]]),
    ],
)
def test_chunks(cut: dict[str, int], num_samples: int, positions: list[list[list[int]]]) -> None:
    found = GhostBatches(**cut).positions(num_samples)
    assert [[chunk.tolist() for chunk in chunks] for chunks in found] == positions


def train_parts(num_ranks: int, *, epoch: int = 0, **settings: object) -> list[list[BatchIds]]:
    """The parts of every rank, by loader step."""
    given = {"num_samples": 1000, "batch_size": 168} | settings
    splits = [Layout(data_parallel_size=num_ranks, data_parallel_rank=rank) for rank in range(num_ranks)]
    samplers = [TrainSampler(**given, layout=split) for split in splits]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    return [list(step) for step in zip(*samplers, strict=True)]


def global_batches(num_ranks: int, *, accumulation: int = 1, **settings: object) -> list[list[int]]:
    """The sorted ids of every optimizer step, over shards and accumulation steps."""
    steps = train_parts(num_ranks, accumulation=accumulation, **settings)
    groups = [steps[i : i + accumulation] for i in range(0, len(steps), accumulation)]
    return [sorted(int(i) for step in group for part in step for i in part.ids) for group in groups]


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_every_global_batch_is_the_same_for_any_number_of_processes(num_ranks: int, accumulation: int) -> None:
    batches = global_batches(num_ranks, accumulation=accumulation, epoch=3)
    assert batches == global_batches(1, epoch=3)
    assert sorted(i for batch in batches for i in batch) == list(range(1000))


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("num_ranks", NUM_RANKS)
def test_weights_turn_the_mean_of_part_means_into_the_mean_over_samples(num_ranks: int, accumulation: int) -> None:
    values = torch.randn(1000, dtype=torch.float64)
    steps = train_parts(num_ranks, accumulation=accumulation)
    parts = [part for step in steps[-accumulation:] for part in step]
    weighted = sum(values[part.ids].mean() * part.weight for part in parts) / len(parts)
    torch.testing.assert_close(weighted, values[torch.cat([part.ids for part in parts])].mean())
    assert all(part.weight == 1.0 for step in steps[:-accumulation] for part in step)


def test_order_is_a_function_of_seed_and_epoch() -> None:
    def order(**settings: int) -> list[list[int]]:
        return [part.ids.tolist() for (part,) in train_parts(1, **settings)]

    assert order(seed=1, epoch=2) == order(seed=1, epoch=2)
    assert order(seed=1, epoch=2) != order(seed=1, epoch=3)
    assert order(seed=1, epoch=2) != order(seed=2, epoch=2)
    assert order(seed=1, epoch=2, frozen=True) == order(seed=1, epoch=0)
    assert order(shuffle=False, epoch=5)[0] == list(range(168))
    assert [len(ids) for ids in order()] == [168] * 5 + [160]
    assert [len(ids) for ids in order(drop_last=True)] == [168] * 5


def sampler_from(start: int, *, accumulation: int = 2) -> TrainSampler:
    """The second of two ranks' sampler, six optimizer steps an epoch, whose epoch 3 begins at `start`."""
    layout, behind = Layout(data_parallel_size=2, data_parallel_rank=1), [start * accumulation, 0]
    settings = {"num_samples": 1000, "batch_size": 168, "layout": layout, "accumulation": accumulation}
    return TrainSampler(**settings, behind=lambda: behind.pop(0))


def ids_of(parts: Iterable[BatchIds | Batch]) -> list[list[int]]:
    return [part.ids.tolist() for part in parts]


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("start", [0, 1, 5, 6])
def test_a_resumed_epoch_is_the_rest_of_the_undisturbed_one(start: int, accumulation: int) -> None:
    whole, rest = sampler_from(0, accumulation=accumulation), sampler_from(start, accumulation=accumulation)
    assert ids_of(rest) == ids_of(replace(whole, epoch=0))  # nobody has entered an epoch
    iter(rest)  # Lightning may call it before
    for sampler in (whole, rest):
        sampler.set_epoch(3)
    parts = [*whole]
    found = [*rest]
    assert ids_of(found) == ids_of(parts)[start * accumulation :]
    assert [part.weight for part in found] == [part.weight for part in parts][start * accumulation :]
    assert len(rest) == len(whole) == 6 * accumulation
    assert ids_of(rest) == ids_of(parts)  # a callback that iterates too
    for sampler in (whole, rest):
        sampler.set_epoch(4)  # also where a limit on the batches of an epoch has left none of the resumed one
    assert ids_of(rest) == ids_of(whole)


def images_of(num: int, size: int = 1) -> ImageSet:
    images = torch.randint(0, 256, (num, 3, size, size), dtype=torch.uint8)
    return ImageSet(images, torch.randint(0, 10, (num,)), ("a",))


@pytest.mark.parametrize("images_at_a_time", [1, 30])
@pytest.mark.parametrize(
    "sampler",
    [
        TrainSampler(num_samples=50, batch_size=12, accumulation=2, layout=SECOND, epoch=3),
        TrainSampler(num_samples=50, batch_size=12, layout=Layout(), drop_last=True),
        EvaluationSampler(num_samples=50, batch_size=12, layout=Layout(data_parallel_size=3, data_parallel_rank=2)),
        # Nothing here.
        EvaluationSampler(num_samples=1, batch_size=12, layout=Layout(data_parallel_size=3, data_parallel_rank=2)),
    ],
)
def test_batches_that_are_made_together_are_those_made_one_by_one(
    images_at_a_time: int, sampler: TrainSampler | EvaluationSampler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lit_cifar.data.loader._BLOCK_ON_HOST", images_at_a_time)
    images, augmentation = images_of(50, size=32), Augmentation(seed=1)
    for batch, (ids, weight, *_) in zip(BatchLoader(images, sampler, augmentation=augmentation), sampler, strict=True):
        draws = augmentation.draw(ids, (32, 32), epoch=sampler.epoch)
        assert batch.images.equal(augmentation(images.images[ids], draws))
        assert batch.labels.equal(images.labels[ids])
        assert batch.ids.equal(ids)
        assert batch.weight == weight


def test_a_gpu_is_asked_a_few_times_in_an_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is resident is augmented in few blocks: no step starts an operator, but for the first of a block."""
    monkeypatch.setattr("lit_cifar.data.loader._BLOCK_ON_HOST", _BLOCK_ON_DEVICE)
    sampler = TrainSampler(num_samples=1000, batch_size=10, layout=Layout())
    loader = iter(BatchLoader(images_of(1000, size=8), sampler, augmentation=Augmentation(seed=1)))
    next(loader)
    with Operators() as operators:
        assert sum(1 for _ in loader) == 99
    assert not operators.counts


@pytest.mark.parametrize(
    ("batch_size", "layout", "accumulation", "cut", "nearest"),
    [
        (128, Layout(data_parallel_size=3), 1, "3 replicas", "126 129"),
        (100, Layout(data_parallel_size=2, local_replicas=4), 1, "8 replicas", "96 104"),
        (2, Layout(data_parallel_size=4), 1, "4 replicas", "4"),
        (100, Layout(num_microbatches=4), 3, "1 replica x 3 accumulation steps x 4 microbatches", "96 108"),
        (9, Layout(num_microbatches=4), 1, "1 replica x 4 microbatches of at least 2 samples", "8 12"),
        (3, Layout(data_parallel_size=2, num_microbatches=4), 1, "2 replicas x 4 microbatches", "16"),
    ],
)
def test_a_batch_that_does_not_divide_names_the_nearest_that_do(
    batch_size: int, layout: Layout, accumulation: int, cut: str, nearest: str
) -> None:
    settings = {"num_samples": 1344, "layout": layout, "accumulation": accumulation}
    with pytest.raises(ConfigError) as error:
        TrainSampler(**settings, batch_size=batch_size).check()
    assert f"does not divide among {cut}" in error.value.problem
    assert error.value.remedy.endswith(" or ".join(f"--data.batch_size={size}" for size in nearest.split()))
    for size in map(int, nearest.split()):
        TrainSampler(**settings, batch_size=size, drop_last=True).check()


@pytest.mark.parametrize(
    ("rest", "layout", "accumulation", "fine"),
    [
        *((rest, Layout(data_parallel_size=2), 1, rest not in (1, 3)) for rest in (0, 4, 3, 1)),
        # 13 samples in chunks of 4 leave one replica a single sample, though 13 is more than 4 x 2.
        *((rest, Layout(local_replicas=4), 1, rest in (14, 8, 9)) for rest in (13, 14, 5, 8, 9, 3)),
        # One sample for each microbatch of four, or too few for all of them.
        *((rest, Layout(num_microbatches=4), 1, rest not in (4, 7)) for rest in (0, 4, 7, 8, 9)),
        *((rest, Layout(num_microbatches=4), 2, rest == 17) for rest in (12, 17)),
        *((rest, Layout(data_parallel_size=2, num_microbatches=4), 1, rest != 15) for rest in (15, 16, 17)),
        (12, Layout(local_replicas=2, num_microbatches=4), 1, False),
    ],
)
def test_every_chunk_needs_two_samples(rest: int, layout: Layout, accumulation: int, fine: bool) -> None:
    settings = {"batch_size": 64, "layout": layout, "accumulation": accumulation}
    TrainSampler(num_samples=64 + rest, **settings, drop_last=True).check()
    with pytest.raises(ConfigError, match="leaves none of 60"):
        TrainSampler(num_samples=60, **settings, drop_last=True).check()
    if fine:
        TrainSampler(num_samples=64 + rest, **settings).check()
        return
    with pytest.raises(ConfigError, match=f"has {rest} of {64 + rest} images for .*; each needs 2") as error:
        TrainSampler(num_samples=64 + rest, **settings).check()
    assert "--data.order.drop_last=true" in error.value.remedy


def eval_ids(num_ranks: int, *, num_samples: int, pad: bool = False) -> list[list[int]]:
    """The ids that the test loader of every rank hands out; asserts that all make equally many steps."""
    found = []
    for rank in range(num_ranks):
        data = CIFAR10DataModule(dataset="synthetic", eval_batch_size=500, order=Order(pad_eval=pad))
        data.sets["test"] = images_of(num_samples)
        split = {"num_replicas": num_ranks, "rank": rank}
        strategy = SimpleNamespace(root_device=torch.device("cpu"), distributed_sampler_kwargs=split)
        data.trainer = SimpleNamespace(strategy=strategy)  # type: ignore[assignment]
        found.append(ids_of(data.test_dataloader()))
    assert len({len(steps) for steps in found}) == 1
    return [[i for step in steps for i in step] for steps in found]


@pytest.mark.parametrize("num_ranks", NUM_RANKS)
@pytest.mark.parametrize("num_samples", [10_000, 1, 5, 501])
def test_evaluation_sees_each_sample_once(num_ranks: int, num_samples: int) -> None:
    ranks = eval_ids(num_ranks, num_samples=num_samples)
    assert ranks == [list(range(rank, num_samples, num_ranks)) for rank in range(num_ranks)]


def test_padded_evaluation_repeats_the_first_samples() -> None:
    ranks = eval_ids(3, num_samples=10_000, pad=True)
    assert [len(ids) for ids in ranks] == [3334, 3334, 3334]
    assert sorted(i for ids in ranks for i in ids) == sorted([*range(10_000), 0, 1])


@short
@pytest.mark.filterwarnings("ignore:You requested to overfit")
@pytest.mark.parametrize(
    ("limit", "alike"),
    [({"overfit_batches": 1}, True), ({"overfit_batches": 0.5}, True), ({"limit_train_batches": 1}, False)],
)
def test_a_run_that_overfits_repeats_the_first_batches(limit: dict[str, float], alike: bool, tmp_path: Path) -> None:
    watch = Watch(tmp_path / "never", -1)
    fit(make("own"), tmp_path, data(eval_batch_size=4), callbacks=[watch], max_epochs=3, **limit)
    assert [ids == [*range(16)] for *_, ids in watch.read] == [alike] * 3
