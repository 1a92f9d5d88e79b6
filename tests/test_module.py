"""The training task by itself and under a plain Trainer, without the command line."""

import copy
import pickle
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from counting import Operators
from lightning.pytorch.cli import ReduceLROnPlateau as OwnPlateau
from short_fits import data, fit, short
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau, StepLR
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from lit_cifar import CIFAR10DataModule, LitResNet, MuonSGD, WarmupDecay
from lit_cifar.data import Augment, Batch
from lit_cifar.data.augment import Augmentation
from lit_cifar.errors import ConfigError
from lit_cifar.models import Whitening
from lit_cifar.task.metrics import EvaluationMetrics, MeanLoss
from lit_cifar.task.optim import NesterovSGD, keep_saved_types
from lit_cifar.task.optimization import RateScaling

pytestmark = short
images_of = partial(data, num_train=96, num_test=40, val_size=16)


@pytest.mark.parametrize(("num_classes", "dtype"), [(3, torch.float32), (10, torch.float64), (10, torch.bfloat16)])
def test_metrics_are_those_of_torchmetrics_bit_for_bit(num_classes: int, dtype: torch.dtype) -> None:
    """On batches with ties, an empty one, and a class without samples."""
    theirs = MetricCollection(
        {
            "val/acc": MulticlassAccuracy(num_classes, average="micro"),
            "val/acc_top5": MulticlassAccuracy(num_classes, average="micro", top_k=min(5, num_classes)),
            "confusion": MulticlassConfusionMatrix(num_classes),
        },
        compute_groups=False,  # else those whose counts of the first batch are equal are taken for the same
    )
    metrics, generator = EvaluationMetrics("val", num_classes), torch.Generator().manual_seed(0)
    losses = []
    for size in (1, 64, 0, 7):
        logits = torch.randint(0, 5, (size, num_classes), generator=generator).float()
        labels = torch.randint(0, num_classes - 1, (size,), generator=generator)
        losses.append((logits[:, 0] / 7).to(dtype))
        with Operators() as operators:
            metrics.update(logits, labels, losses[-1])
        assert not operators.waits  # the host waits for no batch
        if size:
            theirs.update(logits, labels)
    torch.testing.assert_close(metrics.loss.compute(), torch.cat(losses).double().mean().float())
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for truth, prediction, count in metrics.confusion.compute().tolist():
        confusion[truth, prediction] = count
    ours = metrics.scores.compute() | {"confusion": confusion}
    for name, expected in theirs.compute().items():
        assert ours[name].dtype == expected.dtype
        assert ours[name].equal(expected), name
    right, samples = confusion.diagonal(), confusion.sum(dim=1)
    each = (right / samples)[samples > 0]
    torch.testing.assert_close(ours["val/acc_balanced"], each.mean())  # as scikit-learn defines it
    for name in ("val/acc", "val/acc_top5"):
        metric = metrics.scores[name]
        for state in ("tp", "fn"):  # `verify` counts samples by them
            assert getattr(metric, state).equal(getattr(theirs[name], state)), name


def test_metrics_of_ten_thousand_classes_take_less_than_5_mb() -> None:
    """With all that they keep: their states, their defaults, and the samples of the confusion matrix."""
    module = LitResNet("tiny", stem="imagenet", num_classes=10_000)
    for labels in torch.arange(1_000).split(500):
        module.val_metrics.update(torch.eye(500, 10_000), labels, torch.ones(500))
    metrics = [metric for metric in module.modules() if isinstance(metric, Metric)]
    kept = [value for metric in metrics for value in (*metric.metric_state.values(), *metric._defaults.values())]
    assert sum(tensor.nbytes for value in kept for tensor in (value if isinstance(value, list) else [value])) < 5e6


def test_a_process_that_evaluates_no_image_sends_integers() -> None:
    metrics = EvaluationMetrics("val", 3)
    metrics.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert metrics.confusion.compute().equal(torch.zeros(0, 3, dtype=torch.int64))


@pytest.mark.parametrize(("scaling", "factor"), [("none", 1.0), ("linear", 4.0), ("sqrt", 2.0)])
def test_the_rate_follows_the_batch_and_the_schedule_the_run(tmp_path: Path, scaling: Any, factor: float) -> None:
    rule = RateScaling(rule=scaling, base_batch_size=4)
    module = LitResNet("tiny", stem="imagenet", rate_scaling=rule, lr_scheduler=WarmupDecay)
    settings = {"max_epochs": 2, "accumulate_grad_batches": 2, "limit_val_batches": 0}
    run = fit(module, tmp_path, images_of(), **settings)
    assert run.optimizers[0].param_groups[0]["initial_lr"] == pytest.approx(0.2 * factor)
    assert run.global_step == run.lr_scheduler_configs[0].scheduler.total_steps == 10


def test_a_plateau_follows_its_metric(tmp_path: Path) -> None:
    for plateau, metric in ((partial(OwnPlateau, monitor="train/loss"), "train/loss"), (ReduceLROnPlateau, "val/loss")):
        module = LitResNet("tiny", stem="imagenet", lr_scheduler=plateau)
        assert fit(module, tmp_path, max_epochs=1).lr_scheduler_configs[0].monitor == metric


def batches_of(images: CIFAR10DataModule, augmentation: Augmentation, *, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Augmented and normalised, float64, and their labels."""
    train, order = images.sets["train"], images.train_sampler()
    mean, std = (torch.tensor(values)[:, None, None] for values in (images.source.mean, images.source.std))
    order.set_epoch(epoch)
    for ids, *_ in order:
        pixels = augmentation(train.images[ids], augmentation.draw(ids, (32, 32), epoch=epoch)).float()
        yield ((pixels - 255 * mean) / (255 * std)).double(), train.labels[ids]


def test_a_recipe_takes_the_steps_of_a_plain_loop(tmp_path: Path) -> None:
    """Muon a matrix at a time, as airbench94 writes it, and a rate that rises for 3 of 15 steps, then falls to 0.

    The last batch of an epoch is ragged.
    """
    torch.manual_seed(0)
    module = LitResNet("tiny", stem="imagenet", zero_init_residual=True, label_smoothing=0.2, optimizer=MuonSGD)
    module.optimization.make_lr_scheduler = partial(WarmupDecay, warmup=0.2, decay="linear")
    plain = copy.deepcopy(module.network).double()
    images = images_of(batch_size=32, augment=Augment(reflect=True, alternate_flips=True))
    fit(module, tmp_path, images, precision="64-true", max_epochs=5)

    filters = {weight: torch.zeros_like(weight) for weight in plain.parameters() if weight.ndim == 4}
    vectors = [weight for weight in plain.parameters() if weight.ndim < 4]
    others = SGD(vectors, lr=0.3, momentum=0.9, weight_decay=5e-4, nesterov=True)
    rates = iter([0.25, 0.5, 0.75, *((12 - step) / 12 for step in range(12))])
    for epoch in range(5):
        for pixels, labels in batches_of(images, Augmentation(seed=0, reflect=True, alternate_flips=True), epoch=epoch):
            rate = next(rates)
            plain.zero_grad()
            F.cross_entropy(plain(pixels), labels, label_smoothing=0.2).backward()
            others.param_groups[0]["lr"] = 0.3 * rate
            others.step()
            for weight, momentum in filters.items():
                momentum.mul_(0.9).add_(weight.grad)
                direction = (weight.grad + 0.9 * momentum).flatten(1)
                tall = len(direction) > direction.shape[1]
                found = (direction.T if tall else direction) / direction.norm().clamp_min(1e-7)
                for _ in range(3):
                    gram = found @ found.T
                    found = 3.4445 * found + (-4.7750 * gram + 2.0315 * gram @ gram) @ found
                weight.data.mul_(len(weight) ** 0.5 / weight.data.norm())
                weight.data.sub_(0.05 * rate * (found.T if tall else found).view_as(weight))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(module.network.state_dict()[name].to(value), value, rtol=1e-9, atol=1e-9)


def test_the_split_is_seeded_and_disjoint() -> None:
    first, again = (images_of(seed=0) for _ in range(2))
    for module in (first, again):
        module.setup("fit")
    train, val = (first.sets[name].images for name in ("train", "val"))
    assert (len(train), len(val)) == (80, 16)
    assert train.equal(again.sets["train"].images)
    assert len(torch.cat([train, val]).flatten(1).unique(dim=0)) == 96


def test_what_is_sent_to_spawned_processes(tmp_path: Path) -> None:
    """Defaults and weights, but not the images, and no metric that counts in shared memory."""
    module, images = LitResNet("tiny", stem="imagenet"), data()
    copied = pickle.loads(pickle.dumps(module))
    optimizer = copied.optimization.make_optimizer(copied.network.parameters())
    assert type(optimizer) is NesterovSGD
    assert type(copied.optimization.make_lr_scheduler(optimizer)) is WarmupDecay
    assert copied.network.conv1.weight.equal(module.network.conv1.weight)
    images.setup("fit")
    assert pickle.loads(pickle.dumps(images)).sets == {}
    module.train_loss.count.share_memory_()  # as torch.multiprocessing sends it
    fit(module, tmp_path, images, max_steps=1, limit_val_batches=0)
    assert not module.train_loss.count.is_shared()


def test_the_data_are_read_without_a_trainer(tmp_path: Path) -> None:
    """As a notebook does; the batches are those of a run on one device."""
    alone, of_run = images_of(), images_of()
    alone.prepare_data()
    for stage in ("fit", "test"):
        alone.setup(stage)
    fit(LitResNet("tiny", stem="imagenet"), tmp_path, of_run)
    loader = alone.train_dataloader()
    assert alone.sets["train"].images.data_ptr() == loader.images.images.data_ptr()  # no copy is made
    for found, expected in zip(loader, of_run.train_dataloader(), strict=True):
        assert found.ids.equal(expected.ids)
        assert found.images.equal(expected.images)
    assert sum(len(batch.labels) for batch in alone.val_dataloader()) == 16
    assert sum(len(batch.labels) for batch in alone.test_dataloader()) == 40
    assert alone.on_after_batch_transfer(found, 0).images.dtype == torch.float32


def test_an_image_and_its_mirror_image_are_evaluated() -> None:
    module, images = LitResNet("tiny", stem="imagenet", test_views=2).eval(), torch.randn(3, 3, 32, 32)
    expected = (module(images) + module(images.flip(3))) / 2
    batch = Batch(images, *[torch.arange(3)] * 2, 1.0)
    torch.testing.assert_close(module.predict_step(batch, 0), expected.softmax(1))
    with torch.autocast("cpu", torch.bfloat16):
        assert module.predict_step(batch, 0).dtype == torch.float32
    assert not torch.allclose(module(images), expected)


def test_blocks_may_begin_as_the_identity() -> None:
    module = LitResNet("tiny", stem="imagenet", zero_init_residual=True)
    last = [norm.weight for name, norm in module.network.named_modules() if name.endswith("bn2")]
    assert len(last) == 4
    assert not torch.cat(last).any()
    with pytest.raises(ConfigError, match="vit_micro is none"):
        LitResNet("vit_micro", zero_init_residual=True)
    with pytest.raises(ConfigError, match="zero_init_residual=True: that is about another"):
        LitResNet(network=module.network, zero_init_residual=True)


def test_filters_follow_from_the_training_images_once(tmp_path: Path) -> None:
    """Of a fit they are those of the images that it trains on; filters that are there already stay."""
    module, images = LitResNet("fast"), images_of()
    fit(module, tmp_path, images, max_steps=1)
    expected = Whitening()
    batch = Batch(images.sets["train"].images, torch.arange(80), torch.arange(80), 1.0)
    expected.whiten(images.on_after_batch_transfer(batch, 0).images)
    found = module.network.state_dict()["whitening.conv.weight"]
    assert found.equal(expected.conv.weight)
    assert module.network.state_dict()["whitening.conv.bias"].any()
    before = found.clone()
    fit(module, tmp_path, images_of(seed=1), max_steps=1)
    assert found.equal(before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("optimizer", ["NAdam", "ASGD", "AdamW"])
def test_a_loaded_optimizer_rounds_as_before(optimizer: str, dtype: torch.dtype) -> None:
    def start() -> tuple[torch.Tensor, torch.optim.Optimizer]:
        weight = torch.linspace(-1, 1, 9, dtype=dtype).requires_grad_()
        made = getattr(torch.optim, optimizer)([weight], lr=0.01)
        keep_saved_types(made)
        return weight, made

    def train(weight: torch.Tensor, made: torch.optim.Optimizer) -> None:
        for _ in range(3):
            weight.grad = (weight**2).detach() + 0.1
            made.step()

    (weight, whole), (other, resumed) = start(), start()
    train(weight, whole)
    other.data.copy_(weight.data)
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    train(weight, whole)
    train(other, resumed)
    found, expected = [other, resumed.state_dict()["state"]], [weight, whole.state_dict()["state"]]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("made", "times"),
    [
        (partial(OneCycleLR, max_lr=0.3, total_steps=4), 4),
        (partial(CyclicLR, base_lr=0.1, max_lr=0.3, step_size_up=3), 4),
        (partial(StepLR, step_size=1), 2),
    ],
)
def test_a_schedule_that_is_made_for_steps_steps_with_the_optimizer(made: Any, times: int, tmp_path: Path) -> None:
    """Not with batches that are accumulated, and not with epochs, as another does."""
    optimizer = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    model = LitResNet("tiny", stem="imagenet", optimizer=optimizer, lr_scheduler=made)
    trainer = fit(model, tmp_path, max_epochs=2, accumulate_grad_batches=2)
    plain = made(optimizer([nn.Parameter(torch.zeros(1))]))
    for _ in range(times):
        plain.optimizer.step()
        plain.step()
    assert trainer.global_step == 4
    assert trainer.optimizers[0].param_groups[0]["lr"] == plain.get_last_lr()[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_sum_of_losses_stays_wide_in_a_narrow_module(dtype: torch.dtype) -> None:
    """As `bf16-true` and `16-true` make it. In float16 the sum would be infinite, in bfloat16 it would end growing."""
    for metric in (MeanLoss(), MeanMetric().set_dtype(torch.float64)):
        LitResNet(network=nn.Sequential(metric)).to(dtype)
        for _ in range(2):
            for _ in range(1000):
                metric.update(torch.full((128,), 1.75))
            assert float(metric.compute()) == pytest.approx(1.75, rel=1e-3)
            metric.reset()
