"""The start of a training from weights of another: what of a file fits a network is taken, and the rest is said."""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_cifar.checkpoint.atomic import index_of
from lit_cifar.checkpoint.files import read_checkpoint
from lit_cifar.checkpoint.format import COUNTER, SAVE_ALONE, is_own, naming, tensors_in
from lit_cifar.errors import CheckpointError, printable

_NUM_NAMED = 4


class _Place(NamedTuple):
    """Where the weights of a network, or of a part of it, lie in a file."""

    dictionary: str  # place of the dictionary, such as "" or "net."
    prefix: str  # what stands before the names in the file, such as "module."
    part: str  # what stands before them in the network, such as "backbone."


def take_weights(network: nn.Module, path: Path, *, num_classes: int) -> None:
    """Copy into `network` the weights in a file of any program, and print what is taken, new, and not used.

    Names may have prefixes in the file, or in the network. A classifier of another number of classes stays new, and so
    does what the file lacks. Only tensors and primitives are read.

    Raises:
        CheckpointError: The file cannot be read, no tensor of it fits, one has another shape, or it holds several
            networks' weights.
    """
    content = read_checkpoint(index_of(path), mapped=True)
    if is_own(content):  # the rest is about the training
        content = {"state_dict": content["state_dict"]}
    with naming(path):
        lines = _take(network, content, num_classes=num_classes)
    rank_zero_info(printable("\n  ".join([f"{path}: {lines[0]}", *lines[1:]]), lines=True))


def _take(network: nn.Module, content: Mapping[str, Any], *, num_classes: int) -> list[str]:
    whole = network.state_dict()
    own = {name: tensor for name, tensor in whole.items() if not name.endswith(COUNTER)}
    kept = dict(tensors_in(content))
    at = _place_of(own, kept, kind=type(network).__name__)
    theirs = kept[at.dictionary]
    found = {name: its for name in whole if (its := theirs.get(_in_file(name, at))) is not None}
    same = {name: its for name, its in found.items() if its.shape == whole[name].shape}
    others = [name for name in found if name not in same]
    heads = [name for name in others if _is_head(whole[name], found[name], num_classes)]
    for name in others:
        if name not in heads:
            raise CheckpointError(
                f"{name} is {tuple(found[name].shape)} in the file, {tuple(whole[name].shape)} in the network",
                remedy="pass the flags of its network, e.g. --model.arch=resnet18 --model.stem=imagenet",
            )
    network.load_state_dict(same, strict=False)
    return _told(own, found, same, heads, at) + _unused(content, theirs, {_in_file(name, at) for name in found}, at)


def _told(own: Mapping[str, Tensor], found: Any, same: Any, heads: list[str], at: _Place) -> list[str]:
    """What is taken, and what stays new."""
    taken = [name for name in own if name in same]
    millions = "{:.2f} of {:.2f} M".format(*(sum(own[name].numel() for name in names) / 1e6 for names in (taken, own)))
    where = f", those of {at.dictionary}{at.prefix}*" if at.dictionary or at.prefix else ""
    where += f", for {at.part}*" if at.part else ""
    lines = [f"{len(taken)} of {len(own)} tensors are taken, {millions} values{where}"]
    if heads:
        lines.append(f"new, as the file has {max(len(found[name]) for name in heads)} classes: {_named(heads)}")
    missing = [name for name in own if name not in found]
    return [*lines, *([f"new, as the file has none: {_named(missing)}"] if missing else [])]


def _unused(content: Mapping[str, Any], theirs: Mapping[str, Tensor], used: Collection[Any], at: _Place) -> list[str]:
    others = [key for key in content if at.dictionary and not at.dictionary.startswith(f"{key}.")]
    others += [name for name in theirs if name not in used and not name.endswith(COUNTER)]
    return [f"not used: {_named(others)}"] if others else []


def _place_of(own: Mapping[str, Tensor], kept: Mapping[str, Mapping[str, Tensor]], *, kind: str) -> _Place:
    """The place from which most tensors of a network can be taken."""
    counts = Counter(place for where, tensors in kept.items() for place in _places(where, tensors, own))
    best = [place for place, count in counts.items() if count == max(counts.values())]
    fits = [
        place for place in best if any(_fits(place, kept[place.dictionary], name, its) for name, its in own.items())
    ]
    if not fits:
        raise CheckpointError(f"the file holds no weights with names and shapes of {kind}'s", remedy=SAVE_ALONE)
    if len(fits) > 1:
        places = ", ".join(f"'{place.dictionary}{place.prefix}*'" for place in fits)
        raise CheckpointError(f"the file holds the weights of several networks: {places}", remedy=SAVE_ALONE)
    return fits[0]


def _places(where: str, tensors: Collection[str], own: Collection[str]) -> Iterator[_Place]:
    """A place for each tensor of the network and each of the file whose names end alike, up to the whole of one."""
    yield from (_Place(where, head, "") for name in tensors for head, tail in _cuts(name) if tail in own)
    yield from (_Place(where, "", head) for name in own for head, tail in _cuts(name) if head and tail in tensors)


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """("", "a.b.c"), ("a.", "b.c"), ("a.b.", "c")."""
    starts = [0, *(place + 1 for place, letter in enumerate(name) if letter == ".")]
    return ((name[:start], name[start:]) for start in starts)


def _in_file(name: str, at: _Place) -> str:
    """The name in the file of a tensor of the network; "" for one that is no part of what the file has."""
    return at.prefix + name.removeprefix(at.part) if name.startswith(at.part) else ""


def _fits(place: _Place, theirs: Mapping[str, Tensor], name: str, tensor: Tensor) -> bool:
    found = theirs.get(_in_file(name, place))
    return found is not None and found.shape == tensor.shape


def _is_head(own: Tensor, found: Tensor, num_classes: int) -> bool:
    """Whether two tensors of different shapes are of classifiers that differ in their number of classes alone."""
    return own.shape[:1] == (num_classes,) and own.shape[1:] == found.shape[1:]


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(map(str, names[:_NUM_NAMED]))
    return shown if len(names) <= _NUM_NAMED else f"{len(names)} names ({shown}, ...)"
