"""`replay` passes a loop whose habits are often a mistake, and notes each of them."""

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, Subset, TensorDataset

from lit_cifar import replay
from lit_cifar.checks.repeated_step.attributes import Attributes
from lit_cifar.checks.repeated_step.digests import Surroundings
from lit_cifar.checks.repeated_step.events import Call
from lit_cifar.checks.replay.evaluation import Logged, Seen, judge_evaluation
from lit_cifar.checks.replay.step_data import judge_batches, judge_draws, judge_draws_between
from lit_cifar.checks.replay.verdict import Finding, Report

STEPS, BATCHES = 3, 2  # that are accumulated

HABITS = {
    "none": "",
    "clips": "by one factor, as by clipping",
    "clips a part": "by another factor for each parameter",
    "clips by value": "not by a factor",
    "clips what is scaled": "before the scale of the loss is taken out of them",
    "clips before the pass": "a call changes gradients of the pass before it, as by clipping too early",
    "sets a rate for each batch": "a learning rate changes between the microbatches of a step",
    "computes dropout again": "a backward pass draws random numbers, as dropout that is computed again",
    "computes statistics again": "a backward pass changes 1.running_mean, as statistics that count a batch twice",
    "steps a schedule for each batch": "a schedule makes several steps between two steps of an optimizer",
    "zeroes for each batch": "the gradient of 0.bias is zeroed before a step has used it",
    "zeroes never": "the gradient of 0.bias is not zeroed after a step, so it is used again",
    "leaves frozen statistics in training": "1 is frozen, and still changes its buffers: it needs eval mode",
    "keeps a layer in a list": "2 parameters that the loss depends on are in no module and no optimizer",
    "leaves a layer to no optimizer": "2 of 6 parameters, 2.bias among them: each gets a gradient, and is in no",
    "has a layer that nothing uses": "2 of 8 parameters, 2.extra.bias among them: each is in an optimizer, and no loss",
}


class Listed(nn.Sequential):
    """With a last layer that it does not know."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.others = [nn.Linear(3, 3)]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.others[0](super().forward(inputs))
        return found


class Checkpointed(nn.Sequential):
    """With layers that are computed again in the backward pass, by another random state."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = checkpoint(super().forward, inputs, use_reentrant=False, preserve_rng_state=False)
        return found


class Clipping(nn.Sequential):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01)
        found: torch.Tensor = super().forward(inputs)
        return found


KINDS = {"list": Listed, "again": Checkpointed, "before the pass": Clipping}


def trained(habit: str) -> Report:
    torch.manual_seed(5)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)]
    if "dropout" in habit:
        layers[1] = nn.Dropout(0.1)
    model = next((kind for words, kind in KINDS.items() if words in habit), nn.Sequential)(*layers)
    if "nothing uses" in habit:
        model[2].register_module("extra", nn.Linear(1, 1))
    if "frozen" in habit:
        model(torch.randn(4, 6)).sum().backward()  # leaves a gradient that is never used
        model[1].requires_grad_(False)
    its = [its for name, its in model.named_parameters() if its.requires_grad]
    optimizer = torch.optim.SGD(its[:-2] if "no optimizer" in habit else its, lr=0.1)
    optimizer.zero_grad()
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    scaler = torch.amp.GradScaler("cpu", enabled="scaled" in habit)
    with replay(model, optimizer, steps=STEPS) as watched:
        for _ in range(STEPS):
            for _ in range(BATCHES):
                if "zeroes for each" in habit:
                    optimizer.zero_grad()
                if "rate" in habit:
                    optimizer.param_groups[0]["lr"] *= 0.9
                loss = cross_entropy(model(torch.randn(4, 6)), torch.randint(3, (4,))) / BATCHES
                scaler.scale(loss).backward()
            if "value" in habit:
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            elif "clips" in habit and "before" not in habit:
                nn.utils.clip_grad_norm_(model[0].parameters() if "part" in habit else model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            for _ in range(BATCHES if "schedule" in habit else 1):
                schedule.step()
            if "zeroes" not in habit:
                optimizer.zero_grad()
    return watched.report


def test_a_finding_is_printed_once_where_it_is_first_so() -> None:
    report = Report("ddp", 2, "32-true", 0)
    report.findings = [Finding("data", 0, None, "the order", "is wrong", epoch=epoch) for epoch in (1, 2)]
    report.findings.append(Finding("data", 0, None, "the order", "is another"))
    assert [line for line in report.lines() if "order" in line] == [
        "  data: epoch 1: the order is wrong",
        "  data: step 0: the order is another",
    ]


@pytest.mark.parametrize(
    ("size", "values", "same", "finding"),
    [
        (4, 20, True, "4 of 4 samples"),
        (4, 8, True, "1 of 1 batches"),  # samples have too few values to be told apart
        (4, 8, False, ""),
        (2, 2, True, ""),
    ],
)
def test_batches_without_ids_are_compared_by_content(size: int, values: int, same: bool, finding: str) -> None:
    batches = [torch.randn(size, values)] * 2 if same else [torch.randn(size, values) for _ in range(2)]
    here = Surroundings.now(torch.device("cpu"))
    calls = {
        rank: [Call(((its,), {}), here, {}, {}, {}, Attributes(b"", [], set()), {})] for rank, its in enumerate(batches)
    }
    report = Report("ddp", 2, "32-true", 0)
    judge_batches(report, 0, calls)
    assert [its.tensor for its in report.findings] == [finding] * bool(finding)
    assert ["too few values" in its for its in report.not_looked_at] == [True] * (values == 2)


@pytest.mark.parametrize(
    ("of_rank_1", "noted"),
    [
        ([(1, 2), (3, 4), (5, 6)], True),
        ([(1, 2), (3, 4), (7, 6)], False),
        ([(1, 2), (2, 4), (4, 6)], False),  # nothing is drawn between them
        ([(1, 2), (3, 3), (3, 6)], False),
        ([(1, 2), (3, 4)], False),  # a loader may have drawn its seed
    ],
)
def test_equal_augmentation_is_noted(of_rank_1: list[tuple[int, int]], noted: bool) -> None:
    of_rank_0 = of_rank_1 if of_rank_1[-1][0] != 7 else [(1, 2), (3, 4), (5, 6)]
    report = Report("ddp", 2, "32-true", 0)
    ranks = [of_rank_0, of_rank_1]
    judge_draws_between(
        report, {rank: [((rank, begin), (rank, end)) for begin, end in its] for rank, its in enumerate(ranks)}
    )
    assert ["augmentation is equal" in note for note in report.notes] == [True] * noted


def test_masks_are_spoken_of_where_there_is_dropout() -> None:
    here = Surroundings.now(torch.device("cpu"))
    for layer, text in ((nn.Dropout(), "dropout has the same masks"), (nn.ReLU(), "inside their steps")):
        report = Report("ddp", 2, "32-true", 0)
        judge_draws(report, {0: [here], 1: [here]}, nn.Sequential(layer))
        assert [text in note for note in report.notes] == [True]


@pytest.mark.parametrize("habit", HABITS)
def test_a_habit_is_noted(habit: str) -> None:
    report = trained(habit)
    assert report.outcome == "pass", report
    assert HABITS[habit] in " ".join(report.notes)
    assert bool(report.notes) == (habit != "none")


@pytest.mark.filterwarnings("ignore:The epoch parameter")
def test_a_schedule_may_be_told_the_epoch() -> None:
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    with replay(model, optimizer, steps=1) as watched:
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        schedule.step(1)
    assert watched.report.outcome == "pass"


def report_of_loop(sampler: DistributedSampler[int] | None) -> Report:
    data = TensorDataset(torch.randn(24, 6))
    model = nn.Linear(6, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(Subset(data, range(4, 24)), batch_size=5, sampler=sampler, shuffle=sampler is None)
    with replay(model, optimizer, steps=8) as watched:
        for _ in range(2):
            for (inputs,) in loader:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            for _ in DataLoader(data, batch_size=5):  # an evaluation: read twice in one order, and not judged
                pass
    return watched.report


def test_the_epochs_of_a_loop_are_judged() -> None:
    right = report_of_loop(None)
    wrong = report_of_loop(DistributedSampler(range(20), num_replicas=1, rank=0))
    assert (right.outcome, right.notes) == ("pass", [])
    assert right.not_looked_at == ["evaluations, and whether a schedule makes a step in each epoch"]
    assert [str(its) for its in wrong.findings] == [
        "data: epoch 1: the order is that of the epoch before: call set_epoch on the sampler"
    ]


def test_an_evaluation_of_several_models_is_noted() -> None:
    """And a metric that was not reset."""
    report = Report("ddp", 2, "32-true", 0, subject="evaluation")
    seen = [Seen({"loss": Logged(1.0, 1.0, 1, 1)}, ["accuracy"], {"mean": bits}) for bits in (1, 2)]
    judge_evaluation(report, seen, {"loss": torch.tensor(1.0)}, [[0], [1]])
    assert report.outcome == "pass"
    assert report.notes == [
        "the ranks evaluate with unlike buffers, as mean: what they log is of several models",
        "accuracy goes on counting from before the evaluation: call reset() on it",
    ]


@pytest.mark.parametrize(("offered", "noted"), [(0, False), (2, False), (3, True)])
def test_samples_that_are_not_evaluated_are_noted(offered: int, noted: bool) -> None:
    report = Report("ddp", 2, "32-true", 0, subject="evaluation")
    judge_evaluation(report, [Seen({}, [], {})] * 2, {}, [[0], [1]], offered)
    assert report.notes == [f"2 of {offered} samples are evaluated, as with drop_last"] * noted
    assert not report.not_looked_at  # no value was logged


@pytest.mark.parametrize(
    ("logged", "value", "is_right"),
    [("nan", "nan", True), ("inf", "inf", True), ("nan", "1", False), ("1", "nan", False), ("inf", "-inf", False)],
)
def test_a_mean_that_is_no_number_is_logged_as_such(logged: str, value: str, is_right: bool) -> None:
    report = Report("ddp", 1, "32-true", 0, subject="evaluation")
    own = Logged(float(value), abs(float(value)), 1, 1)
    judge_evaluation(report, [Seen({"auc": own}, [], {})], {"auc": torch.tensor(float(logged))}, [[0]])
    assert report.outcome == ("pass" if is_right else "fail")
    assert report.not_looked_at == ["whether each logged value is a mean over samples, whatever the size of batches"]


def test_what_is_logged_at_the_end_is_said_not_to_be_looked_at() -> None:
    """And what is logged of one of several loaders, whose number is in the name."""
    report = Report("ddp", 2, "32-true", 0, subject="evaluation")
    seen = [Seen({"loss": Logged(1.0, 1.0, 4, 1)}, [], {}, {"acc"})] * 2
    judge_evaluation(report, seen, {"loss/dataloader_idx_0": torch.tensor(0.25)}, [])
    assert report.not_looked_at[0].startswith("acc, loss, ")


@pytest.mark.parametrize("is_guessed", [True, False])
def test_batches_that_are_counted_as_more_samples_than_were_read_are_noted(is_guessed: bool) -> None:
    report = Report("ddp", 2, "32-true", 0, subject="evaluation")
    seen = [Seen({"loss": Logged(n, n, n, 1, is_guessed), "f1": Logged(n, n, n, 1)}, [], {}) for n in (5, 7)]
    judge_evaluation(report, seen, dict.fromkeys(["loss", "f1"], torch.tensor(1.0)), [[0], [1]])
    assert report.outcome == "pass"
    text = "loss is weighted by batches of 12 samples in all, as Lightning guesses, and 2 are read: pass batch_size to"
    assert [note.startswith(text) for note in report.notes] == [True] * is_guessed


@pytest.mark.parametrize("init_scale", [1024.0, 2.0**127])
def test_a_fused_optimizer_is_told_the_scale_and_where_gradients_overflow(init_scale: float) -> None:
    torch.manual_seed(5)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale)
    with replay(model, optimizer, steps=2) as its:
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(100 * model(torch.randn(8, 4)).square().mean()).backward()
            scaler.step(optimizer)
            scaler.update()
    assert its.report.outcome == "pass", its.report.findings
