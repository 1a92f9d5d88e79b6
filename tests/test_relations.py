"""Relations between two runs of a training: what they find in a stranger's script, and what they leave alone."""

import builtins
import json
import logging
import os
import re
import subprocess
import sys
import textwrap
from collections import Counter, UserDict, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import relation_scripts
import torch
from commands import TINY, graded, mode_flags, refused, run_here
from PIL import Image
from relation_scripts import (
    ACCELERATED,
    AGAIN,
    CRITIC,
    CUDA,
    LIGHTNING,
    OWN,
    PARSED,
    PARSED_TRAINING,
    PLAIN,
    TAILS,
    UNEDITED,
)
from torch.utils.data import BatchSampler, RandomSampler
from tqdm import tqdm

from lit_cifar import relations
from lit_cifar.checks.compare import difference, differences
from lit_cifar.checks.relations import ranks, told
from lit_cifar.checks.relations.batches import (
    SampleList,
    SampleTuple,
    in_batches_of,
    joined,
    open_mappings,
    parted,
    sample_digests,
    with_sample_lists,
)
from lit_cifar.checks.relations.flags import Flag, by_knob
from lit_cifar.checks.relations.generators import Draws
from lit_cifar.checks.relations.in_lightning import InLightning
from lit_cifar.checks.relations.interruption import Written
from lit_cifar.checks.relations.judging import RELATIONS, _in_windows, judged
from lit_cifar.checks.relations.loaders import Loaders, is_divided
from lit_cifar.checks.relations.made_data import Made, divided
from lit_cifar.checks.relations.mirror import mirror, mirrored
from lit_cifar.checks.relations.own_checkpoints import Writes, _holds_tensors
from lit_cifar.checks.relations.own_resume import guessed
from lit_cifar.checks.relations.parts import TrainedParts
from lit_cifar.checks.relations.plan import Limits, RunPlan, Script, Target, Trace
from lit_cifar.checks.relations.purposes import Purposes
from lit_cifar.checks.relations.runs import Runs, are_same_samples, first_apart, other_samples
from lit_cifar.checks.relations.trained import Observer, nothing_changes
from lit_cifar.checks.relations.workers import Order, Read, same_orders, workers
from lit_cifar.checks.tensors import digest
from lit_cifar.checks.verdict import Verdict

Verdicts: TypeAlias = Callable[..., list[Verdict]]
Outcomes: TypeAlias = Callable[..., dict[str, str]]


@pytest.fixture
def verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Verdicts:
    """What relations say of a script with these arguments."""

    def said(script: str, *arguments: str, only: str, bug: str = "", limit_s: float = 60) -> list[Verdict]:
        (tmp_path / "train.py").write_text(script)
        monkeypatch.setenv("BUG", bug)
        target = Target(program="train.py", arguments=arguments, folder=str(tmp_path))
        chosen = {name: RELATIONS[name] for name in only.split(",")}
        return [*judged(target, chosen, limits=Limits(batches=4, epochs=2), limit_s=limit_s)]

    return said


@pytest.fixture
def outcomes(verdicts: Verdicts) -> Outcomes:
    return lambda *args, **settings: {each.relation: each.outcome for each in verdicts(*args, **settings)}


def test_outside_of_the_checker_every_call_gives_the_own_value() -> None:
    assert relations.knob("accumulate", 4) == 4
    assert relations.resume() is None
    assert relations.save() is None
    assert relations.share([1, 2]) == [1, 2]
    relations.report(val_loss=1.0)


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        (1.0, 1.0, 0.0),
        (torch.tensor([4.0, 2.0]), torch.tensor([4.0, 1.0]), 0.25),  # of the largest value
        (0.0, 1e-13, 0.0),  # nothing beside nothing
        (torch.tensor([float("nan"), 1.0]), torch.tensor([float("nan"), 1.0]), 0.0),
        (torch.tensor([float("nan")]), torch.tensor([1.0]), float("inf")),
        (torch.tensor([float("inf"), 1.0]), torch.tensor([float("inf"), 1.0]), 0.0),
        (torch.tensor([float("inf")]), torch.tensor([1.0]), float("inf")),
        (torch.zeros(0), torch.zeros(0), 0.0),
        (torch.zeros(2), torch.zeros(3), float("inf")),
        (None, 1.0, float("inf")),
        (torch.tensor([1 + 1j]), torch.tensor([1 + 5j]), 0.8),
        (1.0, 1.0 + 2**-40, 2**-40 / (1 + 2**-40)),  # in float32 they are equal
    ],
)
def test_a_difference_is_relative_to_the_largest_value(one: object, other: object, expected: float) -> None:
    assert difference(one, other) == expected


def test_differences_are_the_largest_first_and_have_both_values() -> None:
    one, other = {"a": 1.0, "b": 2.0, "c": 2**60, "d": 5.0, "e": 1.0}, {"a": 1.0, "b": 1.0, "c": 2**60 + 1, "d": 4.9}
    found = differences(one, other)
    assert [each.name for each in found] == ["e", "b", "d", "c"]
    assert [str(each) for each in found[:2]] == ["e is only in one", "b is 2 in one and 1 in the other"]
    assert [each.name for each in differences(one, other, names=["b", "d"], limit=0.1)] == ["b"]
    assert difference(0.5, 0.25, least_scale=1.0) == 0.25


def test_the_first_step_that_differs_is_named() -> None:
    assert first_apart([1.0, 2.0, 3.0], [1.0, 2.0 + 1e-12, 3.1], 1e-7) == 3
    assert first_apart([1.0], [1.0], 1e-7) is None
    assert other_samples([[1, 2], [3, 4]], [[2, 1], [3, 5]]) == "step 1 has other samples: 1 of 2"
    assert other_samples([[1, 2], []], [[2, 1], [7]]) == ""  # samples of one are not known
    others = [[[2, 1]], [[1, 2, 3]], [[1]], [[1, 3]], [[]], []]
    assert [are_same_samples([[1, 2]], other) for other in others] == [True, False, False, False, False, False]


def test_samples_are_the_same_in_other_batches() -> None:
    batches = [(torch.arange(4), {"y": torch.arange(4) * 10}), (torch.arange(4, 7), {"y": torch.arange(4, 7) * 10})]
    for size, lengths in ((1, [1] * 7), (3, [3, 3, 1]), (0, [7])):
        again = list(in_batches_of(batches, size))
        assert [len(x) for x, _ in again] == lengths
        assert torch.equal(torch.cat([tree["y"] for _, tree in again]), torch.arange(7) * 10)
    assert [len(x) for x, _ in parted(joined(batches), 3)] == [3, 2, 2]
    with pytest.raises(ValueError, match="unlike shapes"):
        joined([torch.zeros(2, 3), torch.zeros(2, 4)])


class Encoding(UserDict[str, torch.Tensor]):
    """As that of transformers."""


def test_tokens_are_padded_to_those_of_the_longest_batch() -> None:
    def tokens(length: int, mask: torch.Tensor) -> Encoding:
        ids = torch.arange(2 * length).reshape(2, length)
        return Encoding(input_ids=ids, attention_mask=mask, labels=ids, length=torch.tensor([length] * 2))

    batches = [tokens(3, torch.ones(2, 3)), tokens(2, torch.ones(2, 2))]
    for _ in range(2):
        open_mappings(batches)
    one = joined(batches)
    assert type(one) is Encoding
    assert one["input_ids"].tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 0], [2, 3, 0]]
    assert one["attention_mask"][2:].tolist() == [[1, 1, 0]] * 2
    assert one["labels"][2].tolist() == [0, 1, -100]
    parts = parted(one, 3)
    assert ({*map(type, parts)}, [len(part["length"]) for part in parts]) == ({Encoding}, [2, 1, 1])
    alike = [defaultdict(list, batches[0])] * 2  # are not made anew
    assert joined(alike)["input_ids"].shape == (4, 3)
    with pytest.raises(ValueError, match="unlike shapes"):  # padded on the left
        joined([batches[0], tokens(2, torch.tensor([[0, 1], [1, 1]]))])


ROWS, SCENES, NAMES = torch.zeros(4, 3), [torch.zeros(n, 3) for n in (2, 5, 1, 4)], ("a", "b", "c", "d")


@pytest.mark.parametrize(
    ("asked", "batch", "expected"),
    [
        (4, (ROWS, torch.zeros(4)), True),
        (4, {"x": ROWS, "scale": torch.tensor(2.0)}, True),
        (4, {"x": ROWS, "names": NAMES}, True),
        (4, {"x": ROWS, "tokens": 9}, False),  # of this batch
        (4, SCENES, True),  # a list of samples
        (4, (tuple(SCENES), tuple({"boxes": scene} for scene in SCENES)), True),
        (4, (tuple(SCENES), [ROWS[0]] * 4, {"y": torch.zeros(4)}), True),
        (2, ((SCENES[0], NAMES), (SCENES[1], NAMES)), False),  # two samples of two things, or two lists of samples
        (4, (ROWS, torch.zeros(8)), False),
        (8, (torch.zeros(6, 3), torch.zeros(6)), False),
        (None, [torch.zeros(20, 8)] * 6, False),  # may be six samples
        (None, (torch.zeros(20, 8), torch.zeros(20)), True),
    ],
)
def test_a_batch_is_divided_if_it_has_the_samples_asked_for(asked: int | None, batch: Any, expected: bool) -> None:
    marked = batch if asked is None else with_sample_lists(batch, asked)
    assert is_divided(marked, asked) is expected


def test_lists_of_samples_are_joined_and_divided() -> None:
    images = tuple(torch.zeros(3, size, 5) for size in (4, 2, 3))  # each has as many channels as there are images
    batch = with_sample_lists((images, [{"boxes": torch.zeros(n, 4), "name": str(n)} for n in range(3)]), 3)
    parts = parted(joined([batch, batch]), 4)
    assert [type(one) for one in parts[0]] == [SampleTuple, SampleList]
    shown = [[(len(image[0]), it["name"]) for image, it in zip(*part, strict=True)] for part in parts]
    assert shown == [[(4, "0"), (2, "1")], [(3, "2"), (4, "0")], [(2, "1")], [(3, "2")]]
    digests = sample_digests(batch)
    assert len(set(digests)) == 3
    pictures = [Image.fromarray(np.full((40, 40), number, dtype=np.uint8)) for number in (1, 1, 2)]
    for rows in (pictures, [np.pad(np.asarray(it)[:9, :9], 40) for it in pictures]):  # alike at their borders
        assert [*map(digest, rows)] == [digest(rows[0])] * 2 + [digest(rows[2])] != [digest(rows[0])] * 3
    assert sample_digests(parts[1]) == [digests[2], digests[0]]


@pytest.mark.parametrize(
    ("orders", "is_drawn", "expected"),
    [
        ([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], True, []),  # not shuffled
        ([[3, 1, 0, 2, 4], [2, 0, 4, 1, 3]], True, ["pass"]),
        ([[3, 1, 0, 2, 4], [3, 1, 0, 2, 4]], True, ["fail"]),
        ([[3, 1, 0, 2, 4], [3, 1, 0, 2, 4]], False, ["note"]),  # such as by length
    ],
)
def test_a_drawn_order_is_another_in_each_epoch(orders: list[list[int]], is_drawn: bool, expected: list[str]) -> None:
    trace = Trace()
    datasets = (0, 1, 1)  # of loaders that are read beside each other
    for begun, order in enumerate(orders):
        trace.part(Read).orders.extend(Order(data, 5, is_drawn, begun, order) for data in datasets)
    assert [verdict.outcome for verdict in same_orders(trace)] == expected


def test_an_order_that_the_script_only_looks_at_is_no_epoch(tmp_path: Path) -> None:
    watched: Any = SimpleNamespace(plan=RunPlan(), trace=Trace(), phase=lambda: "train", folder=tmp_path)
    loaders = Loaders(watched)
    sampler = BatchSampler(RandomSampler(range(8)), 4, False)
    next(loaders._ordered(BatchSampler.__iter__, sampler))
    for step in range(2):
        assert [len(batch) for batch in loaders._ordered(BatchSampler.__iter__, sampler)] == [4, 4]
        watched.trace.steps = step + 1
    assert [len(order.places) for order in watched.trace.part(Read).orders] == [8, 8]


@pytest.mark.parametrize(("batches", "outcome"), [(6, "pass"), (12, "note")])
def test_ranks_that_read_as_much_as_one_process_are_noted(batches: int, outcome: str) -> None:
    one, *two = (Trace(samples=[[sample, -sample]]) for sample in (1, 2, 3))
    one.reading.lengths, one.reading.cut = {0: 8}, {0: 12}
    for trace in two:
        trace.reading.lengths, trace.reading.cut = {0: 8}, {0: batches}
    (verdict,) = filter(None, [ranks.data_of_ranks(one, two)])
    assert verdict.outcome == outcome


def test_made_samples_are_divided_where_a_script_subtracts_the_size_of_a_part() -> None:
    parts = divided(Made(some=None), lambda data, lengths: lengths, range(300), [300 - 5000, 5000])
    assert parts == [pytest.approx(4700 / 9700), pytest.approx(5000 / 9700)]


ONCE, TWICE = Counter({1: 1, 2: 1}), Counter({1: 2, 2: 2})
# Digests of one sample that is asked for four times, in two epochs: its random changes.
DRAWN, ANEW, IN_PAIRS = [[1, 2, 3, 4], [5, 6, 7, 8]], [[1, 2, 3, 4], [1, 2, 3, 4]], [[1, 1, 2, 2], [3, 3, 4, 4]]


@pytest.mark.parametrize(
    ("seen", "has_workers", "outcome"),
    [
        (Read(streams=[(ONCE, ONCE)]), True, "pass"),
        (Read(streams=[(ONCE, TWICE)]), True, "fail"),
        (Read(streams=[(ONCE, Counter({3: 1, 4: 1}))]), True, "pass"),  # drawn anew
        (Read(streams=[(ONCE, TWICE)]), False, "note"),
        (Read(samples=[(DRAWN, DRAWN)]), True, "pass"),
        (Read(samples=[(DRAWN, ANEW)]), True, "fail"),
        (Read(samples=[(DRAWN, IN_PAIRS)]), True, "fail"),
        (Read(samples=[([[1, 1, 1, 2], [1, 1, 1, 1]], [[1, 1, 1, 1]] * 2)]), True, "pass"),  # seldom changed
    ],
)
def test_workers_are_judged_where_there_are_some(seen: Read, has_workers: bool, outcome: str) -> None:
    trace = Trace(script=Script(has_workers=has_workers), parts={Read: seen})
    runs: Any = SimpleNamespace(own=lambda **_: trace)
    assert [verdict.outcome for verdict in workers(runs)] == [outcome]


@pytest.mark.parametrize(
    ("seen", "mistaken"),
    [
        ({("train", "train"), ("evaluate", "train")}, (("here", "train"),)),
        ({("train", "evaluate")}, (("here", "evaluate"),)),
        ({("evaluate", "evaluate")}, ()),
        ({("train", "train"), ("train", "evaluate")}, ()),  # the calls of both are at one place
    ],
)
def test_what_batches_are_for_is_learnt_where_it_was_mistaken(
    seen: set[tuple[str, str]], mistaken: tuple[tuple[str, str], ...]
) -> None:
    assert Purposes({"here": seen}).mistaken == mistaken


def test_only_regular_files_are_read_wherever_a_script_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    writes = Writes(RunPlan(), Trace(), TrainedParts(None, ()), list)
    os.mkfifo("pipe")
    torch.save({}, "last.pt")
    assert [name for name in ("pipe", "last.pt", "nothing", "a\0b") if _holds_tensors(tmp_path / name)] == ["last.pt"]
    (tmp_path / "below").mkdir()
    monkeypatch.chdir("below")
    (tmp_path / "below").rmdir()
    writes._audit("open", ("x", "w", os.O_WRONLY))
    writes._audit("os.rename", (b"x", b"y"))
    assert [*writes._opened] == [tmp_path / "x", tmp_path / "y"]


def test_a_tensor_of_no_module_that_an_optimizer_has_is_a_weight() -> None:
    parts, tensor = TrainedParts(None, ()), torch.ones(2, requires_grad=True)
    parts.optimizers.append(torch.optim.SGD([tensor]))
    assert torch.equal(parts.snapshot()["weights/group 0.0"], torch.ones(2))


def test_a_draw_is_known_by_the_generator_that_makes_it() -> None:
    found = []
    for seed in (1, 2, 1):
        torch.manual_seed(0)
        np.random.seed(seed)
        draws = Draws(trace := Trace())
        draws.follow_batch(None)
        np.random.rand()
        draws.note()
        found.append(trace.drawn)
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize(("norms", "says"), [((1.0, 2.0), ""), ((1.0, 1.0), "no parameter changes in 2 steps")])
def test_a_training_that_ends_with_its_first_weights_has_changed_them(norms: tuple[float, float], says: str) -> None:
    observer = Observer(trace := Trace(norms=[*norms]), TrainedParts(None, ()))
    optimizer = torch.optim.SGD([torch.ones(2, requires_grad=True)], lr=0.1)
    for norm in norms:
        observer.follow_step(optimizer, norm)
    assert nothing_changes(trace).startswith(says)
    assert bool(nothing_changes(trace)) == bool(says)


WRITER = """
import os, sqlite3, torch
from io import StringIO
from pathlib import Path
from lit_cifar.checks.relations.own_files import Guard

seen, outside, beside, script = [], Path(OUTSIDE), Path("../outside"), torch.jit.script(torch.nn.ReLU())
Guard(Path(RUN), seen).start()
Path("runs/log.txt").open("a").write(" and more")
torch.save(1, "runs/new.pt")
script.save("runs/model.pt")
os.truncate("runs/cut.txt", 0)
with sqlite3.connect("runs/study.db") as trials:
    trials.execute("create table trials (value)")
with sqlite3.connect((Path.cwd() / "runs" / "my uri.db").as_uri() + "?mode=rwc", uri=True) as trials:
    trials.execute("create table trials (value)")
for write in (
    lambda: (outside / "a").write_text("x"),
    lambda: torch.save(1, outside / "b"),
    (outside / "c").mkdir,
    lambda: (beside / "d").write_text("x"),
    lambda: Path("data/e").write_text("x"),
    lambda: os.replace("runs/new.pt", outside / "f"),
    lambda: script.save(outside / "g"),
):
    try:
        write()
    except PermissionError:
        pass
print(len(seen), Path("runs/log.txt").read_text(), beside.is_dir(), Path("data").is_dir())
"""


def test_no_file_of_the_user_is_changed_and_others_are_seen(tmp_path: Path) -> None:
    user, outside = tmp_path / "user", tmp_path / "outside"
    (user / "runs").mkdir(parents=True)
    outside.mkdir()
    own_files = [user / "runs" / name for name in ("log.txt", "model.pt", "cut.txt", "study.db", "my uri.db")]
    for file in own_files:
        file.write_text("mine" if file.suffix != ".db" else "")
    (user / "data").symlink_to(outside)
    mirror(tmp_path / "run" / "own", [user])
    own = mirrored(tmp_path / "run" / "own", user)
    program = WRITER.replace("OUTSIDE", repr(str(outside))).replace("RUN", repr(str(tmp_path / "run")))
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=own,
        env=os.environ | {"TMPDIR": str(tmp_path / "run")},
        capture_output=True,
        text=True,
    )
    assert done.stdout == "7 mine and more True True\n", done.stderr
    assert [file.read_text() for file in own_files] == ["mine", "mine", "mine", "", ""]
    assert list(outside.iterdir()) == []


def test_a_right_training_holds_every_relation_and_may_write_beside_itself(outcomes: Outcomes, tmp_path: Path) -> None:
    begin = "import os, pathlib\nos.chdir(os.path.dirname(__file__))\n"
    begin += "assert [*map(int, os.popen('stty size').read().split())] == [*os.get_terminal_size()][::-1]\n"
    begin += "(pathlib.Path(__file__).resolve().parent / 'out').mkdir(exist_ok=True)\n"
    expected = {"run": "pass"} | resumed({2: "pass", 4: "pass"}) | EQUAL | ALL_HOLD
    assert outcomes(begin + PLAIN, only="resume,evaluation,ranks,accumulation") == expected
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("strategy", "devices", "ranks"),
    [("ddp", "auto", 2), ("ddp_spawn", -1, 2), ("auto", "0,1", 2), ("ddp", "2", 2), ("auto", "auto", 1)],
)
def test_all_devices_are_several_ranks(strategy: str, devices: Any, ranks: int) -> None:
    watched: Any = SimpleNamespace(plan=RunPlan(), trace=Trace())
    InLightning(watched).settings({"strategy": strategy, "devices": devices})
    assert watched.trace.script.ranks == ranks


@pytest.mark.parametrize(("arguments", "expected"), graded((["--forget-schedule"], "fail"), slow=[([], "pass")]))
def test_the_example_resumes_as_its_page_says(arguments: list[str], expected: str, verdicts: Verdicts) -> None:
    script = (Path(__file__).parents[1] / "examples" / "relate_a_training.py").read_text()
    _, *found = verdicts(script, *arguments, only="resume")
    assert [verdict.outcome for verdict in found] == [expected] * 2
    restored = r"schedule not restored: 0.last_epoch was \d at the checkpoint, and is 0 after it"
    texts = [bool(re.match(restored, verdict.text)) for verdict in found]
    assert texts == [expected == "fail"] * 2


@pytest.mark.parametrize(
    ("package", "flag", "words"),
    graded(
        ("click", Flag(("-b", "--batch-size"), 7, "int"), ("--batch-size", "7")),
        slow=[
            ("tyro", Flag(("--data.batch-size",), 7, "int"), ("--data.batch-size", "7")),
            ("hydra", Flag(("data.batch_size=",), 7, "int"), ("data.batch_size=7",)),
        ],
    ),
)
def test_flags_are_seen_with_their_values(
    package: str,
    flag: Flag,
    words: tuple[str, ...],
    tmp_path: Path,
    installed: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(installed({"hydra": "hydra-core"}.get(package, package)))
    (user := tmp_path / "user").mkdir()
    (user / "train.py").write_text(PARSED_TRAINING.replace("\nmain()", f"{PARSED[package]}\nmain()"))
    own = Runs(Target(program="train.py", arguments=words, folder=str(user)), RunPlan(), tmp_path, limit_s=60).own()
    assert own.script.flags[flag.words[0]] == flag
    assert flag.given(7) == words
    assert len(own.samples[0]) == 7


def test_relations_that_ask_at_once_share_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[RunPlan] = []

    def start(_: Runs, plan: RunPlan) -> list[Trace]:
        begun.append(plan)
        sleep(0.2)
        return [Trace()]

    monkeypatch.setattr(Runs, "_start", start)
    runs = Runs(Target(program="", folder=""), RunPlan(), tmp_path, limit_s=1)
    with ThreadPoolExecutor(4) as pool:
        traces = [*pool.map(lambda number: runs.planned(seed=number % 2).own(), range(4))]
    assert (len(begun), traces[0] is traces[2], traces[0] is traces[1]) == (2, True, False)


def test_a_buffer_that_is_never_saved_and_changes_nothing_else_is_a_note(tmp_path: Path) -> None:
    module, parts = torch.nn.Linear(2, 1), TrainedParts(None, ())
    parts.roots.append(module)
    traces = []
    for value in (0.0, 1.0):
        module.register_buffer("bank", torch.tensor(value), persistent=False)
        traces.append(Trace(state=parts.snapshot(), norms=[1.0]))
    verdict = Runs(Target(program="", folder=""), RunPlan(), tmp_path, limit_s=1).judge("resume", *traces)
    assert (verdict.outcome, "unsaved buffer bank" in verdict.text) == ("note", True)


def test_another_number_of_steps_may_come_of_cut_epochs(tmp_path: Path) -> None:
    one, other = (Trace(state={"weights/a": torch.ones(1)}, norms=[1.0] * steps) for steps in (2, 3))
    assert Runs(Target(program="", folder=""), RunPlan(), tmp_path, limit_s=1).judge("resume", one, other).may_be_cut


def test_a_training_that_ends_where_the_next_begins_has_its_own_weights(tmp_path: Path) -> None:
    (user := tmp_path / "user").mkdir()
    (user / "train.py").write_text(PARSED_TRAINING.replace("\nmain()", "\ntrain(4)\ntrain(4)"))
    plan = RunPlan(limits=Limits(steps=3))
    own = Runs(Target(program="train.py", folder=str(user)), plan, tmp_path, limit_s=60).own()
    weights = torch.cat([own.state[f"weights/{name}"].flatten() for name in ("weight", "bias")])
    assert float(weights.norm()) == pytest.approx(own.norms[-1], rel=1e-12)


@pytest.mark.slow
def test_a_script_of_accelerate_trains_on_two_processes(
    outcomes: Outcomes, installed: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed("accelerate"))
    judged_parts = ("run", "replicas", "samples of ranks", "ranks")
    assert outcomes(ACCELERATED, only="ranks") == dict.fromkeys(judged_parts, "pass") | DRAWING


def test_a_flag_is_given_as_its_parser_takes_it() -> None:
    flag = Flag(("-n", "--no-amp"), False, "bool", takes_value=False)
    assert (flag.names, flag.given(True)) == (["n", "no_amp"], ("--no-amp",))
    of_hydra = Flag(("data.batch_size=",), 4, "int")
    assert (of_hydra.names, of_hydra.given(7)) == (["batch_size"], ("data.batch_size=7",))


@pytest.mark.parametrize(
    ("word", "value", "said", "knob"),
    [
        ("--grad-accum-steps", 4, {}, "accumulate"),
        ("--per_device_train_batch_size", 4, {}, "batch_size"),
        ("--per-device-eval-batch-size", 4, {}, "evaluation_batch"),
        ("--fp16", False, {}, "amp"),
        ("--grad-accum-steps", True, {}, None),
        ("--batch-size", 0, {}, None),
        ("--batch-size", "4", {}, None),
        ("--loss-batch-size", 4, {}, None),
        ("--every", 4, {"accumulate": "--every"}, "accumulate"),
        ("--accumulate", 4, {"accumulate": "--every"}, None),
    ],
)
def test_a_flag_means_a_knob_by_name_and_type(word: str, value: Any, said: dict[str, str], knob: str | None) -> None:
    flag = Flag((word,), value, type(value).__name__)
    assert by_knob({word: flag}, said) == ({knob: flag} if knob else {})


def test_the_group_of_a_flag_that_is_said_counts() -> None:
    flags = {word: Flag((word,), 8, "int") for word in ("--eval.batch-size", "--train.batch-size")}
    assert by_knob(flags, {"batch_size": "train.batch-size"}) == {"batch_size": flags["--train.batch-size"]}


class Logger:
    """A double of what is told numbers, which has all their methods."""

    def log(self, values: Any, step: int = 0) -> None: ...

    def add_scalar(self, tag: str, scalar_value: float, step: int = 0) -> None: ...

    def add_scalars(self, main_tag: str, tag_scalar_dict: Any, step: int = 0) -> None: ...

    def compute(self) -> float:
        return 7.0


def test_what_is_told_to_loggers_is_heard_and_sent_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    modes, heard, lines = [], [], []
    wandb = SimpleNamespace(init=lambda project, mode: modes.append(mode) or Logger())
    mlflow = SimpleNamespace(log_metric=lambda key, value, step=0: None, log_metrics=lambda metrics: None)
    mlflow.set_tracking_uri = lambda uri: pytest.fail(uri)
    modules = {
        "wandb": wandb,
        "mlflow": mlflow,
        "torchmetrics.metric": SimpleNamespace(Metric=type("M", (Logger,), {})),
    }
    for module, owner in told._METHODS:
        modules[module] = SimpleNamespace(**{owner: type(owner, (Logger,), {})})
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    of_bars = [(tqdm, f"set_{shown}{end}") for shown in ("postfix", "description") for end in ("", "_str")]
    for owner, name in ((builtins, "print"), (sys.stdout, "write"), (logging.Logger, "handle"), *of_bars):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # so that they are put back
    told.listen(lambda who, values: heard.append((who, values)), lines.append)
    wandb.init("mine").log({"loss": 1.0}, step=3)
    wandb.log(step=3, values={"loss": 2.0})
    mlflow.set_tracking_uri("http://nowhere")
    mlflow.log_metric("loss", step=3, value=3.0)
    mlflow.log_metrics({"loss": 4.0})
    modules["transformers.trainer"].Trainer().log({"loss": 5.0})
    modules["accelerate.accelerator"].Accelerator().log(values={"loss": 6.0})
    modules["torchmetrics.metric"].Metric().compute()
    modules["tensorboardX.writer"].SummaryWriter().add_scalar("loss", 8.0, 3)
    modules["tensorboardX.writer"].SummaryWriter().add_scalars("val", {"loss": 9.0})
    names = ("wandb", "wandb", "mlflow", "mlflow", "Trainer", "Accelerator", "torchmetrics")
    expected = [(name, {"loss" if number < 7 else "M": float(number)}) for number, name in enumerate(names, start=1)]
    assert heard == [*expected, ("SummaryWriter", {"loss": 8.0}), ("SummaryWriter", {"val/loss": 9.0})]
    assert modes == ["disabled"]
    print("loss", 1.0, sep="=")
    print("to a file", file=StringIO())
    logging.getLogger("any").error("loss %s", 2.0)
    logging.Logger("own").error("loss", 3.0)  # which logging reports, and goes on
    tqdm.write("loss 4.0")
    sys.stdout.write("\r50%, loss 5.0")
    bar = tqdm(file=StringIO())
    bar.set_postfix({"loss": 6.5}, refresh=False)
    bar.set_description("loss 7.0")
    named = [line for line in lines if told.numbers_in(line).keys() == {"loss"}]
    assert named == ["loss=1.0", "loss 2.0", "loss 4.0", "loss=6.5", "loss 7.0: "]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Test: Loss: 0.50, Accuracy: 9/12 (75%)", {"Test: Loss": (0.5, 0.01), "Loss: #, Accuracy: #/#": (75.0, 1.0)}),
        ("{'loss': \x1b[36m1.5e-3\x1b[0m}", {"loss": (0.0015, 1e-4)}),
        ("epoch 3 of 12, commit 7e12345, 12:30:05.5, v1.2.3, 0.5s, tensor([[0.5, -0.5],\n[1.5, 2.5]])", {}),
    ],
)
def test_numbers_of_a_line_have_names_and_digits(line: str, expected: dict[str, tuple[float, float]]) -> None:
    found = told.numbers_in(line)
    assert found.keys() == expected.keys()
    assert [*found.values()] == [pytest.approx(pair) for pair in expected.values()]


def test_a_script_is_judged_by_its_flags_and_what_it_tells_others(verdicts: Verdicts) -> None:
    first, evaluated, accumulated = verdicts(UNEDITED, bug="mean of means", only="evaluation,accumulation")
    assert "twice the same but for SummaryWriter: epoch/s" in first.looked_at
    assert (evaluated.outcome, accumulated.outcome) == ("fail", "pass")
    assert evaluated.text.startswith("SummaryWriter: val/loss after 2 steps is ")


@pytest.mark.slow
def test_ranks_may_divide_the_microbatches_of_a_step(verdicts: Verdicts) -> None:
    *_, ranked, _ = verdicts(UNEDITED, only="ranks", bug="no bug, but windows of all ranks")
    assert (ranked.relation, ranked.outcome) == ("ranks", "pass")
    assert ranked.looked_at.endswith("of a step's microbatches half on each rank")


@pytest.mark.slow
def test_numbers_of_the_training_are_no_results_of_ranks(verdicts: Verdicts) -> None:
    *found, last = verdicts(UNEDITED, only="evaluation,ranks")
    assert {verdict.outcome for verdict in found} == {"pass"}
    assert (last.relation, last.outcome) == ("evaluation on 2 ranks", "note")  # the loss of a batch of rank 0
    assert "epoch/train after" in last.text


def resumed(by_steps: dict[int, str]) -> dict[str, str]:
    return {f"resume after {steps} steps": outcome for steps, outcome in by_steps.items()}


SHUFFLED = {"replicas": "pass", "order of epochs": "pass"}
EQUAL = {"replicas": "pass", "samples of ranks": "pass", "ranks": "pass", "evaluation on 2 ranks": "pass"}
DRAWING = {"draws of ranks": "note"}  # each rank has the seed of the other
ALL_HOLD = dict.fromkeys(("evaluation", "accumulation", "order of epochs"), "pass")
OTHER_BATCHES = dict.fromkeys(("evaluation", "evaluation in batches of 7", "evaluation as one batch"), "note")
# A script, its mistake, the relations that judge it, and what they say beside that it runs.
QUICK = [
    ("PLAIN", "times ranks", "ranks", SHUFFLED | {"samples of ranks": "pass", "ranks": "fail"}),
    ("PLAIN", "no set_epoch", "ranks", EQUAL | {"order of epochs": "fail"}),
    ("PLAIN", "not divided", "accumulation", {"accumulation": "fail"}),
    ("ENGINE", "mean of means", "evaluation", {"evaluation": "fail"}),
    ("NOISY", "", "ranks,accumulation,scale", EQUAL | DRAWING | {"accumulation": "pass", "scale of the loss": "pass"}),
]
SLOW = [
    ("ENGINE", "", "evaluation,epochs", {"evaluation": "pass", "order of epochs": "pass"}),
    ("NOISY", "only own part", "ranks", EQUAL | DRAWING | {"evaluation on 2 ranks": "fail"}),
    ("TAILS", "by all of a window", "accumulation", {"accumulation": "fail"}),
    ("PLAIN", "dropout stays on", "evaluation", {"evaluation": "note"}),
    ("PLAIN", "counts on batches of 4", "evaluation", OTHER_BATCHES),
    ("PLAIN", "same samples", "ranks", SHUFFLED | {"samples of ranks": "fail", "ranks": "abstain"}),
    ("PLAIN", "same order", "epochs", {"order of epochs": "fail"}),
    ("PLAIN", "left out", "trained", {"what is trained": "note"}),
    ("PLAIN", "frozen statistics", "trained", {"what is trained": "note"}),
    ("PLAIN", "frozen not saved", "resume", resumed({2: "note", 4: "note"})),
    ("PLAIN", "cannot resume", "resume", resumed({2: "fail", 4: "fail"})),
    ("PLAIN", "no bug, but microbatches of each batch", "accumulation", {"accumulation": "pass"}),
    ("NOISY", "one number for all", "accumulation", {"accumulation": "abstain"}),
    ("NOISY", "no bug, but three are read before", "accumulation", {"accumulation": "pass"}),
    ("NOISY", "no bug, but a pass before, and a mode of torch", "accumulation", {"accumulation": "pass"}),
    ("NOISY", "clipped while scaled", "scale", {"scale of the loss": "fail"}),
    ("NOISY", "last samples left out", "evaluation", {"evaluation": "pass", "samples of evaluation": "note"}),
    ("NOISY", "needs two processes", "scale", {"scale of the loss": "pass"}),
    ("AGAIN", "", "resume", resumed({7: "pass", 12: "pass"})),
    ("AGAIN", "repeats", "resume", resumed({10: "fail", 18: "fail"})),
    ("AGAIN", "", "evaluation", {"evaluation": "pass"}),
    ("AGAIN", "sum of means", "evaluation", {"evaluation": "fail"}),
    ("PADDED", "", "resume,accumulation", resumed({5: "pass", 10: "pass"}) | {"accumulation": "pass"}),
    ("PADDED", "gradients forgotten", "resume", resumed({5: "fail", 10: "fail"})),
    ("PADDED", "parts of one weight", "accumulation", {"accumulation": "fail"}),
    ("SHORT", "", "accumulation", {"accumulation": "pass"}),
    ("SHORT", "window of fewer", "accumulation", {"accumulation": "fail"}),
    ("PAIR", "", "accumulation", {"accumulation": "pass"}),
    ("PAIR", "not divided", "accumulation", {"accumulation": "fail"}),
    ("TAILS", "no bug, but by hand", "resume,accumulation", resumed({2: "pass", 4: "pass"}) | {"accumulation": "pass"}),
    ("TAILS", "", "resume,accumulation", resumed({2: "pass", 4: "pass"}) | {"accumulation": "pass"}),
    ("TAILS", "no bug, but the rest is left out", "accumulation", {"accumulation": "note"}),
    ("TAILS", "a batch of fewer", "accumulation", {"accumulation": "note"}),
    ("TAILS", "batches are divided", "accumulation", {"accumulation": "pass"}),
    ("TAILS", "batches are divided alike", "accumulation", {"accumulation": "note"}),
    ("UNEDITED", "not divided", "accumulation", {"accumulation": "fail"}),
    ("UNEDITED", "other meaning", "accumulation", {"accumulation": "note"}),
    ("UNEDITED", "no bug, but by hand", "evaluation", {"evaluation": "pass"}),
    ("UNEDITED", "by hand, mean of means", "evaluation", {"evaluation": "fail"}),
    ("UNEDITED", "no bug, but of all samples", "accumulation", {"accumulation": "pass"}),
    ("SPAWN", "", "ranks", EQUAL),
    ("ENDLESS", "", "evaluation,accumulation,epochs", ALL_HOLD),
    ("PLAIN", "dropout stays on", "ranks", EQUAL | SHUFFLED | DRAWING),
]


@pytest.mark.parametrize(("script", "bug", "only", "expected"), graded(*QUICK, slow=SLOW))
def test_a_mistake_breaks_its_relation_and_no_other(
    script: str, bug: str, only: str, expected: dict[str, str], outcomes: Outcomes
) -> None:
    assert outcomes(getattr(relation_scripts, script), bug=bug, only=only) == {"run": "pass"} | expected


@pytest.mark.parametrize(
    ("bug", "expected", "said"),
    graded(
        ("", ["pass", "pass"], ""),
        ("weights alone", ["fail", "fail"], "its checkpoint only.pt holds no optimizer state and no schedule"),
        slow=[("no way back", ["note", "abstain"], "no optimizer state and no schedule: a training that goes on")],
    ),
)
def test_a_plain_script_is_resumed_by_its_own_means(
    bug: str, expected: list[str], said: str, verdicts: Verdicts, tmp_path: Path
) -> None:
    _, *found = verdicts(OWN, only="resume", bug=bug)
    assert [verdict.outcome for verdict in found] == expected
    assert said in found[0].text
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("word", "kind", "takes_value", "expected"),
    [
        ("--resume", "bool", False, ["--resume"]),
        ("trainer.resume-from=", "str", True, [f"trainer.resume-from={name}" for name in ("out", "out/a", "out/b")]),
        ("--resume", "int", True, []),  # the number of an epoch, or of a run
        ("--ckpt", "str", True, [f"--ckpt {name}" for name in ("out", "out/a", "out/b")]),
        ("--out", "str", True, []),
    ],
)
def test_a_flag_resumes_by_its_name_and_type(word: str, kind: str, takes_value: bool, expected: list[str]) -> None:
    written = Written(8, 8, ["out/a", "out/b"])
    ways = guessed({word: Flag((word,), None, kind, takes_value)}, written)
    assert [" ".join(way.given(written)) for way in ways] == ["", *expected]


@pytest.mark.slow
@pytest.mark.parametrize(("read", "expected"), [("(optimizer, schedule), states", "pass"), ("(), ()", "abstain")])
def test_a_file_is_a_checkpoint_if_an_optimizer_is_read(read: str, expected: str, verdicts: Verdicts) -> None:
    script = OWN.replace("--resume", "--ckpt").replace("().resume", "().ckpt")
    *_, last = verdicts(script.replace("(optimizer, schedule), states", read), only="resume")
    assert last.outcome == expected


@pytest.mark.parametrize(
    ("bug", "only", "expected"),
    graded(
        ("no training", "resume", ["crash"]),
        slow=[
            ("", "resume", ["pass", "pass", "pass"]),
            ("no bug, but shared", "ranks", ["pass", "pass", "pass"]),
            ("momentum forgotten", "resume", ["pass", "fail", "fail"]),
        ],
    ),
)
def test_a_script_for_gpus_is_judged_on_the_cpu(bug: str, only: str, expected: list[str], verdicts: Verdicts) -> None:
    first, *found = verdicts(CUDA, bug=bug, only=only)
    assert [verdict.outcome for verdict in (first, *found)] == expected
    reason = "with the CPU in place of CUDA" if found else "inconsistent tensor size"
    assert reason in f"{first.looked_at}{first.text}"
    assert "in float32" not in first.looked_at


@pytest.mark.parametrize(("bug", "said"), [("", ""), ("adds up", "are added in 8 of 24 steps")])
def test_gradients_that_stay_are_seen_with_each_optimizer(bug: str, said: str, verdicts: Verdicts) -> None:
    *_, verdict = verdicts(CRITIC, bug=bug, only="trained")
    assert (verdict.outcome, said in verdict.text) == ("note" if bug else "pass", True)


@pytest.mark.slow
@pytest.mark.parametrize(("bug", "outcome"), [("sum of means", "FAIL"), ("", "PASS")])
def test_arguments_may_change_nothing(bug: str, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    monkeypatch.setenv("BUG", bug)
    (tmp_path / "train.py").write_text(AGAIN)
    result = run_here("relations", tmp_path / "train.py", "--only=", "--same=7", check=False)
    assert re.search(rf"^{outcome} +same with 7 ", result.stdout, flags=re.M)


# Modes whose ranks divide the batch, and those whose ranks divide the model.
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "pp"])
def test_our_own_trainer_holds_them(mode: str, tmp_path: Path) -> None:
    rarely = "--trainer.log_every_n_steps=50"  # images per second are others in each run
    arguments = ("fit", *TINY, "--trainer.max_epochs=3", rarely, *mode_flags(mode))
    target = Target(program="lit_cifar", arguments=arguments, is_module=True, folder=str(tmp_path))
    chosen = {name: RELATIONS[name] for name in ("resume", "ranks", "accumulation")}
    found = judged(target, chosen, limits=Limits(batches=4), limit_s=100)
    parts = [] if mode == "pp" else ["replicas", "samples of ranks"]
    inside = [f"resume inside epoch {number}" for number in (2, 3)]
    names = ["run", "resume after epoch 1", *inside, *parts, "ranks", "accumulation"]
    assert {verdict.relation: verdict.outcome for verdict in found} == dict.fromkeys(names, "pass")


@pytest.mark.slow
def test_a_lightning_script_needs_no_call(outcomes: Outcomes) -> None:
    assert outcomes(LIGHTNING, only="resume,evaluation,score,ranks,accumulation,often") == {
        "run": "pass",
        "resume after epoch 1": "pass",
        "resume inside epoch 2": "note",  # Lightning begins the order of the epoch anew
        "evaluation": "pass",
        "evaluation on 2 ranks": "pass",
        "evaluation on 3 ranks": "note",  # padded by a sample
        "score of a file": "pass",
        "replicas": "pass",
        "samples of ranks": "pass",
        "ranks": "pass",
        "accumulation": "note",  # the callback counts batches, and the script does not accumulate
        "validating more often": "pass",
    }


@pytest.mark.parametrize(
    ("bug", "relation", "outcome", "said"),
    graded(
        ("statistics of batches", "evaluation", "fail", ""),
        slow=[
            ("callback without state", "resume after epoch 1", "fail", ""),
            ("updated after the checkpoint", "resume inside epoch 2", "note", "the module's own on_train_batch_end"),
            ("sum of an epoch", "resume after epoch 1", "pass", ""),
            ("sum of an epoch", "resume inside epoch 2", "note", "writes no checkpoint inside an epoch"),
            ("sum of an epoch, saved inside", "resume inside epoch 2", "fail", ""),
            ("sum of an epoch, cleared by a validation", "validating more often", "note", "where the script validates"),
            ("a validation moves weights", "validating more often", "fail", ""),
        ],
    ),
)
def test_a_mistake_is_seen_with_lightning(bug: str, relation: str, outcome: str, said: str, verdicts: Verdicts) -> None:
    only = "often" if "often" in relation else relation.split()[0]
    found = {each.relation: each for each in verdicts(LIGHTNING, bug=bug, only=only)}
    assert (found[relation].outcome, said in found[relation].text) == (outcome, True)


def test_a_script_that_says_how_it_is_started_is_started_so(verdicts: Verdicts) -> None:
    refusal = "import os\nif 'LOCAL_RANK' not in os.environ:\n    raise SystemExit(print('start me by torchrun'))\n"
    first, trained = verdicts(refusal + TAILS, only="trained")
    assert (first.outcome, trained.outcome) == ("pass", "pass")


BAD_SCRIPTS = {
    "asks": ("input()", "crash", "EOFError"),
    "ends by an error": ("raise ValueError('no such file')", "crash", "ValueError: no such file"),
    "trains nothing": ("print('hello')", "abstain", "no step of an optimizer was seen"),
    "has no rate": (
        TAILS.replace("lr=0.1", "lr=0.0"),
        "fail",
        "no parameter changes in 6 steps: their learning rate is 0",
    ),
    "makes no step": (TAILS.replace("optimizer.step()", "pass"), "fail", "no parameter changes in"),
    "searches first": (
        "import lightning.pytorch as pl\nfrom lightning.pytorch.tuner import Tuner\nTuner(pl.Trainer()).lr_find(None)",
        "crash",
        "Tuner.lr_find trains before the training",
    ),
    "takes too long": ("import time; time.sleep(600)", "crash", "a limit of 3 s"),
    "writes elsewhere": (
        "from pathlib import Path; Path('/var/lit-cifar.txt').write_text('x')",
        "crash",
        "outside of the folder of this run",
    ),
    "is not deterministic": (
        PLAIN.replace("torch.manual_seed(0)", "torch.seed(); model = None"),
        "abstain",
        "two runs of the script differ",
    ),
}


@pytest.mark.parametrize("name", BAD_SCRIPTS)
def test_a_script_that_cannot_be_judged_has_a_reason(name: str, verdicts: Verdicts) -> None:
    script, outcome, reason = BAD_SCRIPTS[name]
    limit_s = 3 if name == "takes too long" else 60
    (verdict,) = verdicts(script, only="resume", limit_s=limit_s)
    assert verdict.outcome == outcome
    assert reason in verdict.text


def test_the_command_says_what_differs_and_what_it_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    monkeypatch.setenv("BUG", "mean of means")
    (tmp_path / "train.py").write_text(PLAIN)
    only, file = "--only=evaluation,workers,accumulation,score,often", tmp_path / "result.json"
    result = run_here("relations", tmp_path / "train.py", only, f"--json={file}", "--batches=4", check=False)
    assert result.status == 1
    assert re.search(r"^FAIL +evaluation .*evaluated in batches of 1", result.stdout, flags=re.M)
    assert re.search(r"^PASS +accumulation .*6 steps, 48 samples", result.stdout, flags=re.M)
    assert "NOT JUDGED: SCORE, OFTEN. What would judge it stands above\n" in result.stdout
    assert result.stdout.splitlines()[-1] == "2 pass, 1 fail, 2 abstain"
    _, _, block = result.stdout.partition("NOT JUDGED, until the script has these lines")
    compile(textwrap.dedent("".join(re.findall("^    .*\n", block, flags=re.M))), "pasted", "exec")
    assert block.count("relations.") == 2
    found = json.loads(file.read_text())["verdicts"]
    assert [each["outcome"] for each in found] == ["pass", "fail", "pass", "pass", "abstain", "abstain"]


STRICT = "What would judge it stands above; --strict makes it exit status 3"


@pytest.mark.parametrize(
    ("words", "outcomes", "status", "says"),
    [
        ([], {}, 0, ""),
        ([], {"score": "abstain"}, 0, ""),
        ([], {"resume": "abstain", "ranks": "crash"}, 3, f"NOT JUDGED: RESUME, RANKS. {STRICT}"),
        ([], {"resume": "abstain", "ranks": "abstain"}, 0, f"NOT JUDGED: RESUME, RANKS. {STRICT}"),
        (["--strict"], {"evaluation": "abstain"}, 3, "NOT JUDGED: EVALUATION."),
        (["--strict"], {"score": "abstain"}, 0, ""),
        (["--strict"], {"resume": "abstain", "ranks": "fail"}, 1, "NOT JUDGED: RESUME."),
        (["--only=score,ranks"], {"score": "abstain"}, 3, "NOT JUDGED: SCORE."),
        (["--only=ranks"], {"ranks": "note"}, 0, ""),
        (["--only=ranks"], {"run": "fail"}, 1, ""),
    ],
)
def test_the_exit_status_is_0_only_if_what_was_asked_for_was_judged(
    words: list[str], outcomes: dict[str, Any], status: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def judge(_: Target, chosen: dict[str, Any], **__: Any) -> Iterator[Verdict]:
        yield Verdict("run", outcomes.get("run", "pass"))
        if "run" not in outcomes:
            yield from (Verdict(name, outcomes.get(name, "pass"), "why", asked=[name]) for name in chosen)

    monkeypatch.setattr("lit_cifar.tools.relations.judged", judge)
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    (tmp_path / "train.py").touch()
    result = run_here("relations", tmp_path / "train.py", *words, check=False)
    assert result.status == status
    said = "".join(re.findall("NOT JUDGED: .*", result.stdout))
    assert says in said
    assert bool(said) == bool(says)


@pytest.mark.parametrize(
    ("own", "most", "window", "expected"),
    [
        (20, 8, 3, 11),
        (21, 8, 3, 12),
        (22, 8, 3, 10),
        (8, 8, 3, 8),
        (5, 8, 4, 8),
        (90, 8, 16, 58),
        (0, 8, 3, 12),
        (20, 4, 1, 4),
    ],
)
def test_an_epoch_that_is_cut_ends_as_far_inside_a_window(own: int, most: int, window: int, expected: int) -> None:
    trace = Trace(script=Script(calls={"accumulate": window}))
    if own:
        trace.reading.lengths[0] = min(own, most)
    if own > most:
        trace.reading.cut[0] = own
    assert _in_windows(trace, Limits(batches=most)) == expected


CLASSES = """
import lightning.pytorch as pl, torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

class Module(pl.LightningModule):
    def __init__(self, width: int):
        super().__init__()
        self.layer = torch.nn.Linear(6, width)
    def training_step(self, batch, index):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)

class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return DataLoader(torch.ones(16, 6), batch_size=4)
"""


def test_a_module_and_its_data_stand_for_a_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lit_cifar.tools.relations.exit_orderly_when_terminated", lambda: None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(CLASSES)
    words = ("--module=mine.Module", "--data=mine.Data", "--only=accumulation", "--", "--model.width=3")
    result = run_here("relations", *words)
    assert re.search(r"^PASS +accumulation .*12 steps, 48 samples", result.stdout, flags=re.M)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["no.py"], ["no.py is no file"]),
        (["train.sh"], ["train.sh is no Python script", "pass the script that it starts"]),
        (["train.py", "--only=resume,compile"], ["relations --only=compile has gone", "instead: "]),
        (["train.py", "--only=resum"], ["--only=resum is no relation", "did you mean resume?"]),
        (["train.py", "--also=my.function"], ["relations --also has gone", "instead: --same=ARGUMENTS"]),
        (["train.py", "--data=my.Data"], ["--data=my.Data has no effect without --module"]),
        (["train.py", "--limit=nan"], ["--limit=nan must be between 1 and 1000000"]),
        (["train.py", "--batches=0"], ["--batches", "0 is not a whole number from 1"]),
        ([], ["what to train is not said once", "--module=CLASS"]),
        (["train.py", "--module=my.Module"], ["what to train is not said once"]),
    ],
)
def test_a_mistake_in_the_command_is_refused(
    words: list[str], says: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "train.sh").write_text("set -e\npython train.py")
    refused("relations", *words, says=says)
