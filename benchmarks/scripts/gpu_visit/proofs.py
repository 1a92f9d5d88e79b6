"""Steps that compare: every mode with one device by `verify`, and the tests of the package that are for a GPU."""

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from gpu_visit.step import Check, FailedError, LeftOutError, Step
from lit_cifar.launch.signals import EXIT_REFUSED
from lit_cifar.tools.modes import sized_modes

_TESTS = Path(__file__).parents[3] / "tests" / "test_gpu.py"
_PYTEST = (
    "pytest",
    str(_TESTS),
    "-q",
    "-rfEs",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:benchmark",
    "--tb=short",
    "-W",
    "ignore::pytest.PytestAssertRewriteWarning",
)
_FIRST = ("tp", "ddp_spawn")  # take longest


def tests(step: Step, marker: str) -> None:
    """Those with that marker, several at a time."""

    def check() -> str:
        workers = step.visit.jobs if step.visit.jobs > 2 else 0  # each imports everything for itself
        output = step.output_of("pytest", *_PYTEST, "-m", marker, "-n", str(workers), limit_s=600)
        return output.strip().splitlines()[-1].strip(" =")

    step.check(f"pytest -m '{marker}'", check)


def relations(step: Step) -> None:
    """Does `relations --gpu` find both bugs of the example on the GPU, and none without them?"""
    example = (_TESTS.parents[1] / "examples" / "two_bugs.py").read_text()
    device = "cuda:{os.environ.get('LOCAL_RANK', '0')}" if step.visit.on_gpu else "cpu"
    backend = "nccl" if step.visit.on_gpu else "gloo"
    buggy = _replaced(example, 'dist.init_process_group("gloo")', f'dist.init_process_group("{backend}")')
    to = f'.to(f"{device}")'
    buggy = _replaced(buggy, "sentences[:, :-1], targets)", f"sentences[:, :-1]{to}, targets{to})")
    buggy = _replaced(buggy, "nn.Linear(32, WORDS))", f"nn.Linear(32, WORDS)){to}")
    buggy = _replaced(buggy, "import torch\n", "import os\n\nimport torch\n")
    right = _replaced(buggy, "        for words", "        loader.sampler.set_epoch(epoch)\n        for words")
    right = _replaced(right, "following.flatten())", 'following.flatten(), reduction="sum") / following.numel()')

    def check(script: str, expected: str) -> str:
        folder = Path(mkdtemp(dir=step.work))
        (folder / "train.py").write_text(script)
        words = [
            "--gpu",
            "--only=ranks,epochs",
            "--steps=24",
            f"--json={folder / 'verdicts.json'}",
            f"{folder / 'train.py'}",
        ]
        ended = step.run(folder.name, "lit_cifar", "relations", *words)
        if not (file := folder / "verdicts.json").exists():
            raise FailedError(ended.last_words)
        first, *others = json.loads(file.read_text())["verdicts"]
        outcomes = {each["relation"]: each["outcome"] for each in others}
        if [outcomes.get(name) for name in ("ranks", "order of epochs")] != [expected] * 2:
            raise FailedError(f"not {expected}: {[each['text'] for each in (first, *others)]}")
        return f"{first['looked_at']}: {expected}"

    step.check_all({"two bugs": partial(check, buggy, "fail"), "mended": partial(check, right, "pass")})


def _replaced(text: str, part: str, other: str) -> str:
    if text.count(part) != 1:
        raise FailedError(f"the example has {part!r} {text.count(part)} times")
    return text.replace(part, other)


def on_one_gpu(step: Step) -> dict[str, Check]:
    """In float64, with all parts of a mode on one device: `ddp_mp` with two processes of two stages each."""
    if not step.visit.on_gpu:
        return verified(step, ["tp"], 2, ["--steps=2"])
    others = [name for name in sized_modes(2) if name not in _FIRST]
    return _with_graphs(step) | verified(step, ["ddp_mp"], 4, []) | verified(step, [*_FIRST, *others], 2, [])


def on_several_gpus(step: Step) -> None:
    """In float64, on two GPUs and on all."""
    num_gpus = step.visit.several()
    step.check_all(verified(step, [*sized_modes(2)] if step.visit.on_gpu else ["ddp"], 2, []))
    step.check_all(_with_graphs(step) if step.visit.on_gpu else {})
    if num_gpus >= 4:
        step.check_all(verified(step, [*sized_modes(num_gpus)], num_gpus, []))


def _with_graphs(step: Step) -> dict[str, Check]:
    """Against one device that starts every kernel by itself."""
    found = verified(step, ["single", "ddp_flat"], 2, ["--model.compile=cuda_graphs"])
    return {f"{name}, CUDA graphs": check for name, check in found.items()}


def same_bits(step: Step) -> None:
    """With virtual replicas, has every mode on one device the bits of one device?"""
    for precision in ["32-true", "bf16-mixed", "64-true"] if step.visit.on_gpu else ["32-true"]:
        flags = ["--virtual_replicas=4", "--trainer.deterministic=true", f"--trainer.precision={precision}"]
        checks = verified(step, ["dp", "mp", "ddp", "ddp_mp"] if step.visit.on_gpu else ["dp"], 2, flags)
        step.check_all({f"{name}, {precision}": check for name, check in checks.items()})


def verified(step: Step, modes: Sequence[str], devices: int, flags: Sequence[str]) -> dict[str, Check]:
    """A check for each mode, by a `verify` of its own."""
    arch = "resnet10" if step.visit.on_gpu else "tiny"
    network = [f"--model.arch={arch}", "--model.stem=imagenet"]
    usual = [f"--trainer.accelerator={step.visit.accelerator}", *network, *flags]

    def check(mode: str) -> tuple[str, dict[str, Any]]:
        folder = Path(mkdtemp(dir=step.work))
        words = [f"--modes={mode}", f"--devices={devices}", f"--json={folder / 'rows.json'}", *usual]
        ended = step.run(folder.name, "lit_cifar", "verify", *words)
        if ended.status == EXIT_REFUSED:
            raise LeftOutError(ended.last_words)
        if not (file := folder / "rows.json").exists():
            raise FailedError(ended.last_words)
        (row,) = json.loads(file.read_text())["rows"]
        if row["outcome"] != "pass":
            raise FailedError(f"{row['outcome']}: {'; '.join(row['problems'])}")
        worst = ", ".join(f"{kind} {value:.1e}" for kind, value in row["differences"].items())
        return f"{row['processes']} processes, off by {worst}; {row['equals']}", row

    return {f"{mode}, {devices} devices": partial(check, mode) for mode in modes}
