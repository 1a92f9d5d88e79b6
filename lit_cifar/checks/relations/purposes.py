"""What the batches of a plain loop are for, learnt from the calls that follow them, where its model does not tell.

A library may read data before it sets the mode of a model: ignite begins a second epoch of training in eval mode.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from traceback import walk_stack
from typing import Any


@dataclass
class Purposes:
    """What a process writes down: by the place in the script, what was supposed, and what turned out."""

    seen: dict[str, set[tuple[str, str]]] = field(default_factory=dict)
    _of_innermost: set[str] = field(default_factory=set)  # phases of calls since the last batch of any loader

    @property
    def mistaken(self) -> tuple[tuple[str, str], ...]:
        """The places where something else was supposed than what it always is, each with what it is."""
        found = []
        for place, pairs in self.seen.items():
            supposed, is_for = map(set, zip(*pairs, strict=True))
            if len(is_for) == 1 and supposed != is_for:
                found.append((place, *is_for))
        return tuple(found)

    def note(self, phase: str) -> None:
        """A module is called to train or to evaluate."""
        self._of_innermost.add(phase)

    def follow(self, batches: Iterator[Any], supposed: Collection[tuple[str, str]]) -> Iterator[Any]:
        """The batches; `supposed` has the places at which they, and before them their number, were asked for."""
        outer, own = self._of_innermost, set[str]()
        try:
            for batch in batches:
                self._of_innermost = own
                yield batch
        finally:
            self._of_innermost = outer
            if own:
                is_for = "train" if "train" in own else "evaluate"
                for place, purpose in supposed:
                    self.seen.setdefault(place, set()).add((purpose, is_for))


def place_in(folder: Path) -> str:
    """The lines of files below a folder at which calls are made now."""
    frames = [(frame.f_code.co_filename, line) for frame, line in walk_stack(None)]
    own = f"{folder}/"
    return " ".join(f"/{file.removeprefix(own)}:{line}" for file, line in frames if file.startswith(own))
