"""What one process of a run is told to do, and what it writes down. Both are pickled."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class Target:
    """The training to run: a script, or with `is_module` what `python -m` takes."""

    program: str
    arguments: tuple[str, ...] = ()
    is_module: bool = False
    folder: str  # the user's working directory


@dataclass(frozen=True, kw_only=True)
class Imposed:
    """Batches of an earlier run in place of those that the loaders read.

    The batches of `ranks` ranks are joined to one; with 0, each rank has its own. Then `window` of them that follow one
    another are joined, and the result is divided into `parts`. A run that goes on from a checkpoint begins with batch
    `skip` of epoch `first_epoch`.
    """

    folder: str
    ranks: int = 0
    window: int = 1
    parts: int = 1
    multiple: int = 1  # each batch is cut to a multiple of so many samples
    first_epoch: int = 0
    skip: int = 0
    lengths: tuple[tuple[int, int], ...] = ()  # numbers of batches of an epoch, by the order of the loaders' making


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run of the training. Two runs of the same plan are one."""

    ranks: int = 1
    torchrun: bool = False  # one process has torchrun's variables too
    double: bool = True  # in float64
    without_gpu: bool = False  # CUDA is the CPU
    most_batches: int  # of an epoch
    most_evaluated: int = 12  # batches of an evaluation, by all ranks
    most_epochs: int  # of a Trainer
    most_steps: int  # of the optimizers; the training ends after it
    arguments: tuple[str, ...] = ()  # of the script, behind its own
    knobs: tuple[tuple[str, Any], ...] = ()
    trainer: tuple[tuple[str, Any], ...] = ()  # arguments of Lightning's Trainer
    save_at: int | None = None  # number of the call of `save`, or with Lightning of the batch or epoch
    save_after: Literal["batch", "hooks", "epoch"] = "batch"  # "hooks": all of a batch, so when the next begins
    resume: str | None = None
    redrawn: tuple[int, ...] = ()  # parameters, by the order of their making, to spoil before a checkpoint is loaded
    steps_before: int = 0  # steps of the run that wrote the checkpoint
    generators: bool = False  # random generators follow the step
    quiet: bool = False  # no dropout, and the running statistics of BatchNorm
    record: bool = False  # keep the batches
    imposed: Imposed | None = None
    evaluation_batch: int | None = None  # samples of a batch where no gradient is made; 0 for all
    validate: str | None = None  # in place of training: "weights" as they are made, or a checkpoint
    variants: bool = False  # validate in several ways after the training
    scale: float = 1.0  # of the first scale of the loss, that the script chooses
    probe_loaders: bool = False
    seed: int = 0
    repetition: int = 0

    @property
    def evaluation_batches(self) -> int:
        """At most, of an evaluation on each rank: the same samples for 1, 2 and 3 ranks that divide them in turn."""
        return self.most_evaluated // self.ranks


@dataclass
class Trace:
    """What a rank has written down."""

    error: str = ""  # the last line of a traceback
    ended_at: float = 0.0  # the time of the error
    is_late: bool = False  # it was ended by the checker
    steps: int = 0
    epochs: list[int] = field(default_factory=list)  # numbers of batches of each iteration over a loader that trains
    batches_of_epoch: int = 0  # with Lightning, as the next
    epochs_begun: int = 0
    state: dict[str, Any] = field(default_factory=dict)  # tensors and numbers by name, at the end
    saved: dict[str, Any] = field(default_factory=dict)  # where the checkpoint was written
    resumed: dict[str, Any] = field(default_factory=dict)  # before the first batch or call after a checkpoint was read
    first: list[int] = field(default_factory=list)  # digests of parameters before the first step, as they were made
    norms: list[float] = field(default_factory=list)  # of all parameters, after each step
    samples: list[list[int]] = field(default_factory=list)  # digests of those of each step
    asked: dict[str, Any] = field(default_factory=dict)  # knobs and their own values; "resume", "save", "share"
    saves: list[int] = field(default_factory=list)  # steps done at each call of `save`
    cut_from: int = 0  # batches of an epoch in a loader of training that was shortened
    lengths: dict[int, int] = field(default_factory=dict)  # of loaders that trained, by the order of their making
    drawn: list[int] = field(default_factory=list)  # digests of torch's generator before steps that drew numbers
    # Of each epoch: the number of all samples, whether torch draws the order, and the places of those that were read.
    orders: list[tuple[int, bool, list[int]]] = field(default_factory=list)
    owned: int = 0  # parameters of optimizers
    models: int = 0  # that are trained
    moved: int = 0  # parameters that have changed
    observed: list[str] = field(default_factory=list)  # in words, what looks like a mistake in a single run
    stale: int = 0  # steps that began with gradients of the step before
    own_ranks: int = 1  # processes that the script asks for
    own_accumulation: int = 1
    is_lightning: bool = False
    wants_cuda: bool = False  # the script names it, or asks whether it is there
    is_distributed: bool = False  # the script has made a process group
    scales: bool = False  # the loss, by a `GradScaler`
    metrics: dict[str, dict[str, float]] = field(default_factory=dict)  # of each way to validate
    failed: dict[str, str] = field(default_factory=dict)  # errors of ways to validate
    logged: list[tuple[int, dict[str, float]]] = field(default_factory=list)  # steps and results of each evaluation
    evaluates: bool = False  # a loader was read where no gradient is made
    left_out: int = 0  # samples that no batch of an evaluation on one process had
    is_cut: bool = False  # an evaluation had more batches than were read
    has_workers: bool = False  # some loader of the script
    loaders: list[dict[str, Any]] = field(default_factory=list)  # what was seen of each that trains
    remarks: set[str] = field(default_factory=set)  # properties of the training that a relation must know
    outside: list[str] = field(default_factory=list)  # files beyond the run's own folder that it tried to write

    @property
    def reported(self) -> dict[str, float]:
        """What was logged, by its name and the number of steps before."""
        return {f"{name} after {steps} steps": value for steps, told in self.logged for name, value in told.items()}

    @property
    def batches(self) -> int:
        """Number of batches of training."""
        return sum(self.epochs)
