"""Every record names its origin, and pages and figures show what the records say."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from documents import BENCHMARKS, PAGES, RECORDS, ROOT, SCRIPTS, blocks, is_in_history
from PIL import Image

FIGURES = ROOT / "docs" / "figures"
# Written before these commands noted commit and machine, with a commit in each row, or without history: pages say so.
WITHOUT_COMMIT = {
    "verify/2026-11-20/devices4_float64.json",
    "modes/2026-11-21-steps/losses.json",
    *(f"recipes/2026-11-23-gpu/{name}.json" for name in ("search", "sgd_epochs")),
    *(
        str(file.relative_to(BENCHMARKS))
        for folder in ("gpu/2026-11-26", "recipes/2026-11-26-gpu", "recipes/2026-11-27-augmentation")
        for file in (BENCHMARKS / folder).rglob("*.json")
    ),
}


def page(path: Path) -> str:
    """In one line."""
    return " ".join(path.read_text(encoding="utf-8").split())


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: str(record.relative_to(BENCHMARKS)))
def test_a_record_names_command_hardware_versions_and_n(record: Path) -> None:
    text = page(record / "README.md")
    assert blocks(record / "README.md")
    assert re.search(r"cores? of an (AMD|Intel)|NVIDIA", text)
    assert re.search(r"torch \d+\.\d+\.\d+, lightning \d+\.\d+\.\d+", text)
    assert re.search(r"\bn = \d", text)
    assert re.search(r"\bcommit [0-9a-f]{7}\b", text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_the_commits_that_a_page_names_are_in_the_history(path: Path) -> None:
    named = re.findall(r"\b(?:commit|checkout) ([0-9a-f]{7,40})\b", page(path))
    assert [commit for commit in named if not is_in_history(commit)] == []


@pytest.mark.parametrize("file", sorted(BENCHMARKS.rglob("*.json")), ids=lambda file: str(file.relative_to(BENCHMARKS)))
def test_a_page_says_of_commit_and_machine_what_its_files_say(file: Path) -> None:
    content, text = read(file), page(next(record for record in RECORDS if record in file.parents) / "README.md")
    if str(file.relative_to(BENCHMARKS)) not in WITHOUT_COMMIT:
        assert content["git"]["modified"] is False
        assert f"commit {content['git']['commit'][:7]}" in text
    if "passed" in content:
        assert content["passed"] or "What is missed:" in text
    if "versions" in content:
        assert f"torch {content['versions']['torch'].split('+')[0]}" in text
        assert f"lightning {content['versions']['lightning']}" in text
        assert content["cpu"]["model"].replace("(R)", "").removesuffix(" Processor") in text
        assert bool(content["gpus"]) != ("no GPU" in text)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("scripts")
def test_pages_have_the_records_numbers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import pages

    assert pages.main(check=True) == 0, capsys.readouterr().out + "write them again: python benchmarks/scripts/pages.py"
    named = {place for path in PAGES for place in re.findall(r"<!--n:(.+?)-->", path.read_text(encoding="utf-8"))}
    assert len(named) > 50
    monkeypatch.setattr(pages, "brief", lambda value: "7e-07")
    assert pages.main(check=True) == 1
    assert "README.md: verify-largest should be\n<!--n:verify-largest-->7e-07<!--/n-->" in capsys.readouterr().out


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_place_for_a_number_is_closed_and_does_not_hide_text(path: Path) -> None:
    """Markdown takes a line that begins with a comment for HTML, to its end."""
    text = path.read_text(encoding="utf-8")
    assert text.count("<!--n:") == len(re.findall(r"<!--n:[\w-]+-->(?:(?!<!--n:).)*?<!--/n-->", text, flags=re.DOTALL))
    assert re.findall(r"^\s*(?:[-*] )?<!--.*?-->.+", text, flags=re.MULTILINE) == []


@pytest.mark.parametrize("path", sorted(FIGURES.glob("*.png")), ids=lambda path: path.stem)
@pytest.mark.usefixtures("scripts")
def test_a_figure_shows_its_record(path: Path, tmp_path: Path) -> None:
    """By what it says that it shows; and by its pixels, where the same release of Matplotlib draws them."""
    import figures

    draw, record = figures.FIGURES[path.stem]
    figures.save(draw(record), tmp_path / "new.png")
    with Image.open(path) as old, Image.open(tmp_path / "new.png") as new:
        assert old.text["Content"] == new.text["Content"], "draw it again: python benchmarks/scripts/figures.py"
        if old.text["Software"] == new.text["Software"]:
            assert old.size == new.size
            assert np.abs(np.asarray(old.convert("L"), float) - np.asarray(new.convert("L"), float)).mean() < 0.1


@pytest.mark.parametrize("path", sorted((BENCHMARKS / "relations" / "findings").glob("*.md")), ids=lambda it: it.stem)
def test_a_finding_can_be_sent_to_its_project(path: Path) -> None:
    """It has a short program that needs nothing of this package, and says the rest; docs/findings.md names it."""
    text = path.read_text(encoding="utf-8")
    assert all(f"**{part}:**" in text for part in ("Versions", "Expected", "Reported", "Remedy"))
    (program,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert len(program.splitlines()) <= 40
    assert "lit_cifar" not in program
    compile(program, path.name, "exec")
    assert f"/{path.name})" in page(ROOT / "docs" / "findings.md")
