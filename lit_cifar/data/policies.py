"""Augmentation by policy, colour jitter and random erasing of many uint8 images at once.

Operations and ranges are those of torchvision.transforms, `TrivialAugmentWide` (Mueller and Hutter, 2021,
https://arxiv.org/abs/2103.10158), `RandAugment` (Cubuk et al., 2019, https://arxiv.org/abs/1909.13719), `ColorJitter`
and `RandomErasing` (Zhong et al., 2017, https://arxiv.org/abs/1708.04896), as they treat uint8 tensors, with black
around moved images. Pixels are integer work: the CPU and the GPU give the same bytes.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import permutations
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from lit_cifar.data.counter_rng import Purpose, keyed_integers

PolicyName = Literal["trivial_augment_wide", "rand_augment"]

NUM_OPERATIONS = 14
NUM_MAGNITUDES = 31  # of an operation, torchvision's default
ONE = 1 << 14  # the factor 1.0: with multiples of 2**-14 the float32 of torchvision is exact, and gives the same bytes
WHOLE_TURN = 1 << 12  # of the hue


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What befalls images after crop and flip: operations, then colour jitter, then a black rectangle.

    torchvision's references erase after normalisation, where 0 is the mean colour; here it is black.
    """

    name: PolicyName | None = None
    num_ops: int = 2  # operations on each image; TrivialAugment has one
    magnitude: int = 9  # strength of all operations, in `range(NUM_MAGNITUDES)`; TrivialAugment draws it
    jitter: float = 0.0  # brightness, contrast and saturation are times 1 - jitter to 1 + jitter
    hue: float = 0.0  # largest shift of the hue, as a share of the colour circle, at most 0.5
    erasing: float = 0.0  # probability of a rectangle

    def draw(self, ids: Tensor, size: Sequence[int], *, seed: int, epoch: int) -> list[Tensor]:
        """Draws in `epoch` of the samples `ids` (int64, (n,)), images of `size` (height, width).

        Returns:
            Tensors (int64, (n,)) for `__call__`: the row of the table for each operation; order, three factors and
            shift of the jitter; first row and column, height and width of the rectangle, 0 without one.
        """
        keyed = partial(keyed_integers, seed=seed, epoch=epoch)
        draws = []
        for place in range(self._num_ops):
            of_place = ids * self._num_ops + place
            operation = keyed(of_place, NUM_OPERATIONS, purpose=Purpose.OPERATION)
            magnitude = keyed(of_place, NUM_MAGNITUDES, purpose=Purpose.MAGNITUDE)
            if self.name == "rand_augment":
                magnitude = torch.full_like(magnitude, self.magnitude)
            sign = keyed(of_place, 2, purpose=Purpose.SIGN)
            draws.append((operation * NUM_MAGNITUDES + magnitude) * 2 + sign)
        if jitter := self._jitter:
            draws.append(keyed(ids, math.factorial(len(jitter)), purpose=Purpose.JITTER_ORDER))
            for place, (least, most) in enumerate(jitter.values()):
                drawn = keyed(len(jitter) * ids + place, most - least + 1, purpose=Purpose.JITTER)
                draws.append(drawn + least)
        if self.erasing:
            height, width = size
            sizes = _erased_sizes(height, width, ids.device)
            erased = keyed(ids, 2**31, purpose=Purpose.ERASED) < round(self.erasing * 2**31)
            down, across = (sizes[keyed(ids, len(sizes), purpose=Purpose.ERASED_SIZE)] * erased[:, None]).T
            row = keyed(ids, height + 1 - down, purpose=Purpose.ERASED_ROW)
            draws += [row, keyed(ids, width + 1 - across, purpose=Purpose.ERASED_COLUMN), down, across]
        return draws

    @property
    def _num_ops(self) -> int:
        return {"trivial_augment_wide": 1, "rand_augment": self.num_ops, None: 0}[self.name]

    @property
    def _jitter(self) -> dict["Change", tuple[int, int]]:
        """The changes of the jitter, in the order of `CHANGES`, with the least and the largest parameter."""
        factor, shift = round(self.jitter * ONE), round(self.hue * WHOLE_TURN)
        factors = dict.fromkeys([brightness, contrast, saturation] * bool(factor), (ONE - factor, ONE + factor))
        return factors | dict.fromkeys([hue] * bool(shift), (-shift, shift))

    def __call__(self, images: Tensor, draws: Iterator[Tensor]) -> Tensor:
        """The `images` (uint8, (n, 3, H, W), changed in place) after the next of the `draws`."""
        for _ in range(self._num_ops):
            assert self.name is not None
            rows = policy_table(self.name, *images.shape[2:], images.device).index_select(0, next(draws))
            images = changed(images, rows[:, 0], rows[:, 1:])
        if jitter := [*self._jitter]:
            order = _orders(len(jitter), images.device).index_select(0, next(draws))
            amounts = torch.stack([next(draws) for _ in jitter], 1)
            for which in order.T:
                codes = which + CHANGES.index(jitter[0])
                images = changed(images, codes, amounts.gather(1, which[:, None]), jitter)
        if self.erasing:
            erase(images, next(draws), next(draws), next(draws), next(draws))
        return images


def erase(images: Tensor, rows: Tensor, columns: Tensor, heights: Tensor, widths: Tensor) -> None:
    """Blacken a rectangle of each of the `images`, in place; it may reach over the border. Others are int64, (n,)."""
    inside = []
    for start, length, side in (rows, heights, images.shape[2]), (columns, widths, images.shape[3]):
        pixels = torch.arange(side, device=images.device)
        inside.append((pixels >= start[:, None]) & (pixels < (start + length)[:, None]))
    down, across = inside
    images.mul_(~(down[:, :, None] & across[:, None, :])[:, None])


@cache
def _erased_sizes(height: int, width: int, device: torch.device) -> Tensor:
    """Heights and widths of rectangles in an image, int64, (k, 2), all equally likely.

    They have 0.02 to 0.33 of its area, and a ratio from 0.3 to 3.3. As for `augment._window_sizes` height and width are
    uniform; they are rounded from a grid that is finer than pixels, because the rectangles may be small.
    """
    finer = 2 * max(1, 128 // max(height, width))  # even, so that no half is rounded
    sides = [2 * torch.arange(finer * side) + 1 for side in (height, width)]  # unit: a pixel / (2 * finer)
    downs, across = torch.cartesian_prod(*sides).T
    area, whole = 100 * downs * across, 4 * finer * finer * height * width
    fits = (area >= 2 * whole) & (area <= 33 * whole) & (10 * downs >= 3 * across) & (10 * downs <= 33 * across)
    sizes = (torch.stack([downs, across], 1)[fits] + finer) // (2 * finer)
    smaller = (sizes < torch.tensor([height, width])).all(1)
    return sizes[smaller].to(device)


# ---------------------------------------------------------------- what is done to images

# Each takes images (uint8, (n, 3, H, W)) and parameters (int64, (n, k)), and returns the images after it. torchvision's
# operation gives the same bytes for the same parameters, unless a difference is named.


def identity(images: Tensor, _: Tensor) -> Tensor:
    return images


def affine(images: Tensor, parameters: Tensor) -> Tensor:
    """Shear, translate or rotate: a pixel is the one nearest to its place before, black if that is outside.

    Parameters are those of `_moved`. Where the place is halfway between two pixels, torchvision takes the even one, so
    that some pixels of a row that is moved by half a pixel are there twice, and others not; here the row stays whole.
    """
    height, width = images.shape[2:]
    across, down = (2 * torch.arange(length, device=images.device) + 1 for length in (width, height))
    of_column, of_row, shift = parameters.reshape(-1, 2, 3, 1).unbind(2)  # each (n, 2, 1), for columns and for rows
    of_column, of_row = (of_column * across).int()[:, :, None, :], (of_row * down + shift).int()[:, :, :, None]
    bits = _place_bits(height, width)
    columns, rows = (
        (of_column[:, dim] + of_row[:, dim]).bitwise_right_shift_(bits).clamp_(-1, length)
        for dim, length in enumerate((width, height))
    )
    # The same place in each channel, among all images with a black border.
    pixels, shape = (height + 2) * (width + 2), (len(images), height, width)
    first = 3 * pixels * torch.arange(len(images), dtype=torch.int32, device=images.device) + width + 3
    places = columns.add_(rows, alpha=width + 2).add_(first[:, None, None]).flatten()
    padded = F.pad(images, [1] * 4).flatten()
    return torch.stack([padded[pixels * c :].index_select(0, places).view(shape) for c in range(3)], 1)


def sharpness(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with a mean over 3 x 3 pixels, in which the middle one counts five times; the border stays."""
    wide = images.short()
    rows = wide[:, :, :-2] + wide[:, :, 1:-1] + wide[:, :, 2:]
    sums = rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:]
    sums.add_(wide[:, :, 1:-1, 1:-1], alpha=4)
    smooth = sums.int().add_(6).mul_(5042).bitwise_right_shift_(16)  # a thirteenth of sums up to 3,315, rounded
    made = images.clone()
    made[:, :, 1:-1, 1:-1] = _blend(images[:, :, 1:-1, 1:-1], factors, smooth.mul_(ONE - _of_image(factors)))
    return made


def posterize(images: Tensor, masks: Tensor) -> Tensor:
    return images & _of_image(masks).byte()


def solarize(images: Tensor, thresholds: Tensor) -> Tensor:
    """Invert what is not below the threshold."""
    return images ^ -(images >= _of_image(thresholds).byte()).byte()


def autocontrast(images: Tensor, _: Tensor) -> Tensor:
    """Stretch each channel to the full range."""
    low, high = (edge(images.flatten(2), 2).int()[..., None, None] for edge in (torch.amin, torch.amax))
    ranges = high - low
    places = images.int().add_(256 * ranges - low * (ranges > 0))
    return _stretched(images.device).index_select(0, places.flatten()).view(images.shape)


@cache
def _stretched(device: torch.device) -> Tensor:
    """What `autocontrast` makes of a value above the least, by range and value: uint8, (256 * 256,).

    Made by the operations of torchvision in float32, which take 1 from 39 values. A range of 0 leaves values as they
    are.
    """
    values = torch.arange(256.0)
    table = (values * (255 / values[:, None])).nan_to_num(0, 0, 0).clamp(0, 255)
    table[0] = values
    return table.byte().flatten().to(device)


def equalize(images: Tensor, _: Tensor) -> Tensor:
    """Let each channel have as many pixels of each value, as far as equal pixels stay equal."""
    channels = images.flatten(0, 1).flatten(1)
    places = channels.long().add_(256 * torch.arange(len(channels), device=images.device)[:, None]).flatten()
    counts = torch.zeros(256 * len(channels), dtype=torch.int32, device=images.device)
    one = torch.ones((), dtype=torch.int32, device=images.device)
    counts = counts.scatter_add_(0, places, one.expand(len(places))).view(-1, 256)
    of_largest = counts.gather(1, channels.amax(1, keepdim=True).long())
    step = (channels.shape[1] - of_largest) // 255
    values = torch.arange(256, dtype=torch.int32, device=images.device)
    below = counts.cumsum(1, dtype=torch.int32).sub_(counts)
    made = below.add_(step // 2).floor_divide_(step.clamp(min=1)).clamp_(max=255)
    made = made.sub_(values).mul_(step > 0).add_(values)  # with a step of 0 values stay
    return made.byte().flatten().index_select(0, places).view(images.shape)


def brightness(images: Tensor, factors: Tensor) -> Tensor:
    return _blend(images, factors, 0)


def contrast(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with the mean grey, whose product with a factor torchvision rounds: one value in 10,000 differs by 1."""
    grey = _grey(images).flatten(1)
    return _blend(images, factors, _of_image((ONE - factors[:, :1]) * grey.sum(1, keepdim=True) // grey.shape[1]))


def saturation(images: Tensor, factors: Tensor) -> Tensor:
    """Blend with grey; the same as torchvision's where the grey is."""
    return _blend(images, factors, _grey(images).mul_(ONE - _of_image(factors)))


def hue(images: Tensor, shifts: Tensor) -> Tensor:
    """Turn the colours by shares of a circle, of which the corners are red, yellow, green, cyan, blue and magenta.

    Least and largest value of a pixel stay; torchvision's way by float32 differs by 1 at most.
    """
    red, green, blue = images.int().unbind(1)
    low, high = (edge(images, 1).int() for edge in (torch.amin, torch.amax))
    chroma = high - low  # the unit of a place on the circle, whose length is 6 * chroma
    place = torch.where(green == high, 2 * chroma + blue - red, 4 * chroma + red - green)
    place = torch.where(red == high, green - blue, place) * WHOLE_TURN
    place.add_(6 * chroma * _of_image(shifts)[:, 0])
    chroma = chroma * WHOLE_TURN
    place = place.remainder_((6 * chroma).clamp_(min=1))
    shares = [
        (place - 3 * chroma).abs_().sub_(chroma),
        2 * chroma - (place - 2 * chroma).abs_(),
        2 * chroma - (place - 4 * chroma).abs_(),
    ]
    made = torch.stack([share.clamp_(min=0).minimum(chroma) for share in shares], 1).add_(low[:, None] * WHOLE_TURN)
    return made.mul_(1028).bitwise_right_shift_(22).byte()  # times 255.999 / 255, as torchvision


def _blend(images: Tensor, factors: Tensor, rest: Tensor | int) -> Tensor:
    """The factor times `images` plus `rest`, which is int32 and in the unit of `ONE`."""
    return images.int().mul_(_of_image(factors)).add_(rest).bitwise_right_shift_(14).clamp_(0, 255).byte()


def _of_image(parameters: Tensor) -> Tensor:
    """The first parameter, int32, (n, 1, 1, 1)."""
    return parameters[:, :1, None, None].int()


def _grey(images: Tensor) -> Tensor:
    """The brightness of pixels, int32, (n, 1, H, W), torchvision's but for 20 of 2**24 colours: 1 more there.

    Weights are 0.2989, 0.587 and 0.114 times 2**22.
    """
    red, green, blue = images.int().unbind(1)
    grey = red.mul_(1253677).add_(green, alpha=2462056).add_(blue, alpha=478151)
    return grey.add_(256).bitwise_right_shift_(22)[:, None]


Change = Callable[[Tensor, Tensor], Tensor]
CHANGES: tuple[Change, ...] = (
    identity,
    affine,
    sharpness,
    posterize,
    solarize,
    autocontrast,
    equalize,
    brightness,
    contrast,
    saturation,
    hue,
)


def changed(images: Tensor, codes: Tensor, parameters: Tensor, among: Sequence[Change] = CHANGES) -> Tensor:
    """Each of the `images` after the change of its code, an index in `CHANGES` (int64, (n,)), which is one of `among`.

    On a GPU `grouped` would have the host wait for the sizes of groups.
    """
    return (grouped if images.device.type == "cpu" else selected)(images, codes, parameters, among)


def grouped(images: Tensor, codes: Tensor, parameters: Tensor, _: Sequence[Change]) -> Tensor:
    """`changed`, where the images of one code go through its change together."""
    order = codes.argsort(stable=True)
    sizes = codes.bincount(minlength=len(CHANGES)).tolist()
    images = images.index_select(0, order)
    groups = torch.split(images, sizes), torch.split(parameters.index_select(0, order), sizes)
    for change, group, own in zip(CHANGES, *groups, strict=True):
        if len(group):
            group.copy_(change(group, own))
    return images.index_select(0, order.argsort())


def selected(images: Tensor, codes: Tensor, parameters: Tensor, among: Sequence[Change]) -> Tensor:
    """`changed`, where all images go through all changes; then each is taken from that of its code."""
    made = images
    for change in among:
        asked = (codes == CHANGES.index(change))[:, None, None, None]
        made = torch.where(asked, change(images, parameters), made)
    return made


# ---------------------------------------------------------------- the parameters of the policies


@dataclass(frozen=True)
class _Ranges:
    """What the largest magnitude is."""

    shear: float  # columns for each row
    shift: tuple[float, float]  # columns, rows
    turn: float  # degrees
    factor: float  # by which a factor differs from 1
    bits: int  # that `posterize` leaves out


def _operations(ranges: _Ranges, size: tuple[int, int], magnitude: int, sign: int) -> dict[str, list[int]]:
    """The index in `CHANGES` and the parameters, by torchvision's name of the operation."""
    share = magnitude / (NUM_MAGNITUDES - 1)
    shear, (right, down), turn = sign * ranges.shear * share, ranges.shift, math.radians(sign * ranges.turn * share)
    factor = [round(ONE * (1 + sign * ranges.factor * share))]
    cos, sin = math.cos(turn), math.sin(turn)
    moved = partial(_moved, size=size)
    made: dict[str, tuple[Change, list[int]]] = {
        "Identity": (identity, []),
        "ShearX": (affine, moved((1, shear), (0, 1))),
        "ShearY": (affine, moved((1, 0), (shear, 1))),
        "TranslateX": (affine, moved((1, 0), (0, 1), shift=(sign * int(right * share), 0))),
        "TranslateY": (affine, moved((1, 0), (0, 1), shift=(0, sign * int(down * share)))),
        "Rotate": (affine, moved((cos, -sin), (sin, cos), centre=size)),
        "Brightness": (brightness, factor),
        "Color": (saturation, factor),
        "Contrast": (contrast, factor),
        "Sharpness": (sharpness, factor),
        "Posterize": (posterize, [256 - (1 << round(ranges.bits * share))]),
        "Solarize": (solarize, [255 - 255 * magnitude // (NUM_MAGNITUDES - 1)]),
        "AutoContrast": (autocontrast, []),
        "Equalize": (equalize, []),
    }
    return {name: [CHANGES.index(change), *(values + 6 * [0])[:6]] for name, (change, values) in made.items()}


def _moved(
    columns: tuple[float, float],
    rows: tuple[float, float],
    *,
    size: tuple[int, int],
    centre: tuple[int, int] = (0, 0),
    shift: tuple[int, int] = (0, 0),
) -> list[int]:
    """Where `affine` finds a pixel of images of `size`: by column, by row and a constant, its column; so its row.

    `centre` (height, width) is twice the point that stays, `shift` how far images move to the right and down.
    """
    parameters, half = [], _place_bits(*size) - 1
    for (by_column, by_row), own, moved in zip((columns, rows), reversed(centre), shift, strict=True):
        # Columns and rows are counted in halves, so that the middle of a pixel is odd.
        first, second = (round(by * 2**half) for by in (by_column, by_row))
        constant = (own << half) - first * centre[1] - second * centre[0] - (moved << half + 1)
        parameters += [first, second, constant]
    return parameters


def _place_bits(height: int, width: int) -> int:
    """How many bits the place of a pixel has behind the point: in int32 it may be twice the size, or 64."""
    return 29 - max(height, width, 32).bit_length()


@cache
def policy_table(name: PolicyName, height: int, width: int, device: torch.device) -> Tensor:
    """Index in `CHANGES` and six parameters of each operation, magnitude and sign, int64, (14 * 31 * 2, 7)."""
    ranges = _Ranges(0.99, (32, 32), 135, 0.99, 6)
    if name == "rand_augment":
        ranges = _Ranges(0.3, (150 / 331 * width, 150 / 331 * height), 30, 0.9, 4)
    rows = [
        [list(_operations(ranges, (height, width), magnitude, sign).values()) for sign in (1, -1)]
        for magnitude in range(NUM_MAGNITUDES)
    ]
    return torch.tensor(rows).permute(2, 0, 1, 3).flatten(0, 2).to(device)


@cache
def _orders(num: int, device: torch.device) -> Tensor:
    """All orders of `num` things, int64, (num!, num)."""
    return torch.tensor([*permutations(range(num))], device=device)
