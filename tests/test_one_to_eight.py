"""The page "From one to eight GPUs": its code is that of two examples that train alike, and its mistakes are found."""

import re
from difflib import unified_diff
from pathlib import Path

import pytest
import torch
from documents import ROOT
from test_tutorial import is_shown, run

from lit_cifar.checks.relations.judging import RELATIONS, judged
from lit_cifar.checks.relations.plan import Limits, Target

PAGE = (ROOT / "docs" / "one-to-eight.md").read_text(encoding="utf-8")
ONE, EIGHT = ((ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") for name in ("one_device", "eight_gpus"))
*STEPS, CALLS = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
QUOTED = [" ".join(text.split()) for text in re.findall(r"```text\n(.*?)```", PAGE, flags=re.DOTALL)]
SLOW = pytest.mark.slow
# In the order of the page: what fails, the relation to ask for, and the mistake, as lines and what people write there.
MISTAKES = {
    "replicas": ("ranks", "ddp(x)", "model(x)"),
    "samples of ranks": ("ranks", "sampler=sampler", "shuffle=True"),
    "ranks, rate": ("ranks", "lr=0.05", "lr=0.05 * size"),
    "evaluation on 2 ranks": ("ranks", "(right)\n", "(right.mul_(len(held_out) / size / len(part)))\n"),
    "resume after 8 steps, epoch": ("resume", "epoch + 1", "epoch"),
    "resume after 8 steps, optimizer": ("resume", '    optimizer.load_state_dict(saved["optimizer"])\n', ""),
    "order of epochs": ("epochs", "sampler.set_epoch(epoch)", "pass"),
    "ranks, ragged": ("ranks", 'cross_entropy(ddp(x), y, reduction="sum") * size / count', "cross_entropy(ddp(x), y)"),
}


def changed(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, old
    return text.replace(old, new)


def with_calls(text: str) -> str:
    for before, added in re.findall(r"((?:[ -].*\n)+)((?:\+.*\n)+)", CALLS):
        kept = re.sub(r"^-.*\n", "", before, flags=re.MULTILINE)
        text = changed(text, *(re.sub("^.", "", lines, flags=re.MULTILINE) for lines in (before, kept + added)))
    return text


def trained(folder: Path, launcher: str, text: str, *ends: int) -> dict[str, torch.Tensor]:
    """Weights and momenta in float64 after the last of these epochs; the training is resumed after each other one."""
    for end in ends:
        script = changed(text, "range(first, 3)", f"range(first, {end})")
        script = changed(script, "import torch\n", "import torch\ntorch.set_default_dtype(torch.float64)\n")
        (folder / "train.py").write_text(script)
        run(f"{launcher} train.py {'' if end == ends[0] else '--resume'}", folder)
    saved = torch.load(folder / "last.pt")
    momenta = {f"momentum {name}": each["momentum_buffer"] for name, each in saved["optimizer"]["state"].items()}
    return saved["model"] | momenta


def test_the_page_has_the_loop_and_the_difference_and_a_line_for_each_mistake() -> None:
    assert f"```python\n{ONE}```" in PAGE
    _, _, *lines = unified_diff(ONE.splitlines(), EIGHT.splitlines(), n=0, lineterm="")
    assert "".join(STEPS).splitlines() == [line for line in lines if not line.startswith("@@")]
    for said, (name, (_, *mistake)) in zip(QUOTED, MISTAKES.items(), strict=True):
        assert said.startswith(f"FAIL {name.split(',')[0]} ")
        changed(with_calls(EIGHT), *mistake)


@SLOW
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("processes", "ends"), [(1, [1, 3]), (2, [3]), (2, [2, 3]), (8, [1, 3])])
def test_processes_train_what_one_device_does(processes: int, ends: list[int], tmp_path: Path) -> None:
    one = trained(tmp_path, "python", ONE, 3)
    others = trained(tmp_path, f"torchrun --standalone --nproc-per-node={processes}", EIGHT, *ends)
    apart = max(float((one[name] - others[name]).abs().max()) for name in one)
    print(f"{processes} processes: weights and momenta differ by {apart:.0e}")
    assert apart < 1e-9


@SLOW
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MISTAKES)
def test_relations_says_what_the_page_quotes(name: str, tmp_path: Path) -> None:
    relation, *mistake = MISTAKES[name]
    (tmp_path / "train.py").write_text(changed(with_calls(EIGHT) if name.startswith(("e", "res")) else EIGHT, *mistake))
    target = Target(program="train.py", folder=str(tmp_path))
    verdicts = judged(target, {relation: RELATIONS[relation]}, limits=Limits(), limit_s=300)
    said = [f"{each.outcome.upper()} {each.relation} {each.text}" for each in verdicts]
    assert any(is_shown(line, QUOTED[[*MISTAKES].index(name)]) for line in said), said
