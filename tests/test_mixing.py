"""Mixup, CutMix, weights of classes and balanced epochs: functions of (seed, epoch, step), the same on any number of
processes, beside the formulas of their papers.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from commands import MIXED, TINY, mode_flags, run_here
from test_exact_resume import EVERY_STEP, assert_same_end, stop_after
from torch import Tensor
from torch.nn import functional as F

from lit_cifar import LitResNet
from lit_cifar.checkpoint.sample_audit import FILE_NAME
from lit_cifar.data.augment import Augmentation
from lit_cifar.data.images import Batch, ImageSet
from lit_cifar.data.loader import BatchLoader
from lit_cifar.data.mixing import Mix, Mixing, soft_targets
from lit_cifar.data.samplers import TrainSampler
from lit_cifar.mode import Layout

NUM_CLASSES = 4
BOTH = Mixing(mixup=0.4, cutmix=1.0)
WEIGHTS = torch.tensor([1.0, 2.0, 5.0, 0.5])


def images() -> ImageSet:
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (44, 3, 8, 8), dtype=torch.uint8, generator=generator)
    return ImageSet(pixels, torch.randint(0, NUM_CLASSES, (44,), generator=generator), tuple("abcd"))


def steps(num_ranks: int = 1, accumulation: int = 1, *, mixing: Mixing | None = BOTH) -> list[list[Batch]]:
    """The parts of each optimizer step of an epoch of six, the last of which is ragged."""
    loaders = []
    for rank in range(num_ranks):
        layout = Layout(data_parallel_size=num_ranks, data_parallel_rank=rank)
        sampler = TrainSampler(num_samples=44, batch_size=8, layout=layout, accumulation=accumulation, seed=3, epoch=2)
        augmentation = Augmentation(seed=1, padding=2)
        loaders.append(BatchLoader(images(), sampler, augmentation=augmentation, mixing=mixing, class_weights=WEIGHTS))
    turns = list(zip(*loaders, strict=True))
    return [[part for turn in turns[i : i + accumulation] for part in turn] for i in range(0, len(turns), accumulation)]


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(2, 1), (4, 1), (2, 2), (1, 4)])
def test_every_image_and_target_is_that_of_one_process(num_ranks: int, accumulation: int) -> None:
    for (whole,), parts in zip(steps(), steps(num_ranks, accumulation), strict=True):
        place = torch.cat([part.ids for part in parts]).argsort()
        expected = whole.ids.argsort()
        for name in ("ids", "images", "labels", "soft_targets"):
            found = torch.cat([getattr(part, name) for part in parts])[place]
            assert found.equal(getattr(whole, name)[expected]), name


def test_a_step_mixes_each_image_with_the_one_before_it() -> None:
    plain, mixed = steps(mixing=None), steps()
    kinds = set()
    for step, ((before,), (after,)) in enumerate(zip(plain, mixed, strict=True)):
        mix = BOTH.draw(3, epoch=2, step=step, size=(8, 8))
        kinds.add(mix.box is None)
        own, other = before.images.float(), before.images.roll(1, 0).float()
        if mix.box is None:
            expected = mix.share * own + (1 - mix.share) * other
        else:
            inside = torch.zeros(8, 8, dtype=torch.bool)
            inside[mix.box] = True
            assert mix.share == 1 - inside.float().mean()
            expected = torch.where(inside, other, own)
        assert (after.images.float() - expected).abs().max() <= 0.5
        assert after.labels.equal(before.labels if mix.share >= 0.5 else before.labels.roll(1))
    assert kinds == {True, False}


def test_shares_are_drawn_from_a_beta_distribution() -> None:
    """Its mean is 1/2, and its variance 1 / (4 * (2 * parameter + 1)); CutMix clips rectangles at the border."""
    for parameter in (0.2, 1.0, 4.0):
        drawn = [Mixing(mixup=parameter).draw(0, epoch=0, step=step, size=(32, 32)) for step in range(4000)]
        shares = torch.tensor([mix.share for mix in drawn])
        assert shares.mean() == pytest.approx(0.5, abs=0.02)
        assert shares.var() == pytest.approx(1 / (4 * (2 * parameter + 1)), rel=0.05)
    ways = [BOTH.draw(3, epoch=0, step=step, size=(32, 32)).box is None for step in range(4000)]
    assert sum(ways) / 4000 == pytest.approx(0.5, abs=0.03)
    cut = [Mixing(cutmix=1.0).draw(0, epoch=0, step=step, size=(32, 32)) for step in range(4000)]
    centres, sides = torch.rand(2, 100_000), torch.rand(100_000).sqrt()  # the same without a grid of pixels
    inside = ((centres + sides / 2).clamp(max=1) - (centres - sides / 2).clamp(min=0)).prod(0)
    assert torch.tensor([mix.share for mix in cut]).mean() == pytest.approx(1 - inside.mean().item(), abs=0.03)


def test_shares_at_their_ends() -> None:
    own, other = images().images[:8], images().images[8:16]
    for share, expected in ((0.0, other), (1.0, own)):
        torch.testing.assert_close(Mix(share)(own, other), expected, rtol=0, atol=0)


def network(label_smoothing: float = 0.0) -> LitResNet:
    return LitResNet("tiny", num_classes=NUM_CLASSES, image_size=8, label_smoothing=label_smoothing)


def mean_loss(logits: Tensor, parts: list[Batch], module: LitResNet) -> Tensor:
    """As training computes it: the mean over replicas and accumulation steps, of logits by sample."""
    return sum(module.loss(logits[part.ids], part.targets).mean() * part.weight for part in parts) / len(parts)


@pytest.mark.parametrize(("num_ranks", "accumulation"), [(1, 1), (2, 1), (4, 1), (2, 2)])
def test_weights_are_those_of_the_global_batch(num_ranks: int, accumulation: int) -> None:
    """Torch's mean is weighted alike on one device; the mean of its means over the parts is another number."""
    logits, worst = torch.randn(44, NUM_CLASSES, generator=torch.Generator().manual_seed(1)), 0.0
    for parts in steps(num_ranks, accumulation, mixing=None):
        ids = torch.cat([part.ids for part in parts])
        whole = F.cross_entropy(logits[ids], images().labels[ids], weight=WEIGHTS)
        torch.testing.assert_close(mean_loss(logits, parts, network()), whole)
        each = [F.cross_entropy(logits[part.ids], part.labels, weight=WEIGHTS) * part.weight for part in parts]
        worst = max(worst, float((sum(each) / len(each) - whole).abs()))
    assert worst == pytest.approx(0, abs=1e-6) if num_ranks * accumulation == 1 else worst > 0.05


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_a_mixed_loss_is_that_of_both_labels(smoothing: float) -> None:
    """And the loss of an image that is not mixed that of its own."""
    module, logits, labels = network(smoothing), torch.randn(44, NUM_CLASSES), images().labels
    others = labels.roll(1)
    of_own, of_others = (module.loss(logits, each) for each in (labels, others))
    for mix, expected in ((None, of_own), (Mix(0.3), 0.3 * of_own + 0.7 * of_others)):
        soft = soft_targets(mix, labels, others, num_classes=NUM_CLASSES, weights=None, whole=None)
        torch.testing.assert_close(module.loss(logits, soft), expected)
        assert module.loss(logits.bfloat16(), soft).dtype == torch.float32  # shares are not rounded to bfloat16


def test_classes_are_drawn_equally_often_and_their_samples_in_turn() -> None:
    """Of 3, 1, 0 and 40 samples of four classes."""
    labels = torch.tensor([0] * 3 + [1] + [3] * 40)[torch.randperm(44, generator=torch.Generator().manual_seed(2))]
    sampler, orders = TrainSampler(num_samples=44, batch_size=8, layout=Layout(), balanced=labels), []
    for epoch in range(6):
        sampler.set_epoch(epoch)
        orders.append(sampler.order())
        times = torch.bincount(orders[-1], minlength=44)
        by_class = torch.stack([times[labels == label].sum() for label in (0, 1, 3)])
        assert by_class.sum() == 44
        assert by_class.max() - by_class.min() == 1
        assert all(times[labels == label].max() - times[labels == label].min() <= 1 for label in (0, 1, 3))
        assert sampler.order().equal(orders[-1])
        assert len(sampler.keys().unique()) == 44  # repeats are augmented anew
        assert (sampler.keys() < 44).sum() == (times > 0).sum()
    assert len({tuple(order.tolist()) for order in orders}) == 6
    of_frequent = torch.cat(orders)[labels[torch.cat(orders)] == 3].unique()
    assert len(of_frequent) > 30  # which of them are left out differs between epochs
    assert not replace(sampler, seed=1).order().equal(orders[0])


ALL = [*TINY, *MIXED, "--model.label_smoothing=0.1", "--trainer.max_epochs=2"]


def test_a_stopped_run_ends_as_the_undisturbed_one(tmp_path: Path) -> None:
    """Stopped in the second epoch, within which samples are used twice."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    fitting = ["fit", *ALL, *mode_flags("single"), "--trainer.num_sanity_val_steps=0", EVERY_STEP]
    run_here(*fitting, f"--run_dir={whole}")
    assert run_here(*fitting, f"--run_dir={parts}", *stop_after(7), check=False).status == 143
    run_here(*fitting, f"--run_dir={parts}", "--resume=auto")
    assert_same_end(parts, whole)
    assert (parts / FILE_NAME).read_text() == (whole / FILE_NAME).read_text()
