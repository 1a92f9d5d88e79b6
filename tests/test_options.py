"""Options for GPUs in every mode: each cell in docs/gpu-options.md works, or is refused with its reason."""

import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import TINY, launch, mode_flags, refused, run_here
from short_fits import losses

from lit_cifar.cli.main import CLI
from lit_cifar.data.batch_split import GhostBatches
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.verify import evaluation
from lit_cifar.tools.verify.comparison import EXACT_BOUND, LOGITS
from lit_cifar.tools.verify.configuration import Configuration
from lit_cifar.tools.verify.evaluation import Evaluated
from lit_cifar.tools.verify.launcher import Launcher
from lit_cifar.tools.verify.record import Record
from lit_cifar.tools.verify.reference import References
from lit_cifar.tools.verify.runs import Outcome
from lit_cifar.tools.verify.verdict_table import VerifiedMode
from lit_cifar.tools.verify.verifier import Case, Verifier

PAGE = Path(__file__).parents[1] / "docs" / "gpu-options.md"
DEVICES = {"single": 1, "ddp_mp": 4, "ddp_pp": 4}
HERE = str(Path(__file__).parent)
STEP: dict[str, Any] = {
    "loss": {"loss": torch.tensor(1.0)},
    "parameters": {"weight": torch.zeros(2)},
    "buffers": {},
    "optimizer": {},
}

# ---------------------------------------------------------------- the table


def table() -> dict[tuple[str, str], str]:
    """What the page says of every option and mode: "yes", "GPU", or the letter of a reason why not."""
    lines = PAGE.read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    begin, end = (next(i for i, row in enumerate(rows) if word in row) for word in ("one device", "reason"))
    (_, *names), _, *rest = rows[begin:end]
    return {
        (" ".join(re.findall(r"--[^`]+", option)), name.strip("`").replace("one device", "single")): cell
        for option, *cells in rest
        for name, cell in zip(names, cells, strict=True)
    }


def reasons() -> dict[str, str]:
    """By letter, the words that a refusal begins with."""
    return dict(re.findall(r'^\| \(([a-z])\) \| "(.+?)" \|', PAGE.read_text(), flags=re.MULTILINE))


CELLS = table()


def test_the_table_is_whole() -> None:
    options, names = {option for option, _ in CELLS}, [name for option, name in CELLS if "compile=true" in option]
    assert names == ["single", "dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2", "tp"]
    assert len(CELLS) == len(options) * len(names)
    cells = {"d" if cell == "GPU" else cell.strip("()") for cell in CELLS.values()}
    assert cells == {"yes", *reasons()}
    for words in ("channels_last", "compile", "fused", "bf16-mixed", "16-mixed", "bf16-true", "64-true", "benchmark"):
        assert any(words in option for option in options)


REFUSED = [pytest.param(*key, cell, id=" ".join(key)) for key, cell in CELLS.items() if cell != "yes"]


@pytest.mark.parametrize(("option", "mode", "cell"), REFUSED)
def test_a_refusal_is_the_documented_one(option: str, mode: str, cell: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, and before any process is started."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    result = run_here("fit", *TINY, *mode_flags(mode, DEVICES.get(mode, 2)), *option.split())
    assert result.status == 2
    lines = [line for line in result.stderr.splitlines() if "Automatic Mixed Precision" not in line]
    assert 2 <= len(lines) <= 5
    said = f"{option} {reasons()['d']}" if cell == "GPU" else reasons()[cell.strip("()")]
    assert said in " ".join(" ".join(lines).split())


COMPILED = "--model.compile=true"
# What the table has no cell for.
TOGETHER = {
    "the communication in every BatchNorm layer": [*mode_flags("ddp"), "--trainer.sync_batchnorm=true", COMPILED],
    "ZBVZeroBubble cuts backward in two": [
        *mode_flags("PipelineStrategy"),
        *("--trainer.strategy.schedule=ZBVZeroBubble", COMPILED),
    ],
    "exchange their parameters for local parts": [
        *mode_flags("ShardedStrategy", 4),
        *("--trainer.strategy.data_parallel_size=2", "--trainer.strategy.tensor_parallel_size=2", COMPILED),
    ],
    "a graph overwrites those of the batch before": [
        *("--model.compile=cuda_graphs", "--trainer.accumulate_grad_batches=2"),
    ],
    "unscales the gradients only after they have been clipped": [
        *("--trainer.plugins=MixedPrecision", "--trainer.plugins.precision=16-mixed", "--trainer.plugins.device=cpu"),
        *("--model.optimizer.fused=true", "--trainer.gradient_clip_val=1.0"),
    ],
}


@pytest.mark.parametrize(("words", "flags"), TOGETHER.items(), ids=TOGETHER)
def test_options_that_do_not_go_together_are_refused(
    words: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before any process is started."""
    monkeypatch.setattr(CLI, "_run_subcommand", CLI._check)
    assert words in " ".join(refused("fit", *TINY, *flags).split())


# ---------------------------------------------------------------- what works

# Accumulated and clipped gradients, and a ragged last batch.
BASE = [
    "--model.arch=tiny",
    "--model.stem=imagenet",
    "--model.optimizer.lr=0.02",
    "--data.dataset=synthetic",
    "--data.num_train=175",
    "--data.val_size=15",
    "--data.batch_size=64",
    "--trainer.accumulate_grad_batches=2",
    "--trainer.gradient_clip_val=0.5",
]
ROUNDED = ("bf16-true", "16-true")  # too coarse for `verify`


def cells(*endings: str) -> list[Any]:
    """The option and the mode wherever an option works whose flags end so; the whole table takes many minutes."""
    works = [key for key, cell in CELLS.items() if cell == "yes" and key[0].endswith(endings)]
    return [pytest.param(*key, id=" ".join(key), marks=pytest.mark.exhaustive) for key in works]


class Verifiers:
    """One for each option; the one device is compared with several of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[str, Verifier] = {}
        self._plain: Verifier | None = None

    def of(self, option: str) -> Verifier:
        if option not in self._found:
            flags = [*BASE, *option.split()]
            flags += [] if "precision" in option else ["--trainer.precision=64-true"]
            if "compile" in option:
                flags.append("--trainer.callbacks+=option_backends.QuickCompiler")
            folder = self.folder / f"{len(self._found)}"
            folder.mkdir()
            settings = Configuration.of(flags, devices=4, folder=folder)
            self._found[option] = Verifier(Launcher(settings, 3, folder, lambda line: None))
            if not re.search("fused|bf16", option):  # the others change nothing in what one device computes
                self._plain = self._plain or self._found[option]
                vars(self._found[option])["references"] = self._plain.references
        return self._found[option]


def compared(verifier: Verifier, mode: SizedMode) -> VerifiedMode:
    (row,) = [compared.row for compared in verifier.compare([Case(mode)])]
    return row


@pytest.fixture(scope="module")
def verifiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Verifiers]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", HERE)
        yield Verifiers(tmp_path_factory.mktemp("options"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "mode"), cells("=true", "=64-true", "bf16-mixed"))
def test_a_mode_with_an_option_trains_what_one_device_trains_without(
    option: str, mode: str, verifiers: Verifiers
) -> None:
    """In bfloat16 it rounds as one device does."""
    row = compared(verifiers.of(option), sized_modes(max(2, DEVICES.get(mode, 2)))[mode])
    assert row.problems == []
    assert "bf16" in option or max(row.differences.values()) <= EXACT_BOUND


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("option", "mode"), cells(*ROUNDED))
def test_a_mode_trains_in_a_narrow_type(option: str, mode: str, tmp_path: Path) -> None:
    flags = [*TINY, *option.split(), "--model.optimizer.lr=0.001", "--watchdog.timeout_s=0"]
    launch("fit", *flags, *mode_flags(mode, DEVICES.get(mode, 2)), f"--run_dir={tmp_path / 'run'}")
    launch("fit", *flags, f"--run_dir={tmp_path / 'alone'}")
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=0.1)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_the_one_device_goes_without_what_the_modes_are_to_show_equal(
    precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started = []

    def note(self: Launcher, title: str, folder: Path, flags: list[str], trace: dict[str, str]) -> Outcome:
        started.append([*self.settings.flags, *flags])
        return Outcome(0, "", "", 0.0)

    monkeypatch.setattr(Launcher, "_fit", note)
    monkeypatch.setattr(Record, "steps", [1, 2])
    monkeypatch.setattr(Record, "step", lambda self, number: STEP)
    config = {"trainer": {"precision": precision, "accelerator": "cpu"}, "data": {"batch_size": 8, "val_size": 0}}
    settings = Configuration(("--model.compile=true", "--model.channels_last=true", f"--precision={precision}"), config)
    references = References(Launcher(settings, 2, tmp_path, lambda line: None))
    with ThreadPoolExecutor() as pool:
        references.start(GhostBatches(), pool)
    last = [dict(flag.split("=", 1) for flag in flags if "=" in flag) for flags in started]
    assert all((flags["--model.compile"], flags["--model.channels_last"]) == ("false", "false") for flags in last)
    precisions = Counter(flags.get("--trainer.precision") for flags in last)
    assert precisions == {None: 3} | ({} if precision == "32-true" else {"32-true": 1})
    assert len(references.get(GhostBatches()).bounds) == 2


@pytest.mark.parametrize("precision", ["64-true", "32-true", "32", "bf16-mixed"])
def test_an_evaluation_may_differ_by_what_rounding_turns(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four times what the same evaluation in a wider precision differs by."""

    def alone(step: Any, *, config: Any, precision: str | None = None) -> tuple[Evaluated, dict[str, float]]:
        logits = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) + (0.0 if precision is None else 0.01)
        return Evaluated(torch.tensor([0, 1]), torch.tensor([0, 1]), logits), {"val/loss": float(logits.sum())}

    monkeypatch.setattr(evaluation, "_evaluated_alone", alone)
    found = evaluation.expected({}, config={"trainer": {"precision": precision}})  # type: ignore[typeddict-item]
    bound = found.bounds[LOGITS]
    assert bound == EXACT_BOUND if precision == "64-true" else bound == pytest.approx(4 * 0.01 / 4.01, rel=0.01)
