"""`Replay` judges trainings of others: right ones pass, each mistake is found where it is, the rest abstains."""

import copy
import json
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib.metadata import entry_points
from pathlib import Path
from threading import Lock
from types import SimpleNamespace
from typing import Any
from weakref import ref

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from commands import TINY, callback, graded, launch, mode_flags, own_network, refused, said_by_tests_in
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.loggers.logger import Logger
from replay_cases import CASES, CHANGES, PLAIN, Pictures, Sequences, Task, Tokens
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, DistributedSampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from lit_cifar import Replay, ReplayError
from lit_cifar.checks.repeated_step.attributes import Attributes
from lit_cifar.checks.repeated_step.digests import checksum, digest
from lit_cifar.checks.repeated_step.exchange import Exchange, problem
from lit_cifar.checks.repeated_step.reduction import ExactMean, gamma
from lit_cifar.checks.replay.epoch import Pass, ReadIds, Reading, is_order_of_epoch_0, judge_epoch, judge_resumed_epoch
from lit_cifar.checks.replay.states import judge_replicas
from lit_cifar.checks.replay.verdict import COMPARED, Report
from lit_cifar.checks.replica_audit.replicas import device_digest
from lit_cifar.tools.modes import SILENT
from lit_cifar.tools.verify.record import Record

pytestmark = pytest.mark.filterwarnings("ignore:.*num_workers")  # these loaders read in the training's own process

# Part, step, rank and the tensor of the first finding.
WRONG = {
    "summed": ("local computation", 0, 0, "the loss"),
    "wrong loss": ("local computation", 0, 1, "the loss"),
    "wrong loss in bf16": ("local computation", 0, 1, "the loss"),
    "wrong gradient": ("local computation", 0, 1, "net.0.weight"),
    "wrong statistics": ("local computation", 0, 1, "net.1.running_var"),
    "wrong mean": ("reduction", 0, None, "net.5.weight"),
    "never averaged": ("reduction", 0, 1, "net.0.weight"),
    "other rate": ("optimizer", 0, 1, "SGD"),
    "takes away on one rank": ("optimizer", 0, 1, "net.5.bias"),
    "forgotten": ("optimizer", 0, 1, "net.5.bias"),
    "wrong exchange": ("local computation", 0, 1, "what allgather sends"),
    "received otherwise": ("exchange", 0, None, "allreduce 0"),
    "sharded, summed": ("reduction", 0, None, "net.5.weight"),
    "sharded, clipped apart": ("optimizer", 0, 0, "net.0.weight"),
    "same samples": ("data", 0, None, "4 of 4 samples"),
    "not wrapped": ("reduction", 0, 1, "weight"),
    "plain and wrong": ("optimizer", 0, 1, "0.weight"),
    "two passes": ("parameters", 0, 1, "net.weight"),  # DDP averages the first one only
}
ABSTAINED = {
    "sends": "exchange data inside a step by",
    "tensor parallel": "tensor parallelism adds up",
    "manual, scaled": "manual optimization with a GradScaler",
    "overflowed": "no optimizer made a step",
    "unrepeatable": "two replays of a step differ",
    "uncopyable": "cannot be copied",
    "penalty on weights": "the loss depends on net.weight beside what calls return",
    "parts by hand": "as parts of a model",
    "stages by hand": "as parts of a model",
    "stages by hand, broadcast": "as parts of a model",
    "uneven ranks": "unlike numbers of batches under join()",
    "weight in a closure": "closure of the module cannot be written down, and may have changed",
    "weight in a global value": "a step depends on what is not written down",
    "penalty on an output": "on another one that the call computes from it",
}
NOTED = {
    "trains nothing": "every gradient is zero in these steps, so the loss trains nothing",
    "compressed": r"gradients leave the communication hook fp16_compress_hook 0\.0\d+ % away from their mean",
    "gathers outputs": "by a collective that no gradient passes",
}
OTHERS = {"plain", "plain, forward outside of no_sync", "plain and sharded", "older package"}
RIGHT = [*({*CASES, *PLAIN, *OTHERS} - {*WRONG, *ABSTAINED})]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The reports of all cases, from two processes."""
    file = tmp_path_factory.mktemp("replay") / "reports.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    cases = Path(__file__).with_name("replay_cases.py")
    done = subprocess.run([*torchrun, str(cases), str(file)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def each_of(names: Iterable[str]) -> Callable[[Any], Any]:
    """A test for each case; all wait for the one pair of processes."""
    cases = pytest.mark.parametrize("name", sorted(names))
    return lambda test: pytest.mark.timeout(360)(cases(test))


@each_of(RIGHT)
def test_a_right_training_passes(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["outcome"] == "pass", report
    assert report["num_steps"] == 2
    judged = ["samples", "steps", "states", *["gradients"] * ("sharded" not in name)]
    judged += ["reduced"] * (name != "compressed")
    assert min(report["counts"][what] for what in judged) > 0
    assert report["largest_share"] <= 1


@each_of(NOTED)
def test_what_is_no_mistake_by_itself_is_noted(name: str, reports: dict[str, Any]) -> None:
    assert re.search(NOTED[name], " ".join(reports[name]["notes"]))
    assert reports["loss from inside"]["notes"] == []


def test_a_copy_gets_what_a_module_holds_and_refers_to_its_own_parts() -> None:
    module = Task()
    module.rnn = torch.nn.GRU(2, 3)  # which holds weak references to its weights
    other = copy.deepcopy(module)
    module.last, module.foreign = ref(module.net[5]), ref(other)
    module.settings = shared = {"weight": 2.0, "layer": module.net[5], "bias": [module.net[5].bias]}
    module.net.also, module.rates, module.handle = shared, torch.arange(3), Lock()
    module.large = torch.zeros(2**26 + 1, dtype=torch.uint8)
    module.net[0].weight.requires_grad_(False)
    its = Attributes.of(module)
    assert its.unknown == ["foreign", "handle", "large"]
    its.fill(other, but=[("", "rates")])
    assert other.settings == {"weight": 2.0, "layer": other.net[5], "bias": [other.net[5].bias]}
    assert other.net.also is other.settings is not shared
    assert other.last() is other.net[5]
    assert [name for name, parameter in other.named_parameters() if not parameter.requires_grad] == ["net.0.weight"]
    assert not {"rates", "handle", "large"} & {*vars(other)}
    other.net.also["weight"] = 3.0
    its.fill(other)
    assert other.settings["weight"] == 2.0
    assert torch.equal(other.rates, torch.arange(3))


def test_a_communication_hook_that_divides_twice_is_told_from_compression() -> None:
    mean = ExactMean(2)
    for gradient in torch.randn(2, 9, generator=torch.Generator().manual_seed(4)):
        mean.add({"weight": gradient})
    exact = mean.totals["weight"] / 2
    factor, rest = mean.compared({"weight": exact.half() / 2, "unreached": torch.ones(2)})
    assert factor == pytest.approx(0.5, rel=1e-3)
    assert 0 < rest < 1e-3


@each_of(WRONG)
def test_a_mistake_is_found_where_it_is(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["outcome"] == "fail", report
    first = report["findings"][0]
    assert (first["part"], first["step"], first["rank"], first["tensor"]) == WRONG[name]


@each_of(ABSTAINED)
def test_what_cannot_be_judged_never_passes(name: str, reports: dict[str, Any]) -> None:
    report = reports[name]
    assert report["outcome"] == "abstain", report
    assert ABSTAINED[name] in " ".join(report["abstained"])
    assert name != "uneven ranks" or report["num_steps"] == 2  # those before one of them has run out


@each_of(CHANGES)
def test_an_audit_ends_no_training_whose_state_changes(name: str, reports: dict[str, Any]) -> None:
    """And says so once where a step cannot be repeated."""
    reasons = {
        "global value of each rank": "no majority gets the same, so a rank computes wrongly, or a step depends on its",
        "global value that a step changes": "rank 0 gets other gradients when it repeats its own batch",
    }
    found = reports[f"audit with a {name}"]
    assert found["raised"] == ""
    assert [reasons.get(name, "-") in text for text in found["said"]] == [True] * (name in reasons)


@pytest.mark.timeout(360)
def test_whole_epochs_and_evaluations_are_judged(reports: dict[str, Any]) -> None:
    subjects = {"", "data of epoch 0", "data of epoch 1", "evaluation after step 8", "replicas after step 16"}
    right, wrong = reports["right epochs"], reports["wrong epochs"]
    assert set(right) == subjects
    assert {report["outcome"] for report in right.values()} == {"pass"}
    assert right["data of epoch 0"]["counts"]["samples"] == 64
    assert right["evaluation after step 8"]["counts"] == dict.fromkeys(COMPARED, 0) | {"samples": 32, "metrics": 1}
    assert "1 of 31 samples are evaluated again" in right["evaluation after step 8"]["notes"][0]
    assert "rank 0's samples alone" in wrong["evaluation after step 8"]["findings"][0]["text"]
    assert wrong["data of epoch 0"]["outcome"] == "pass"
    assert "that of the epoch before" in wrong["data of epoch 1"]["findings"][0]["text"]


@pytest.mark.parametrize(
    ("ids", "before", "finding", "note"),
    [
        ([[3, 1], [2, 0]], [1, 3], "", ""),
        ([[3, 1], [2, 0]], [3, 1], "call set_epoch", ""),
        ([[0, 1], [2, 3]], [0, 1], "", "not shuffled"),
        ([[3, 1, 2, 0], [3, 1, 2, 0]], [], "are read by several ranks", ""),
        ([[3, 1], [2, 0, 3]], [], "", "1 of 4 samples are used again"),
        ([[3, 1], [2]], [], "", "1 of 4 samples are left out"),
        ([[3, 1], [2]], [], "", "ranks read 2, 1 samples"),
        ([[3, 1], [1, 0, 1]], [], "ranks share unlike orders", "1 of 4 samples are left out"),
    ],
)
def test_the_samples_of_an_epoch(ids: list[list[int]], before: list[int], finding: str, note: str) -> None:
    report = Report("ddp", 2, "32-true", 0, subject="data of epoch 1")
    report.counts["samples"] = 4
    judge_epoch(report, [Pass(its, 4, [], 7, is_drawn=True, is_divided=True) for its in ids], before=before)
    assert [finding in its.text for its in report.findings] == [True] * bool(finding)
    assert note in " ".join(report.notes)
    assert report.outcome == ("fail" if finding else "pass")


def test_a_data_set_without_a_length_leaves_nothing_out() -> None:
    report, order = Report("ddp", 2, "32-true", 0), ([3, 1], [2, 0, 2])
    assert Reading([], SimpleNamespace(), [[3, 1]]).pass_of().size == 0
    judge_epoch(report, [Pass(its, 0, [], 7, is_drawn=True, is_divided=False) for its in order], before=[])
    assert not report.findings
    assert "left out" not in " ".join(report.notes)


def with_data_each(*of_ranks: tuple[int, Any]) -> list[Pass]:
    """Ranks that read all of a data set, which they have by themselves."""
    passes = ((size, checksum(data)) for size, data in of_ranks)
    return [Pass([*range(size)], size, [], known, is_drawn=True, is_divided=False) for size, known in passes]


def with_subsets(*subsets: list[int]) -> list[Pass]:
    """Ranks whose sampler divides the subset that each of them has."""
    return [Pass(its[rank::2], 4, its, 7, is_drawn=True, is_divided=True) for rank, its in enumerate(subsets)]


@pytest.mark.parametrize(
    ("ranks", "finding"),
    [
        (with_data_each((6, "a"), (4, "a")), ""),
        (with_data_each((4, "a"), (4, "b")), ""),
        (with_data_each((4, "a"), (4, "a")), "are read by several ranks, each of which needs its own"),
        (with_data_each((4, lambda: 1), (4, lambda: 2)), "are read by several ranks"),  # not to be pickled
        (with_subsets([4, 5, 6, 7], [4, 5, 6, 7]), ""),
        (with_subsets([4, 5], [6, 7]), ""),
        (with_subsets([4, 5, 6], [6, 7, 8]), "1 of 5 samples are in the subsets of some ranks and not of others"),
    ],
)
def test_ranks_may_have_a_data_set_or_a_part_of_one_each(ranks: list[Pass], finding: str) -> None:
    report = Report("ddp", 2, "32-true", 0, subject="data of epoch 0")
    judge_epoch(report, ranks, before=[])
    assert [finding in f"{its.tensor} {its.text}" for its in report.findings] == [True] * bool(finding)


@pytest.mark.parametrize("data", [np.zeros(2**27, np.uint8), torch.zeros(2**27, dtype=torch.uint8)], ids=type)
def test_a_checksum_is_of_the_beginning_of_large_data_and_copies_nothing(data: Any) -> None:
    tracemalloc.start()
    first = checksum(data)
    assert tracemalloc.get_traced_memory()[1] < 2**20
    tracemalloc.stop()
    data[-1] = 1
    assert checksum(data) == first
    data[0] = 1
    assert checksum(data) != first


def test_a_replay_gives_each_collective_its_own_judgement() -> None:
    """What a group of two receives: right, then with the first value of the second rank changed."""
    a, b = torch.tensor([1.0, 2.5]), torch.tensor([0.1, 4.0])
    both = torch.stack([a, b])
    cases: dict[tuple[str, str], list[tuple[list[Tensor], list[Tensor]]]] = {
        ("allreduce", "SUM"): [([a], [a + b]), ([b], [a + b])],
        ("allreduce", "AVG"): [([a], [(a + b) / 2]), ([b], [(a + b) / 2])],
        ("allreduce", "MAX"): [([a], [both.amax(0)]), ([b], [both.amax(0)])],
        ("broadcast", "1"): [([a], [b]), ([b], [b])],
        ("allgather", ""): [([a], [a, b]), ([b], [a, b])],
        ("_allgather_base", ""): [([a], [both]), ([b], [both])],
        ("reduce_scatter", "SUM"): [([a, b], [a + b]), ([b, a], [b + a])],
        ("_reduce_scatter_base", "SUM"): [([both], [a + a]), ([both], [b + b])],
        ("alltoall", ""): [([a, b], [a, a + 1]), ([a + 1, b + 1], [b, b + 1])],
        ("scatter", "0"): [([a, b], [a]), ([], [b])],
        ("gather", "1"): [([a], []), ([b], [a, b])],
    }
    for (name, option), ranks in cases.items():
        exchanges = [
            Exchange(name, [0, 1], option, sent, [tensor.clone() for tensor in received]) for sent, received in ranks
        ]
        assert problem(exchanges) == "", name
        exchanges[1].received[0].view(-1)[0] += 1e-5
        assert problem(exchanges), name


def test_other_projects_get_a_fixture(tmp_path: Path) -> None:
    """It runs the command that judges a module of others."""
    assert "lit_cifar.checks.pytest_plugin" in [point.value for point in entry_points(group="pytest11")]
    (tmp_path / "test_theirs.py").write_text(
        "def test_right(replayed):\n"
        "    found = replayed('replay_cases.WithData', '--model.lr=0.1', '--steps=2')\n"
        "    assert (found['outcome'], found['num_steps'], found['exit_status']) == ('pass', 2, 0)\n"
        "def test_longer_than_an_epoch(replayed):\n"
        "    found = replayed('replay_cases.WithData', '--steps=17')\n"
        "    assert (found['subject'], found['num_steps']) == ('', 17)\n"
        "def test_wrong(replayed):\n"
        "    replayed('replay_cases.Sends', '--steps=1')\n"
    )
    said = said_by_tests_in(tmp_path)
    assert "1 failed, 2 passed" in said, said
    assert "exit status" in said


@pytest.mark.filterwarnings("ignore")  # dynamo looks at gradients of what has none
def test_a_module_compiled_as_a_whole_is_left_alone(tmp_path: Path) -> None:
    module, watch = Task(), Replay(2)
    trainer = pl.Trainer(accelerator="cpu", max_steps=3, callbacks=[watch], default_root_dir=tmp_path, **SILENT)
    trainer.fit(torch.compile(module, backend="eager"), DataLoader(Pictures(), batch_size=4))  # type: ignore[arg-type]
    assert "compiled" in watch.reports[0].abstained[0]
    assert module.net[1].num_batches_tracked == 3


@each_of(["tokens", "tokens in bf16"])
def test_means_over_unlike_numbers_are_noted_with_their_size(name: str, reports: dict[str, Any]) -> None:
    pl.seed_everything(1, verbose=False)
    net = Tokens().net.double()
    for layer in (net[1], net[2]):
        layer.eval()
    data = Sequences(False)
    read = [[*DistributedSampler(data, num_replicas=2, rank=rank, seed=1)][:4] for rank in range(2)]
    valid = [data.tokens.double()[its][torch.arange(5) < data.numbers[its, None]] for its in read]
    losses = [net(its).square().mean() for its in (*valid, torch.cat(valid))]
    grads = [torch.cat([*map(torch.flatten, torch.autograd.grad(loss, net.parameters()))]) for loss in losses]
    share = (grads[0] + grads[1] - 2 * grads[2]).norm() / (2 * grads[2]).norm()
    (note,) = [its for its in reports[name]["notes"] if "joined to one" in its]
    assert f"its gradient is {100 * share:.3g} % away" in note
    assert 1 < 100 * share < 100
    assert "joined to one" not in " ".join(reports["even tokens"]["notes"])


def trained(
    folder: Path, *callbacks: pl.Callback, make: Callable[[], pl.LightningModule] = Task, **options: Any
) -> pl.LightningModule:
    """A training of 16 batches per epoch; `options` of the trainer, and `ckpt_path`."""
    pl.seed_everything(3, verbose=False)
    module = make()
    checkpoint = options.pop("ckpt_path", None)
    options = {"accelerator": "cpu", "devices": 1, "max_steps": 6, **SILENT, **options}
    trainer = pl.Trainer(callbacks=[*callbacks], default_root_dir=folder, **options)
    loader = DataLoader(Pictures(), batch_size=4, shuffle=True, drop_last=True)
    trainer.fit(module, None if isinstance(module, Tokens) else loader, ckpt_path=checkpoint)
    return module


def resumed(folder: Path, make: Callable[[], pl.LightningModule], *, at: int) -> dict[str, Report]:
    """Reports of a training that is resumed at a step, by their subject without their numbers."""
    saving = pl.callbacks.ModelCheckpoint(dirpath=folder, filename="saved", every_n_train_steps=at, save_top_k=1)
    trained(folder, Replay(1), saving, max_steps=-1, max_epochs=1, enable_checkpointing=True)
    replay = Replay(1)
    trained(folder, replay, make=make, max_steps=32, ckpt_path=folder / "saved.ckpt")
    return {" ".join(re.findall(r"[a-z]+", report.subject)): report for report in replay.reports}


class Manual(Task):
    """Steps its schedule by itself, or does not."""

    def __init__(self, steps: bool = True) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.steps = steps

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        its: Any = self.optimizers()
        its.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx)["loss"])
        its.step()
        if self.steps:
            self.lr_schedulers().step()


class Averaging(pl.Callback):
    """The checkpoint of an epoch's end holds other weights."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.net[5].bias += 1
            trainer.save_checkpoint(Path(trainer.default_root_dir, "average.ckpt"))
            pl_module.net[5].bias -= 1


AVERAGES = (
    "1 of 6 weights are written other than those that the training goes on from, as averages are: a resume must "
    "put the others back"
)


@pytest.mark.parametrize(
    ("make", "callback", "notes"),
    [
        (Task, pl.callbacks.ModelCheckpoint(every_n_epochs=1), []),
        (Manual, pl.callbacks.ModelCheckpoint(every_n_epochs=1), []),
        (partial(Manual, steps=False), pl.Callback(), ["ExponentialLR made no step in a whole epoch"]),
        (Task, Averaging(), [AVERAGES]),
    ],
)
def test_idle_schedules_and_averages_that_are_saved_are_noted(
    make: Callable[[], Task], callback: pl.Callback, notes: list[str], tmp_path: Path
) -> None:
    saves = isinstance(callback, pl.callbacks.ModelCheckpoint)
    trained(tmp_path, watch := Replay(1), callback, make=make, max_steps=-1, max_epochs=3, enable_checkpointing=saves)
    assert [note for report in watch.reports if report.subject for note in report.notes] == notes
    assert {report.outcome for report in watch.reports} == {"pass"}


class Beginning(pl.Callback):
    """Where a training begins it changes one weight, or puts an equal one in its place."""

    def __init__(self, added: float) -> None:
        self.added = added

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net[5].bias.data = pl_module.net[5].bias.data + self.added


@pytest.mark.filterwarnings("ignore:.*ckpt_path", "ignore:.*resuming from")
@pytest.mark.parametrize("added", [0.0, 1.0])
def test_weights_that_are_not_those_of_a_checkpoint_without_replay_are_noted(added: float, tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(dirpath=tmp_path, filename="saved", every_n_train_steps=2)
    trained(tmp_path, saving, max_steps=2, enable_checkpointing=True)
    for folder, ckpt_path in (("resumed", tmp_path / "saved.ckpt"), ("begun", None)):
        watch = Replay(1)
        tmp_path.joinpath(folder).mkdir()
        trained(tmp_path / folder, Beginning(added), watch, max_steps=4, ckpt_path=ckpt_path)
        text = "1 of 6 weights are others at the first step than in the checkpoint: something has changed them since"
        notes = [note for its in watch.reports if its.subject.startswith("checkpoint") for note in its.notes]
        assert notes == [text] * (added != 0 and ckpt_path is not None)
        assert {report.outcome for report in watch.reports} == {"pass"}


class Forgetful(Task):
    """Its checkpoint's weights of one layer are not loaded, and its optimizer begins anew for one parameter."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"]["net.5.bias"].zero_()
        del checkpoint["optimizer_states"][0]["state"][0]


@pytest.mark.filterwarnings("ignore:.*ckpt_path", "ignore:.*resuming from", "ignore:.*not empty")
def test_a_resumed_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    """Lightning's own loader begins anew where the checkpoint lies within an epoch."""
    right = resumed(tmp_path / "right", Task, at=16)
    assert {subject: report.outcome for subject, report in right.items()} == {
        "resume at step": "pass",
        "": "pass",
        "data of epoch": "pass",
    }
    assert right["resume at step"].counts["states"] > 40
    wrong = resumed(tmp_path / "wrong", Forgetful, at=10)
    assert wrong[""].outcome == "pass"  # each step by itself is right
    found = {finding.tensor: finding.text for finding in wrong["resume at step"].findings}
    assert set(found) == {"net.5.bias", "net.0.weight: step", "net.0.weight: exp_avg", "net.0.weight: exp_avg_sq"}
    (again,) = wrong["data of epoch resumed at batch"].findings
    assert again.part == "data"
    assert again.tensor.endswith(" of 40 samples")


@pytest.mark.parametrize(
    ("before", "finding", "note"),
    [([4, 5], "", ""), ([3, 5], "are read again", ""), (None, "", "without Replay"), ([3, 3], "", "with replacement")],
)
def test_the_rest_of_an_epoch(before: list[int] | None, finding: str, note: str) -> None:
    report = Report("ddp", 2, "32-true", 0, subject="data of epoch 1, resumed at batch 1")
    judge_resumed_epoch(report, [0, 3], before)
    assert [finding in its.text for its in report.findings] == [True] * bool(finding)
    assert note in " ".join(report.notes)


def test_ranks_that_end_with_other_parameters_are_found() -> None:
    weight, bias = torch.ones(2), torch.zeros(1)
    ranks = [{"weight": digest(weight), "bias": digest(bias)} for _ in range(3)]
    report = Report("ddp", 3, "32-true", 7)
    judge_replicas(report, ranks)
    assert (report.outcome, report.counts["states"]) == ("pass", 4)
    ranks[2]["weight"] = digest(weight + 1e-7)
    judge_replicas(report, ranks)
    assert [(its.part, its.rank, its.tensor) for its in report.findings] == [("parameters", 2, "weight")]


def test_an_epoch_in_the_order_of_the_first_is_known_where_the_sampler_says_it() -> None:
    sampler = DistributedSampler(Pictures(), num_replicas=2, rank=1)
    loader = DataLoader(Pictures(), sampler=sampler, batch_size=4)
    first = [*sampler]
    sampler.set_epoch(3)
    assert is_order_of_epoch_0(loader, first, epoch=3)
    assert not is_order_of_epoch_0(loader, [*sampler], epoch=3)
    assert not is_order_of_epoch_0(loader, first, epoch=0)
    assert sampler.epoch == 3
    assert not is_order_of_epoch_0(DataLoader(Pictures(), shuffle=True), first, epoch=3)


CLIPPED = "--trainer.gradient_clip_val=0.1"
OWN_MODES = {
    "single": mode_flags("single"),
    "dp": mode_flags("dp", 4),
    "mp-micro": mode_flags("LayerParallelStrategy", num_microbatches=4),
    "ddp_mp": mode_flags("DDPLayerParallelStrategy", num_stages=1),
    "ddp_flat": [*mode_flags("ddp_flat"), CLIPPED],
    "fsdp2": [*mode_flags("fsdp2"), CLIPPED],
    "pp": [*mode_flags("pp"), CLIPPED, "--trainer.accumulate_grad_batches=2"],
    "pp-zb": mode_flags("PipelineStrategy", schedule="ZBVZeroBubble"),
    "ddp_pp": mode_flags("ddp_pp", 4),
}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("mode", "precision"),
    graded(
        *((mode, "32-true") for mode in ("single", "dp", "mp-micro", "ddp_mp", "fsdp2")),
        ("pp", "bf16-mixed"),
        slow=[(mode, "32-true") for mode in ("ddp_flat", "pp", "pp-zb", "ddp_pp")],
        exhaustive=[(mode, "bf16-mixed") for mode in OWN_MODES if mode != "pp"],
    ),
)
def test_modes_with_a_forward_fn_of_their_own_are_judged(mode: str, precision: str, tmp_path: Path) -> None:
    """With layers that draw random numbers, of which each part of a batch has its own."""
    flags = [*own_network("Drawing"), *OWN_MODES[mode], *callback("lit_cifar.Replay"), "--trainer.max_steps=3"]
    launch("fit", *flags, f"--trainer.precision={precision}", f"--run_dir={tmp_path}")
    report, *of_replicas = json.loads((tmp_path / "replay.json").read_text())
    assert report["num_steps"] == 3
    assert {its["outcome"] for its in (report, *of_replicas)} == {"pass"}


@pytest.mark.parametrize("module", [Task, Tokens])
def test_observing_changes_nothing(module: type[pl.LightningModule], tmp_path: Path) -> None:
    each = 1 if module is Task else 2  # accumulated, so that batches are joined
    observed = trained(tmp_path, watch := Replay(2, at=(0, 3)), make=module, accumulate_grad_batches=each)
    alone = trained(tmp_path, make=module, accumulate_grad_batches=each)
    for name, value in alone.state_dict().items():
        assert torch.equal(value, observed.state_dict()[name]), name
    assert [report.outcome for report in watch.reports] == ["pass", "pass"]
    assert [report.first_step for report in watch.reports] == [0, 3]
    assert ["joined to one" in " ".join(report.notes) for report in watch.reports] == [module is Tokens] * 2
    assert [path.name for path in tmp_path.iterdir()] == ["replay.json"]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", graded("fsdp2", slow=["pp"]))
def test_observing_a_divided_network_leaves_its_metrics_alone(mode: str, tmp_path: Path) -> None:
    """The copy that is replayed has metrics of its own."""
    flags = [*TINY, *mode_flags(mode), "--trainer.max_steps=2"]
    launch("fit", *flags, f"--run_dir={tmp_path / 'alone' / 'run'}")
    replay = callback("lit_cifar.Replay", steps=1)  # before metrics are logged
    launch("fit", *flags, f"--run_dir={tmp_path / 'observed' / 'run'}", *replay)
    alone, observed = (Record(tmp_path / name).logged for name in ("alone", "observed"))
    assert observed == alone != {}


def test_a_layer_that_begins_to_learn_within_the_steps_is_not_judged(tmp_path: Path) -> None:
    class Thawed(BaseFinetuning):
        def freeze_before_training(self, pl_module: Any) -> None:
            self.freeze(pl_module.net[0])

        def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)

    class Learning(Task):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.net[5].parameters(), lr=0.1)

    trained(tmp_path, Thawed(), watch := Replay(4), make=Learning, max_steps=4, limit_train_batches=2)
    assert watch.reports[-1].abstained == [
        "an optimizer gets a new group of parameters in these steps: replay others"
    ], watch.reports
    assert [report.num_steps for report in watch.reports if not report.subject] == [2]


class OwnBatches:
    """Batches of unequal sizes; nobody knows how many."""

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([*range(start, min(start + size, 64))] for size, start in ((3, 0), (5, 3), (8, 8), (48, 16)))


def test_a_loader_may_have_no_length(tmp_path: Path) -> None:
    watch = Replay(1)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=2, default_root_dir=tmp_path, callbacks=[watch], **SILENT)
    trainer.fit(Task(), DataLoader(Pictures(), batch_sampler=OwnBatches()))
    assert [report.outcome for report in watch.reports if not report.subject] == ["pass"]


class Words(pl.LightningModule):
    """Its gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(10, 4, sparse=True)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.words(batch).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_sparse_gradient_is_not_judged(tmp_path: Path) -> None:
    watch = Replay(1)
    trainer = pl.Trainer(accelerator="cpu", max_steps=3, default_root_dir=tmp_path, callbacks=[watch], **SILENT)
    trainer.fit(Words(), DataLoader(torch.arange(32) % 10, batch_size=8))
    assert trainer.global_step == 3
    assert [*watch.reports[0].abstained] == ["sparse gradients and tensors are not compared"]


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.eye(3).to_sparse(), torch.eye(3)),
        (torch.tensor([1 + 2j]).conj(), torch.tensor([1 - 2j])),
        (torch.tensor([1 - 2j]).conj().imag, torch.tensor([2.0])),
    ],
    ids=["sparse", "conjugate", "negative"],
)
def test_a_digest_is_of_values_however_they_are_held(one: Tensor, other: Tensor) -> None:
    assert (digest(one), device_digest(one)) == (digest(other), device_digest(other))


class Counted(Logger):
    """Counts what it is told."""

    name, version, num_told = "counted", 0, 0

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.num_told += "own" in metrics

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass


class Tells(Task):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        assert self.logger is not None
        assert self.logger.name == "counted"
        self.logger.log_metrics({"own": 1.0})
        return super().training_step(batch, batch_idx)


def test_a_repeated_step_writes_into_no_logger(tmp_path: Path) -> None:
    logger = Counted()
    trained(tmp_path, watch := Replay(3), make=Tells, logger=logger, max_steps=4, log_every_n_steps=1)
    assert (watch.reports[0].outcome, logger.num_told) == ("pass", 4)


@pytest.mark.parametrize("numbers", [np.arange(8), torch.arange(8), range(8)], ids=["NumPy", "torch", "Python"])
def test_a_sampler_may_give_numbers_of_any_kind(numbers: Iterable[Any]) -> None:
    read = ReadIds()
    try:
        for _ in DataLoader(range(8), batch_size=4, sampler=[*numbers]):  # type: ignore[arg-type]
            pass
    finally:
        read.close()
    assert [reading.samples() for reading in read.readings] == [[*range(8)]]


def test_samples_of_evaluations_are_not_kept(tmp_path: Path) -> None:
    class Evaluated(Task):
        def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
            self.log("val_loss", cross_entropy(self.net(batch["x"]), batch["y"]), batch_size=4)

        def val_dataloader(self) -> DataLoader[dict[str, Any]]:
            return DataLoader(Pictures(), batch_size=4)

    left: list[int] = []

    class Look(pl.Callback):
        def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            assert watch._epochs is not None
            left.append(len(watch._epochs._read.readings))

    trained(tmp_path, watch := Replay(1), Look(), make=Evaluated, max_steps=-1, max_epochs=4)
    assert left == [1]  # that of the last epoch


def test_a_failure_can_end_the_training(tmp_path: Path) -> None:
    class Scaled(pl.Callback):
        def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: Any, optimizer: Any) -> None:
            pl_module.net[5].bias.grad += 1e-6

    before = _BaseDataLoaderIter._next_index
    with pytest.raises(ReplayError, match=r"net.5.bias \(gradient that the optimizer used\) differs"):
        trained(tmp_path, Scaled(), Replay(1, raises=True))
    assert _BaseDataLoaderIter._next_index is before, "loaders are observed on"


def test_the_bound_of_a_mean_is_kept_by_every_order_and_by_no_wrong_mean() -> None:
    torch.manual_seed(0)
    for num_ranks in (2, 3, 8):
        gradients = [torch.randn(1000) for _ in range(num_ranks)]
        mean = ExactMean(num_ranks)
        for gradient in gradients:
            mean.add({"g": gradient})
        for _ in range(5):
            order = torch.randperm(num_ranks).tolist()
            total = sum((gradients[rank] / num_ranks for rank in order[1:]), gradients[order[0]] / num_ranks)
            assert mean.share("g", total) <= 1
        wrong = total.clone()
        wrong[7] *= 1 + 1e-5
        assert mean.share("g", wrong) > 1
        assert mean.share("g", torch.full_like(total, float("nan"))) > 1
    assert gamma(2, torch.float32) == pytest.approx(2**-23, rel=1e-6)


def test_the_mean_of_complex_gradients_has_both_parts() -> None:
    mean = ExactMean(2)
    for gradient in (torch.tensor([1 + 2j]), torch.tensor([3 + 4j])):
        mean.add({"g": gradient})
    assert mean.share("g", torch.tensor([2 + 3j])) <= 1 < mean.share("g", torch.tensor([2 + 3.1j]))


def test_digests_see_every_bit_but_the_sign_of_zero() -> None:
    value = torch.tensor([0.0, 1.0])
    assert digest(value).bits == digest(torch.tensor([-0.0, 1.0])).bits
    assert digest(value).bits != digest(torch.tensor([0.0, 1.0 + 2**-23])).bits
    assert digest(value).bits != digest(value.double()).bits
    assert digest(torch.tensor([3 + 4j])).norm == 5.0
    assert digest(torch.tensor([complex(0.0, -0.0)])).bits == digest(torch.zeros(1, dtype=torch.complex64)).bits


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere.Net"], "cannot be imported"),
        (["Net"], "cannot be imported"),
        (["replay_cases.Pictures"], "is no LightningModule"),
        (["replay_cases.Task", "--data=replay_cases.Task"], "is no LightningDataModule"),
        (["replay_cases.Task", "--steps=0"], "steps=0 judges nothing"),
        (["replay_cases.Task", "--model.widht=3"], "unrecognized arguments: --model.widht=3"),
        (["replay_cases.Task", "--trainer.strategy=none"], "invalid strategy"),
    ],
)
def test_bad_input_is_refused(args: list[str], message: str) -> None:
    printed = refused("verify", "--module", *args, says=[message])
    assert printed.count("options of the trainer") <= 1, "one remedy"


def test_it_loads_neither_our_data_nor_our_strategies() -> None:
    code = (
        "import sys, lit_cifar; lit_cifar.Replay; "
        "print([name for name in sys.modules if name.startswith(('lit_cifar.data', 'lit_cifar.strategies'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=True)
    assert done.stdout.strip() == "[]"
