"""The start of a training from weights of another: what of a file a network takes, and what is said of the rest."""

import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor, nn

from lit_cifar.checkpoint.compatibility import check_shapes, wrong_values
from lit_cifar.checkpoint.format import SAVE_ALONE, is_own, naming, read_checkpoint
from lit_cifar.errors import CheckpointError, printable

_NUM_NAMED, _MOST_PLACES = 4, 20
_COUNTER = "num_batches_tracked"
_WRAPPER = re.compile(r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")  # torch's own
_FLAGS = f"pass the flags of its network, e.g. --model.arch=resnet18 --model.stem=imagenet, or {SAVE_ALONE}"


class _Place(NamedTuple):
    """Where the weights of a network, or of a part of it, lie in a file."""

    dictionary: str  # place of the dictionary, such as "" or "net."
    prefix: str  # what stands before the names in the file, such as "module."
    part: str  # what stands before them in the network, such as "backbone."

    def given(self, kept: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        theirs = {name: its for name, its in kept[self.dictionary].items() if name.startswith(self.prefix)}
        return {self.part + name.removeprefix(self.prefix): its for name, its in theirs.items()}


def start_from_file(network: nn.Module, path: Path, *, num_classes: int) -> None:
    """Copy into `network` what fits of the weights in a file, and print what is taken, new, and not used."""
    content = read_checkpoint(path)
    with naming(path):
        summary = take_weights(network, content, num_classes=num_classes)
        if problem := wrong_values(network, network.state_dict()):
            raise CheckpointError(problem)
    rank_zero_info(f"{path}: {summary}")


def take_weights(network: nn.Module, content: Mapping[str, Any], *, num_classes: int) -> str:
    """Copy into `network` the weights in a file of any program, and return what is taken, new, and not used.

    They may lie in dictionaries, and names have prefixes in the file or network: `{"net": {"module.fc.bias": ...}}`.
    A classifier of another number of classes than `num_classes` stays new, and so does what the file lacks.

    Raises:
        CheckpointError: No tensor fits, one has another shape, or there are several networks' weights.
    """
    if is_own(content):  # the rest is about the training
        content = {"state_dict": content.get("state_dict")}
    whole = network.state_dict()
    own = {name: tensor for name, tensor in whole.items() if not name.endswith(_COUNTER)}
    kept = dict(_tensors_in(content))
    at = _place_of(own, kept, kind=type(network).__name__)
    given = at.given(kept)
    found = {name: given[name] for name in whole if name in given}
    wanted = {name: (num_classes, *its.shape[1:]) for name, its in found.items() if its.ndim}
    heads = [name for name, shape in wanted.items() if found[name].shape != shape == whole[name].shape]
    fitting = whole | found | {name: whole[name] for name in heads}
    check_shapes(network, fitting)
    network.load_state_dict(fitting)
    taken = [name for name in own if name in found and name not in heads]
    used = {at.prefix + name.removeprefix(at.part) for name in found}
    others = [key for key in content if at.dictionary and not at.dictionary.startswith(f"{key}.")]
    told = {
        f"new, as the file has {max((len(found[name]) for name in heads), default=0)} classes": heads,
        "new, as the file has none": [name for name in own if name not in found],
        "not used": others + [name for name in kept[at.dictionary] if name not in used and not name.endswith(_COUNTER)],
    }
    rest = [f"{words}: {_named(names)}" for words, names in told.items() if names]
    return printable("\n  ".join([_taken(own, taken, at), *rest]), lines=True)


def _tensors_in(content: Mapping[Any, Any], place: str = "") -> Iterator[tuple[str, dict[str, Tensor]]]:
    """The tensors of each dictionary, at any depth, with its place, such as "model.weights."; no wrappers' names."""
    if found := {name: its for name, its in content.items() if isinstance(name, str) and isinstance(its, Tensor)}:
        yield place, {_WRAPPER.sub("", name): tensor for name, tensor in found.items()}
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _tensors_in(value, f"{place}{key}.")


def _taken(own: Mapping[str, Tensor], taken: Collection[str], at: _Place) -> str:
    millions = "{:.2f} of {:.2f} M".format(*(sum(own[name].numel() for name in names) / 1e6 for names in (taken, own)))
    where = f", those of {at.dictionary}{at.prefix}*" if at.dictionary or at.prefix else ""
    where += f", for {at.part}*" if at.part else ""
    return f"{len(taken)} of {len(own)} tensors are taken, {millions} values{where}"


def _place_of(own: Mapping[str, Tensor], kept: Mapping[str, Mapping[str, Tensor]], *, kind: str) -> _Place:
    """The place from which most tensors of a network can be taken."""
    counts = Counter(place for where, tensors in kept.items() for place in _places(where, tensors, own))
    most = max(counts.values(), default=0)
    best = [place for place, count in counts.items() if count == most][:_MOST_PLACES]
    shapes = {(name, tensor.shape) for name, tensor in own.items()}
    fits = [place for place in best if shapes & {(name, its.shape) for name, its in place.given(kept).items()}]
    if not fits:
        raise CheckpointError(f"the file holds no weights with names and shapes of {kind}'s", remedy=_FLAGS)
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


def _named(names: Sequence[str]) -> str:
    shown = ", ".join(map(str, names[:_NUM_NAMED]))
    return shown if len(names) <= _NUM_NAMED else f"{len(names)} names ({shown}, ...)"
