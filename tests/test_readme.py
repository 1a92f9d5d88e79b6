"""What the documents print is true: commands parse, files exist, figures come from the recorded runs."""

import re
import shlex
import sys
from pathlib import Path

import pytest
from commands import run_here

from lit_cifar.commands.chaos.command import chaos_parser
from lit_cifar.commands.verify.command import verify_parser

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands() -> list[str]:
    """Every command line of the program in a code block of the documents, without its launcher."""
    found = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), flags=re.DOTALL):
            lines = block.replace("\\\n", " ").splitlines()
            found += [line.split("lit_cifar ", 1)[1] for line in lines if "-m lit_cifar " in line]
    return sorted({command.split(" #")[0].strip() for command in found})


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command.replace("RUN/config.yaml", "configs/quickstart.yaml"))
    if words[0] == "modes":
        assert words == ["modes"]
        return
    if words[0] == "chaos":
        chaos_parser().parse_args(words[1:])
        return
    if words[0] == "verify":
        _, passed_on = verify_parser().parse_known_args(words[1:])
        words = ["fit", *passed_on]
    result = run_here(words[0], *words[1:], "--print_config")
    assert result.status == 0, result.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_readme_names_files_that_exist() -> None:
    named = re.findall(
        r"`((?:lit_cifar|configs|tests|notebooks|benchmarks|docs)/[\w./-]*)`", (ROOT / "README.md").read_text()
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_figures_are_drawn_from_the_recorded_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import figures

    figures.main(tmp_path)
    for name in ("articles_run.png", "loss_curves.png"):
        assert (tmp_path / name).stat().st_size > 10_000
    del sys.modules["figures"]
