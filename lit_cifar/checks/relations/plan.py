"""What a process of a run is told, and what it writes down. Both are pickled.

A relation that asks for more has a constant or dataclass in its file, held as `asks`; what is noted, a trace's `part`.
"""

from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any, TypeVar

from lit_cifar.checks.relations.flags import Flag, by_knob

Asked = TypeVar("Asked")
LIMIT_S = 60.0  # of a run


@dataclass(frozen=True, kw_only=True)
class Target:
    """The training to run: a script, or with `is_module` what `python -m` takes."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str  # the user's working directory
    flags: tuple[tuple[str, str], ...] = ()  # knobs and the flags that mean them, as the reader says


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Where runs are cut."""

    batches: int = 8  # of an epoch
    epochs: int = 3  # of a Trainer
    steps: int = 96  # of the optimizers; the training ends after it
    evaluated: int = 12  # batches of an evaluation, by all ranks
    undivided: int = 12  # the same, of a training that makes no ranks


@dataclass(frozen=True, kw_only=True)
class Imposed:
    """Batches of an earlier run in place of those that the loaders read.

    The batches of `ranks` ranks are joined to one; with 0, each rank has its own. Then `window` of them that follow one
    another are joined, and the result is divided into `parts`. A resumed run begins with batch `skip` of `first_epoch`.
    """

    folder: str
    ranks: int = 0
    window: int = 1
    parts: int = 1
    multiple: int = 1  # each batch is cut to a multiple of so many samples, and left out if it has fewer
    first_epoch: int = 0
    skip: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # numbers of batches of an epoch, by the order of the loaders' making


@dataclass(frozen=True)
class GoOn:
    """Asks a run to go on from a checkpoint."""

    checkpoint: str
    redrawn: tuple[int, ...]  # parameters, by the order of their making, to spoil before the checkpoint is loaded
    steps_before: int  # steps of the run that wrote it
    files: tuple[str, ...] = ()  # of its own; `checkpoint` is then the folder of that run, whose files are all there


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """A run of the training. Two runs of the same plan are one."""

    limits: Limits = Limits()
    ranks: int = 1
    torchrun: bool = False  # one process has torchrun's variables too
    double: bool = True  # in float64
    without_gpu: bool = False  # CUDA is the CPU
    made_data: bool = False  # in place of known data sets
    purposes: tuple[tuple[str, str], ...] = ()  # of batches, by the place in the script, where its model does not tell
    on_own_devices: bool = False  # those that the script uses, in its own precision
    arguments: tuple[str, ...] = ()  # of the script, behind its own
    knobs: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()  # arguments of Lightning's Trainer
    seed: int = 0
    seeded_by_step: bool = False  # random generators follow the step
    to_evaluation: bool = False  # behind the last step loaders of training are empty, until the script has evaluated
    quiet: bool = False  # no dropout, and the running statistics of BatchNorm
    record: bool = False  # keep the batches
    imposed: Imposed | None = None
    evaluation_batch: int | None = None  # samples of one wherever no gradient is made; 0 for all, None for the script's
    asks: Any = None  # what the relation asks beyond this
    repetition: int = 0
    most_s: float = field(default=inf, compare=False)  # of training: it is ended, and is then no run of this plan

    @property
    def evaluated(self) -> int:
        """Most batches of an evaluation on a rank: the same samples for 1, 2 and 3 ranks that divide them in turn."""
        return self.limits.evaluated // self.ranks

    def asked(self, kind: type[Asked]) -> Asked | None:
        """What the relation asks, if it is of this kind."""
        return self.asks if isinstance(self.asks, kind) else None


@dataclass
class End:
    """How a process ended."""

    error: str = ""  # the last line of a traceback
    kinds: list[str] = field(default_factory=list)  # names of its class and those above
    where: str = ""  # file and line in the user's code
    words: str = ""  # the last that were printed
    at: float = 0.0  # the time of the error
    is_late: bool = False  # the checker ended it
    at_limit: bool = False  # the same, after as many steps as a run may have
    asks: bool = False  # it reads its standard input
    wants_cuda: bool = False  # the script names CUDA, or asks whether it is there
    wants_data: bool = False  # a data set is not there that could be made
    outside: list[str] = field(default_factory=list)  # folders beyond the run's own that it tried to write to


@dataclass
class Script:
    """What the script is, and what it would do by itself."""

    is_lightning: bool = False
    is_distributed: bool = False  # it has made a process group
    ranks: int = 1  # processes that it asks for
    has_workers: bool = False  # in some loader
    saves_inside: bool = False  # it writes checkpoints inside epochs, with Lightning
    epochs: int = 0  # of a Trainer
    batches: float = 1.0  # of an epoch of a Trainer: a number, or with a fraction a part
    calls: dict[str, Any] = field(default_factory=dict)  # own values of knobs, also a Trainer's; "resume", "save"...
    flags: dict[str, Flag] = field(default_factory=dict)  # of its command line, by the first of their words
    said: dict[str, str] = field(default_factory=dict)  # knobs and the flags that mean them, as the reader says

    @property
    def window(self) -> int:
        """Microbatches of a step."""
        return int(self.knobs.get("accumulate") or 1)

    @property
    def by_flag(self) -> dict[str, Flag]:
        """Flags that mean a knob which the script does not call, by the name of the knob."""
        return {name: flag for name, flag in by_knob(self.flags, self.said).items() if name not in self.calls}

    @property
    def knobs(self) -> dict[str, Any]:
        """Its own values of the knobs that it calls or has a flag for."""
        return self.calls | {name: flag.value for name, flag in self.by_flag.items()}


@dataclass
class Reading:
    """What the training has read."""

    epochs: list[int] = field(default_factory=list)  # numbers of batches of each iteration over a loader
    cut: dict[int, int] = field(default_factory=dict)  # own numbers of batches of loaders that were shortened
    lengths: dict[int, int] = field(default_factory=dict)  # of loaders, by the order of their making
    batches_of_epoch: int = 0  # with Lightning, as the next
    epochs_begun: int = 0

    @property
    def batches(self) -> int:
        return sum(self.epochs)

    @property
    def cut_from(self) -> int:
        """Number of batches of an epoch that was shortened, or 0."""
        return max(self.cut.values(), default=0)


@dataclass
class Trace:
    """What a rank has written down."""

    end: End = field(default_factory=End)
    script: Script = field(default_factory=Script)
    reading: Reading = field(default_factory=Reading)
    steps: int = 0
    seconds: float = 0.0  # since the first batch
    peak: int = 1  # bytes of memory, the most that the process has had
    has_port: bool = False  # it listens at a port that it has chosen, as runs cannot do at once
    samples: list[list[int]] = field(default_factory=list)  # digests of those of each step
    norms: list[float] = field(default_factory=list)  # of all parameters, after each step
    drawn: set[int] = field(default_factory=set)  # digests of the generators before steps that drew numbers
    first: list[int] = field(default_factory=list)  # digests of parameters before the first step, as they were made
    moved: int = 0  # parameters that have changed since
    state: dict[str, Any] = field(default_factory=dict)  # tensors and numbers by name, at the end
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # steps before, and numbers told then
    made_data: dict[str, None] = field(default_factory=dict)  # data sets that made samples stand for, in their order
    remarks: set[str] = field(default_factory=set)  # properties of the training that a relation must know
    parts: dict[type, Any] = field(default_factory=dict)
    folder: Path = Path()  # of this rank, below that of the run

    def part(self, kind: type[Asked]) -> Asked:
        """What is written down for one relation alone, in a class of its own."""
        own: Asked = self.parts.setdefault(kind, kind())
        return own

    @property
    def cuts(self) -> list[str]:
        """In words, what the run is of the script's own training."""
        reading, script = self.reading, self.script
        cuts = [f"{reading.lengths[place]} of {own} batches" for place, own in reading.cut.items()]
        cuts += [f"{reading.epochs_begun} of {script.epochs} epochs"] if reading.epochs_begun < script.epochs else []
        return [*dict.fromkeys(cuts), *([f"the first {self.steps} steps"] if self.end.at_limit else [])]
