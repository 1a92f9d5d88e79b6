"""`verify`: the comparison as plain functions; `test_parity` has every mode compared for real."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY as TINY_FIT
from commands import callback, own_network, run_here
from torch import Tensor, nn
from verifying import settings

from lit_cifar.checks.verdict import Outcome, exit_status
from lit_cifar.data.ghost_batches import GhostBatches
from lit_cifar.errors import ConfigError
from lit_cifar.launch.forked import EndedRun
from lit_cifar.reporting.evaluation_tables import write_per_rank
from lit_cifar.reporting.rank_statistics import AccuracyCount
from lit_cifar.task.module import LitResNet
from lit_cifar.tools.modes import sized_modes
from lit_cifar.tools.verify import runs
from lit_cifar.tools.verify.command import verify, verify_modes
from lit_cifar.tools.verify.configuration import TINY, Configuration
from lit_cifar.tools.verify.files import checkpoint_problems, per_rank_problems
from lit_cifar.tools.verify.judge import VerifiedMode, logged_problems, logits_problems
from lit_cifar.tools.verify.processes import own_problems, peer_problems, unequal_samples
from lit_cifar.tools.verify.record import (
    EXACT_BOUND,
    KINDS,
    Evaluated,
    Record,
    gap,
    gaps_of_step,
    note_largest,
    step_problems,
)
from lit_cifar.tools.verify.recorder import Snapshot, State, Step, Trace, numbers, short_digest
from lit_cifar.tools.verify.verifier import Case, Verifier
from tests.mutations.catalogue import CLONE, on_python_path


def step(*, loss: float = 2.0, weight: float = 0.5, mean: float = 0.1, momentum: float = 0.3, lr: float = 0.1) -> Step:
    """A network of two layers, the second with BatchNorm, after a step."""
    of = partial(torch.tensor, dtype=torch.float64)
    return {
        ("loss", "loss"): of(loss),
        ("parameters", "conv.weight"): of([[weight] * 2] * 2),
        ("parameters", "bn.weight"): of([1.0, 1.0]),
        ("buffers", "bn.running_mean"): of([mean, mean]),
        ("optimizer", "conv.weight:momentum_buffer"): of([momentum, momentum]),
        ("optimizer", "group 0:lr"): of(lr),
    }


def test_small_values_are_compared_absolutely_and_nan_equals_nothing() -> None:
    assert gap(torch.tensor([0.5]), torch.tensor([0.25])) == 0.25
    assert gap(torch.tensor(math.nan), torch.tensor(math.nan)) == math.inf


@pytest.mark.parametrize(
    ("change", "kind", "name"),
    [
        ({}, None, None),
        ({"loss": 2.1}, "loss", "loss"),
        ({"weight": 0.6}, "parameters", "conv.weight"),
        ({"mean": 0.2}, "buffers", "bn.running_mean"),
        ({"momentum": 0.4}, "optimizer", "conv.weight:momentum_buffer"),
        ({"lr": 0.2}, "optimizer", "group 0:lr"),
    ],
)
def test_a_change_of_each_kind_is_seen_and_named(change: dict[str, float], kind: str | None, name: str | None) -> None:
    gaps, largest = gaps_of_step(step(**change), step()), dict[str, float]()
    note_largest(largest, gaps)
    assert [*largest] == [*KINDS]
    assert [k for k, value in largest.items() if value] == [kind] * bool(change)
    problems = step_problems(gaps, dict.fromkeys(KINDS, EXACT_BOUND if change else 0.0), step=2)
    named = [(words.split(" differs ")[0], words.rpartition(" ")[2]) for words in problems]
    assert named == ([(f"step 2: {name}", f"({kind})")] if change else [])


class Unprintable(Tensor):
    def __repr__(self, *, tensor_contents: object = None) -> str:
        raise RuntimeError("tensor already had autograd metadata")


def test_a_digest_is_of_bits_and_prints_no_tensor() -> None:
    plain = torch.tensor([0.0, 1.0])
    assert short_digest(plain.as_subclass(Unprintable)) == short_digest(plain) != short_digest(-plain)
    assert short_digest(torch.tensor([0.0])) != short_digest(torch.tensor([-0.0]))
    assert short_digest(1.5) == short_digest(1.5) != short_digest(-1.5)


def test_the_first_difference_follows_the_network_and_the_others_are_counted() -> None:
    gaps = {("optimizer", "a"): 9.0, ("parameters", "a"): 0.0, ("parameters", "b"): 2.0, ("parameters", "c"): 3.0}
    problems = step_problems(gaps, dict.fromkeys(KINDS, 1.0), step=1)
    assert problems == ["step 1: b differs by 2.0e+00, allowed 1.0e+00 (parameters), and 2 more"]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ([[1, 3], [2, 4]], []),
        ([[4, 3, 2, 1]], []),
        ([[1, 3], [2]], ["missing"]),
        ([[1, 3], [1, 3]], ["missing", "too often"]),
        ([[1, 3], [2, 4, 5]], ["unknown"]),
    ],
)
def test_samples_are_compared_as_sets_in_which_each_id_is_once(found: list[list[int]], words: list[str]) -> None:
    problems = unequal_samples(found, [1, 2, 3, 4])
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_what_is_printed_beside_an_error_is_not_the_error() -> None:
    ended = EndedRun(1, "", "W: of torch\nlit_cifar: error: wrong\n  right\nE: of torch\n  at 3\n", 2.0)
    assert runs.last_words(ended) == "exit status 1 after 2 s\n  wrong\n  right"
    error = runs.refusal(ended)
    assert (error.problem, error.remedy) == ("wrong", "right")


def test_with_virtual_replicas_a_bit_is_too_much() -> None:
    bounds = settings(num_parts=4).bounds
    assert settings(num_parts=4).in_words(GhostBatches()) == "one device, 4 virtual replicas"
    assert step_problems(gaps_of_step(step(loss=3.0), step()), bounds, step=1) == []  # the loss of another part
    problems = step_problems(gaps_of_step(step(momentum=math.nextafter(0.3, 1)), step()), bounds, step=1)
    assert problems == ["step 1: conv.weight:momentum_buffer differs by 5.6e-17, allowed 0.0e+00 (optimizer)"]


def verified(folder: Path, *ends: EndedRun, **options: bool) -> list[VerifiedMode]:
    """What is found of `ddp`, `pp` and so on, whose runs end so."""
    modes = [sized_modes(2)[name] for name, _ in zip(("ddp", "pp"), ends, strict=False)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Verifier, "run_alone", lambda self, *args: Record(self.new_folder("reference")))
        patch.setattr(Verifier, "run_mode", lambda self, mode, *args, **kwargs: ends[modes.index(mode)])
        return verify_modes(Verifier(settings(), 2, folder), modes, **options)


def test_what_is_refused_is_said_once_and_left_out_of_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "lit_cifar: error: no such thing\n  pass another\n"
    refused, crashed = EndedRun(2, "", f"{words}[rank 1] {words}", 1.0), EndedRun(1, "", "OSError", 1.0)
    for ends, options in (([refused, crashed], {}), ([refused, refused], {"leave_out": True})):
        with pytest.raises(ConfigError, match="no such thing") as raised:
            verified(tmp_path, *ends, **options)
        assert (raised.value.problem, raised.value.remedy) == ("no such thing", "pass another")
    assert [row.mode for row in verified(tmp_path, refused, crashed, leave_out=True)] == ["pp"]
    assert capsys.readouterr().out == "left out ddp: no such thing\n"


@pytest.mark.parametrize(
    ("outcomes", "status"),
    [
        (["pass", "abstain"], 0),
        (["pass", "abstain", "fail", "crash"], 1),
        (["pass", "crash"], 3),
        (["abstain"], 3),
        ([], 3),
    ],
)
def test_the_exit_status_is_a_pass_only_if_something_was_compared(outcomes: list[Outcome], status: int) -> None:
    assert exit_status(outcomes) == status


def test_a_run_that_crashed_is_not_called_wrong(tmp_path: Path) -> None:
    (row,) = verified(tmp_path, EndedRun(1, "", "OSError: disk full", 1.0))
    assert (row.outcome, row.problems) == ("crash", ["exit status 1 after 1 s\n  OSError: disk full"])


def test_a_network_that_draws_random_numbers_needs_virtual_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not settings().draws_random_numbers()  # but for its first weights
    network = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(3 * 32 * 32, 10))
    monkeypatch.setattr(Configuration, "module", LitResNet(network=network))
    monkeypatch.setattr(Configuration, "from_flags", lambda *args, **kwargs: settings())
    with pytest.raises(ConfigError, match="draws random numbers"):
        verify(["ddp"])


def test_a_limit_of_loader_batches_is_as_many_steps_on_one_device() -> None:
    own = settings()
    own.config["trainer"] |= {"limit_train_batches": 4, "accumulate_grad_batches": 2}
    assert "--trainer.limit_train_batches=4" in own.length_flags(steps=4, accumulation=2)
    assert "--trainer.limit_train_batches=2" in own.length_flags(steps=4, accumulation=1)


@pytest.mark.parametrize(
    ("args", "added"),
    [
        (["--trainer.precision=bf16-mixed"], [*TINY, "--trainer.precision=64-true"]),
        (["--model.arch=resnet34", "--virtual_replicas=4"], []),
        (["--model.network=my_package.Net"], ["--trainer.precision=64-true"]),
    ],
)
def test_what_verify_adds(args: list[str], added: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(num_parts=4 if "--virtual_replicas=4" in args else None).config
    config["trainer"]["precision"] = "bf16-mixed"
    monkeypatch.setattr("lit_cifar.tools.verify.configuration.all_settings", lambda *args, **kwargs: config)
    found = Configuration.from_flags(args, devices=2, folder=tmp_path).flags
    assert [flag for flag in found if flag in (*TINY, "--trainer.precision=64-true")] == added


FEW_VALUES = [
    *["--model.arch=tiny", "--model.stem=imagenet", "--model.optimizer.lr=0.1", "--data.seed=3", "--data.num_train=39"],
    *["--data.val_size=15", "--data.batch_size=16", "--trainer.accumulate_grad_batches=2"],
]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("args", "bound", "nudge", "outcome"),
    [(FEW_VALUES, 1e-12, 0.0, "abstain"), (FEW_VALUES, 1e-12, 1e-10, "fail"), ([], 1e-9, 1e-10, "fail")],
)
def test_where_rounding_is_magnified_it_is_not_called_a_mistake(
    args: list[str], bound: float, nudge: float, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """BatchNorm over two to four values of a channel does so; a mistake of a size that it cannot explain is found."""
    monkeypatch.setenv("PYTHONPATH", on_python_path(CLONE / "tests"))
    for module in ("verifier", "configuration"):
        monkeypatch.setattr(f"lit_cifar.tools.verify.{module}.EXACT_BOUND", bound)
    configuration = Configuration.from_flags(args, devices=2, folder=tmp_path)
    case = Case(sized_modes(2)["dp"], tuple(callback("recorder.Nudge", by=nudge)))
    ((row, _),) = Verifier(configuration, 3, tmp_path).compare([case])
    assert row.outcome == outcome, row.problems
    assert ("rounding explains differences up to" in row.problems[0]) == (outcome == "abstain")


@pytest.mark.parametrize(
    ("status", "steps", "unlike", "said"),
    [
        (None, 0, [], "too slow .* time limit"),
        (1, 0, [], "cannot train this configuration: exit status 1"),
        (0, 1, [], "ends a run after 1 of 2 steps"),
        (0, 2, ["fc.bias is not that of step 2"], "evaluates or saves other weights .*: fc.bias"),
    ],
)
def test_what_one_device_does_not_train_is_no_reference(
    status: int | None, steps: int, unlike: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Verifier, "_fit", lambda *args: EndedRun(status, "", "", 1.0))
    monkeypatch.setattr(Record, "steps", [*range(steps)])
    monkeypatch.setattr("lit_cifar.tools.verify.verifier.own_problems", lambda record: unlike)
    with pytest.raises(ConfigError, match=said):
        Verifier(settings(), 2, tmp_path).run_alone("reference", GhostBatches())


@pytest.fixture
def tf32(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Allowed during the test; what has the switches."""
    users = [torch.backends.cudnn, torch.backends.cuda.matmul]
    for user in users:
        monkeypatch.setattr(user, "allow_tf32", True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    return users


def test_no_run_uses_tf32_or_kernels_that_add_in_any_order(tf32: list[Any], tmp_path: Path) -> None:
    Trace(str(tmp_path)).setup(None, None, "fit")  # type: ignore[arg-type]
    assert [user.allow_tf32 for user in tf32] == [False, False]
    assert torch.backends.cudnn.deterministic


def snapshots(*states: State, when: str = "step 1", same_as: str | None = None) -> list[Snapshot]:
    """Of processes 0, 1, ... at one moment."""
    return [Snapshot(when=when, rank=rank, same_as=same_as, state=state) for rank, state in enumerate(states)]


def test_equal_parts_must_be_equal_in_all_processes() -> None:
    here, there = {"fc.bias (parameters)": ("", "a")}, {"fc.bias (parameters)": ("", "b")}
    assert peer_problems(snapshots(here, here)) == []
    problem = "step 1: fc.bias (parameters): rank 2 differs from the 2 others"
    assert peer_problems(snapshots(here, here, there)) == [problem]
    # Other parts may differ, and what only one process holds.
    states: list[State] = [
        {"fc.weight (parameters)": ("part 0", "a")},
        {"fc.weight (parameters)": ("part 1", "b")},
        {"conv1.weight (parameters)": ("", "c")},
    ]
    assert peer_problems(snapshots(*states)) == []


def test_metrics_are_read_by_step_without_those_of_one_process(tmp_path: Path) -> None:
    assert Record(tmp_path).logged == {}
    (tmp_path / "run").mkdir()
    rows = "epoch,lr-SGD,step,train/loss,train/loss_step\n,0.1,0,,\n0,,1,2.5,2.0\n"
    (tmp_path / "run" / "metrics.csv").write_text(rows)
    assert Record(tmp_path).logged == {("lr-SGD", 1): 0.1, ("epoch", 2): 0.0, ("train/loss", 2): 2.5}


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({("val/loss", 1): 2.0}, []),
        ({("val/loss", 1): 2.0 + 1e-6}, []),
        ({("val/loss", 1): 2.1}, ["val/loss of step 1 is 2.1, one device has 2"]),
        ({("val/loss", 1): math.nan}, ["is nan"]),
        ({("val/loss", 2): 2.0}, ["only in one device has", "only in the run"]),
        ({("val/loss", 1): 2.0, ("other", 1): 1.0}, []),
    ],
)
def test_logged_metrics_are_compared_name_by_name(found: dict[tuple[str, int], float], words: list[str]) -> None:
    problems = logged_problems(found, {("val/loss", 1): 2.0}, bounds={"val/": 1e-5}, source="one device has")
    assert all(word in problem for word, problem in zip(words, problems, strict=True))


def test_a_rate_is_not_rounded_to_float32_before_it_is_compared() -> None:
    rate, other = 0.1, 0.1 * (1 + 1e-8)
    assert logged_problems({("lr-SGD", 1): other}, {("lr-SGD", 1): rate}, bounds={"lr-": 0.0}, source="one device has")
    (found,), (wanted,) = (numbers([("group 0:lr", "optimizer", value)]).values() for value in (other, rate))
    assert gap(found, wanted) > 0.9e-9


def recorded(folder: Path, *flags: str) -> Record:
    """Of one device, three steps and an evaluation."""
    (folder / "trace").mkdir()
    trace = callback("lit_cifar.tools.verify.recorder.Trace", folder=folder / "trace")
    length = ["--trainer.max_steps=3", "--trainer.num_sanity_val_steps=0"]
    length += ["--trainer.check_val_every_n_epoch=null", "--trainer.val_check_interval=3"]
    run_here("fit", *flags, *length, f"--run_dir={folder / 'run'}", *trace)
    return Record(folder)


@pytest.mark.parametrize("network", ["Odd", "Wrapped"])
def test_tied_weights_and_what_is_not_saved_are_no_mistakes(network: str, tf32: list[Any], tmp_path: Path) -> None:
    more = ["--data.num_train=48", "--trainer.max_epochs=-1", "--trainer.precision=64-true"]
    record = recorded(tmp_path, *own_network(network), *more)
    config = settings(num_train=48, val_size=16).config
    config["model"] |= {"network": {"class_path": f"own_networks.{network}"}, "arch": None, "stem": None}
    config["model"]["optimizer"] = {"class_path": "lit_cifar.NesterovSGD", "init_args": {"lr": 0.1}}
    assert own_problems(record) == []
    assert checkpoint_problems(record, Configuration((), config)) == []


def test_the_first_wrong_sample_of_an_evaluation_is_named_with_its_process() -> None:
    ids, read = torch.tensor([3, 5, 7, 9]), torch.tensor([9, 7, 5])
    wanted = Evaluated(ids, torch.zeros(4, dtype=torch.int64), ids[:, None].repeat(1, 10).double())
    found = Evaluated(read, torch.tensor([0, 0, 1]), read[:, None].repeat(1, 10).double())
    found.logits[1, 2] += 1.8
    wanted.logits[0, 0] = math.inf  # of a sample that is not compared: it hides no difference
    (problem,) = logits_problems("evaluation after step 2", 1, found.gaps(wanted), bound=1e-9)
    assert problem.startswith("evaluation after step 2: logits of sample 7 of process 1 differ by 2.0e-01, allowed")
    assert problem.endswith(", and 1 more")


def test_a_process_without_samples_is_no_mistake(tmp_path: Path) -> None:
    """As where a validation has fewer samples than there are processes."""
    (tmp_path / "run").mkdir()
    write_per_rank(tmp_path / "run", "val", [AccuracyCount(1, 1), AccuracyCount(0, 0)])
    ids, logits = torch.zeros(1, dtype=torch.int64), torch.tensor([[1.0, 0.0]])
    last = {rank: Evaluated(ids[:n], ids[:n], logits[:n], rank) for rank, n in enumerate((1, 0))}
    assert per_rank_problems(Record(tmp_path), last) == []
    last[0].labels.add_(1)
    assert len(per_rank_problems(Record(tmp_path), last)) == 2  # of rank 0, and of all


def test_one_process_holds_what_it_held_and_what_it_saved(tf32: list[Any], tmp_path: Path) -> None:
    record = recorded(tmp_path, *TINY_FIT)
    path = tmp_path / "trace" / "own0.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    after = "evaluation after step 3"
    moments = ["step 1", "step 2", "step 3", f"{after}, first batch", after, "end", "whole network"]
    assert [line["when"] for line in lines] == moments
    assert own_problems(record) == []
    assert record.steps == [1, 2, 3]
    names = {name for name, _ in record.logged}
    assert names >= {"train/loss", "train/acc", "val/loss", "val/acc", "lr-NesterovSGD"}
    assert "train/loss (metrics)" in lines[-2]["state"]
    for line, words in ((lines[3], "step 3"), (lines[4], "step 3"), (lines[5], "step 3"), (lines[6], "checkpoint")):
        state = {**line["state"], "fc.bias (parameters)": ("", "other")}
        path.write_text("\n".join(json.dumps(line | {"state": state} if line is other else other) for other in lines))
        (problem,) = own_problems(record)
        assert words in problem
