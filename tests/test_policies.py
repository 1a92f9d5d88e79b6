"""Policies, jitter and erasing beside torchvision's: the same bytes, and draws of the same distribution."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import RandAugment, RandomErasing, TrivialAugmentWide, autoaugment
from torchvision.transforms import functional as F

from lit_cifar.data.augment import Augmentation
from lit_cifar.data.policies import (
    CHANGES,
    NUM_MAGNITUDES,
    ONE,
    WHOLE_TURN,
    Policy,
    changed,
    grouped,
    hue,
    policy_table,
    selected,
)

ALL = Policy(name="rand_augment", num_ops=3, jitter=0.4, hue=0.1, erasing=0.5)
THEIRS = {"trivial_augment_wide": TrivialAugmentWide(), "rand_augment": RandAugment()}
FACTORS: dict[str, Callable[..., Tensor]] = {
    "Brightness": F.adjust_brightness,
    "Color": F.adjust_saturation,
    "Contrast": F.adjust_contrast,
    "Sharpness": F.adjust_sharpness,
}
NAMES = ["Identity", "ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate", *FACTORS]
NAMES += ["Posterize", "Solarize", "AutoContrast", "Equalize"]


def pictures(*, size: int = 32, num: int = 6) -> Tensor:
    """Noise, dark noise, a ramp, one colour, and blurred noise."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (num, 3, size, size), dtype=torch.uint8, generator=generator)
    images[1] //= 5
    images[2] = (torch.arange(size)[:, None] + torch.arange(size)).byte()
    images[3] = torch.tensor([[[7]], [[200]], [[90]]])
    images[4:] = F.gaussian_blur(images[4:], [9, 9])
    return images


def rows_of(policy: str, size: int = 32) -> dict[tuple[str, int, int], Tensor]:
    """The code and the parameters of each operation, magnitude and sign."""
    keys = [(name, k, sign) for name in NAMES for k in range(NUM_MAGNITUDES) for sign in (1, -1)]
    return dict(zip(keys, policy_table(policy, size, size, torch.device("cpu")), strict=True))  # type: ignore[arg-type]


def after(images: Tensor, row: Tensor) -> Tensor:
    rows = row.expand(len(images), -1)
    return changed(images, rows[:, 0], rows[:, 1:])


def magnitude_of(policy: str, name: str, k: int, sign: int, size: int) -> float:
    """As torchvision has it."""
    space = getattr(THEIRS[policy], "_augmentation_space")  # noqa: B009  # it has no public name
    magnitudes, signed = (space(31) if policy == "trivial_augment_wide" else space(31, (size, size)))[name]
    return (sign if signed else 1) * float(magnitudes[k] if magnitudes.ndim else 0)


def theirs_after(images: Tensor, name: str, magnitude: float) -> Tensor:
    return autoaugment._apply_op(images, name, magnitude, F.InterpolationMode.NEAREST, None)


@pytest.mark.parametrize("policy", THEIRS)
@pytest.mark.parametrize("name", NAMES)
def test_operations_are_torchvisions(policy: str, name: str) -> None:
    """All magnitudes and signs, also where torchvision's factor is no multiple of 2**-14: by 1 in few places then."""
    images, rows = pictures(), rows_of(policy)
    before = images.clone()
    for k in range(NUM_MAGNITUDES):
        for sign in (1, -1):
            row, magnitude = rows[name, k, sign], magnitude_of(policy, name, k, sign, 32)
            found, expected = after(images, row), theirs_after(images, name, magnitude)
            if name in FACTORS:
                factor = int(row[1]) / ONE
                assert abs(factor - 1 - magnitude) <= 0.5001 / ONE
                assert largest_difference(found, expected) <= 1
                expected = FACTORS[name](images, factor)
            if policy == "trivial_augment_wide" and "Translate" in name and k == 15:
                expected = theirs_after(images, name, sign * 16)  # its magnitude is 15.999999, and is cut to 15
            if policy == "rand_augment" and "Shear" in name and k in (4, 12, 20, 28):
                # Some rows move by half a pixel. A little less or more in torchvision moves them as a whole.
                less, more = (theirs_after(images, name, magnitude + by) for by in (-1e-5, 1e-5))
                expected = less if found.equal(less) else more
            if name == "Contrast":  # the product with the mean is rounded there
                assert (found != expected).float().mean() < 1e-4
            else:
                assert found.equal(expected), (k, sign)
    assert images.equal(before)


@pytest.mark.parametrize("size", [3, 34, 224])
def test_operations_are_torchvisions_for_other_sizes(size: int) -> None:
    """Of 224, float32 takes the other pixel in a few places that are nearly halfway between two."""
    images = pictures(size=max(size, 9), num=5)[:, :, :size, :size].contiguous()
    for policy in THEIRS:
        rows = rows_of(policy, size)
        for name in NAMES:
            k = 3 if size == 224 else 13
            found = after(images, rows[name, k, -1])
            expected = theirs_after(images, name, magnitude_of(policy, name, k, -1, size))
            share = (found != expected).float().mean()
            assert share < 1e-4 or (name in FACTORS and largest_difference(found, expected) <= 1), (policy, name)


def largest_difference(one: Tensor, other: Tensor) -> int:
    return int((one.int() - other.int()).abs().max())


def test_a_shift_of_the_hue_is_torchvisions_but_for_1() -> None:
    images = pictures()
    for shift in (-WHOLE_TURN // 2, -300, 0, 1, 410, WHOLE_TURN // 2):
        found, expected = hue(images, torch.full((6, 1), shift)), F.adjust_hue(images, shift / WHOLE_TURN)
        assert largest_difference(found, expected) <= 1
        assert (found != expected).float().mean() < 2e-3


def test_jitter_and_erasing_are_torchvisions() -> None:
    """Image by image: three factors and a shift in the order drawn; then the rectangle."""
    images, ids = pictures(num=96), torch.arange(96)
    policy = Policy(jitter=0.4, hue=0.25, erasing=0.5)
    order, *rest = policy.draw(ids, (32, 32), seed=0, epoch=1)
    found = policy(images.clone(), iter([order, *rest]))
    adjustments = [F.adjust_brightness, F.adjust_contrast, F.adjust_saturation, F.adjust_hue]
    units, orders = (ONE, ONE, ONE, WHOLE_TURN), list(torch.cartesian_prod(*[torch.arange(4)] * 4).tolist())
    orders = [each for each in orders if len({*each}) == 4]
    for image, own, *drawn in zip(images, found, order.tolist(), *(row.tolist() for row in rest), strict=True):
        place, amounts, rectangle = drawn[0], drawn[1:5], drawn[5:]
        for which in orders[place]:
            image = adjustments[which](image, amounts[which] / units[which])
        row, column, height, width = rectangle
        image = F.erase(image, row, column, height, width, torch.tensor(0))
        assert (own.int() - image.int()).abs().float().mean() < 0.05
        assert largest_difference(own, image) <= 4  # a difference of 1 in the hue, times other factors


# ---------------------------------------------------------------- what is drawn


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield


def cells_of_torchvision(transform: Any, num: int, patch: pytest.MonkeyPatch) -> list[tuple[str, float]]:
    drawn = []
    patch.setattr(
        autoaugment, "_apply_op", lambda image, name, magnitude, **_: drawn.append((name, magnitude)) or image
    )
    image = torch.zeros(3, 32, 32, dtype=torch.uint8)
    for _ in range(num):
        transform(image)
    return drawn


def cells_of(policy: Policy, num: int) -> list[tuple[str, float]]:
    """Each operation drawn, with torchvision's magnitude, image by image."""
    keys = [
        (name, magnitude_of(str(policy.name), name, *each, 32))
        for name in NAMES
        for each in torch.cartesian_prod(torch.arange(NUM_MAGNITUDES), torch.tensor([1, -1])).tolist()
    ]
    draws = policy.draw(torch.arange(num), (32, 32), seed=3, epoch=5)
    return [keys[place] for place in torch.stack(draws, 1).flatten().tolist()]


def assert_alike(ours: Counter[Any], theirs: Counter[Any]) -> None:
    """The chi-squared statistic of two samples, beyond 4 standard deviations in 1 of 10,000 cases."""
    assert ours.keys() == theirs.keys()
    of_ours, of_theirs = ours.total() ** 0.5, theirs.total() ** 0.5
    statistic = sum(
        (ours[key] * of_theirs / of_ours - theirs[key] * of_ours / of_theirs) ** 2 / (ours[key] + theirs[key])
        for key in ours
    )
    freedom = len(ours) - 1
    assert statistic < freedom + 4.5 * (2 * freedom) ** 0.5


def test_the_draws_of_trivial_augment_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations, magnitudes and signs."""
    theirs = cells_of_torchvision(TrivialAugmentWide(), 12_000, monkeypatch)
    ours = cells_of(Policy(name="trivial_augment_wide"), 50_000)
    assert_alike(Counter(ours), Counter(theirs))
    operations = Counter(name for name, _ in ours)
    assert_alike(operations, Counter(dict.fromkeys(NAMES, 10**7)))


def test_the_draws_of_rand_augment_are_torchvisions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pairs of operations with their signs: the first tells nothing of the second."""
    theirs = cells_of_torchvision(RandAugment(), 12_000, monkeypatch)
    ours = cells_of(Policy(name="rand_augment"), 50_000)
    assert_alike(*(Counter(zip(cells[::2], cells[1::2], strict=True)) for cells in (ours, theirs)))


def test_the_draws_of_jitter_are_uniform() -> None:
    """All orders, and factors over the whole range, independent of each other."""
    order, *amounts = Policy(jitter=0.4, hue=0.1).draw(torch.arange(60_000), (32, 32), seed=0, epoch=0)
    assert_alike(Counter(order.tolist()), Counter(dict.fromkeys(range(24), 10**7)))
    for amount, middle, reach in zip(amounts, (ONE,) * 3 + (0,), (0.4 * ONE,) * 3 + (0.1 * WHOLE_TURN,), strict=True):
        share = (amount - middle) / reach
        assert -1.001 <= share.min() < -0.999
        assert 0.999 < share.max() <= 1.001
        assert_alike(Counter(((share + 1) * 9.99).int().tolist()), Counter(dict.fromkeys(range(20), 10**7)))
    assert (torch.corrcoef(torch.stack([order, *amounts]).float()) - torch.eye(5)).abs().max() < 0.02


@pytest.mark.parametrize("size", [32, 224])
def test_rectangles_are_as_likely_as_torchvisions(size: int) -> None:
    """Their heights, widths, areas and places, by the largest difference between two distributions (Kolmogorov)."""
    num = 6000
    *_, row, column, height, width = Policy(erasing=0.25).draw(torch.arange(4 * num), (size, size), seed=1, epoch=2)
    erased = height > 0
    assert erased.equal(width > 0)
    assert abs(erased.float().mean() - 0.25) < 4 * (0.25 * 0.75 / (4 * num)) ** 0.5
    row, column, height, width = (each[erased] for each in (row, column, height, width))
    assert ((row + height <= size) & (column + width <= size) & (row >= 0) & (column >= 0)).all()
    image = torch.zeros(3, size, size)
    params = [RandomErasing.get_params(image, (0.02, 0.33), (0.3, 3.3), [0.0])[:4] for _ in range(num)]
    theirs = torch.tensor(params).T
    for ours, expected in zip(features(row, column, height, width), features(*theirs), strict=True):
        every = torch.cat([ours, expected]).unique()
        shares = [torch.searchsorted(of.sort().values, every, right=True) / len(of) for of in (ours, expected)]
        assert (shares[0] - shares[1]).abs().max() < 1.95 * (1 / len(ours) + 1 / num) ** 0.5  # exceeded by 1 in 1,000


def features(row: Tensor, column: Tensor, height: Tensor, width: Tensor) -> list[Tensor]:
    return [each.float() for each in (row, column, height, width, height * width, height / width)]


# ---------------------------------------------------------------- the same for each sample, wherever it is


def test_all_images_through_all_changes_and_each_through_its_own_are_the_same() -> None:
    """As on a GPU, and on the CPU. In the first the host waits for nothing: tensors without values would not do."""
    images, ids = pictures(num=300), torch.arange(300)
    rows = torch.stack([*rows_of("trivial_augment_wide").values()])[torch.randperm(868)[:300]]
    assert grouped(images, rows[:, 0], rows[:, 1:], CHANGES).equal(selected(images, rows[:, 0], rows[:, 1:], CHANGES))
    augmentation = Augmentation(seed=0, policy=ALL, cutout=4)
    draws = augmentation.draw(ids.to("meta"), (32, 32), epoch=0)
    assert augmentation(images.to("meta"), draws).shape == images.shape


@pytest.mark.parametrize(
    "settings",
    [
        {"cutout": 8},
        {"cutout": 8, "resized_to": 24},
        *({"policy": each} for each in (Policy(name="trivial_augment_wide"), ALL, Policy(hue=0.5), Policy(erasing=1))),
    ],
)
def test_a_sample_is_augmented_alike_in_any_block_and_otherwise_in_another_epoch(settings: dict[str, Any]) -> None:
    images, ids = pictures(num=64), torch.randperm(64)

    def made(ids: Tensor, *, seed: int = 4, epoch: int = 2) -> Tensor:
        augmentation = Augmentation(seed=seed, **settings)
        return augmentation(images[ids], augmentation.draw(ids, (32, 32), epoch=epoch))

    whole = made(ids)
    for num_parts in (2, 5, 64):
        for part in ids.chunk(num_parts):
            assert made(part).equal(whole[torch.isin(ids, part)])
    assert made(ids.flip(0)).equal(whole.flip(0))
    assert not made(ids, epoch=3).equal(whole)
    assert not made(ids, seed=5).equal(whole)
    assert made(ids[:0]).shape == whole[:0].shape
