"""What the documents are made of: pages, the commands in them, what parses these, and the commits that are named."""

import re
import shlex
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from commands import run_here

from lit_cifar.cli.main import CLI

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
SCRIPTS = BENCHMARKS / "scripts"
RECORDS = sorted(page.parent for page in BENCHMARKS.glob("*/*/README.md"))
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += [*sorted((ROOT / "docs").glob("*.md")), *sorted(BENCHMARKS.rglob("README.md"))]


def blocks(page: Path) -> list[list[list[str]]]:
    """The commands in each block of a page, as words; without those below a diff, which `test_contributing` runs."""
    found = []
    text = re.sub(r"```diff\n.*?```\s*```bash\n.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for block in re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL):
        lines = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
        found.append([command for line in lines for command in _joined_by_and(line) if command])
    return found


def inline_commands(page: Path) -> list[list[str]]:
    """Commands of the program within the text, and the flags of a table whose header is one."""
    text = page.read_text(encoding="utf-8")
    commands = re.findall(r"`((?:python|torchrun|pytest) [^`]+)`", text)
    commands += [f"python -m lit_cifar fit {flags}" for flags in re.findall(r"\| `(--[^`]+)` \|", text)]
    return [shlex.split(command) for command in commands]


def commit_of(block: list[list[str]]) -> str | None:
    """The commit that a block checks out first: what follows is for the program as it was there."""
    return block[0][2] if block[0][:2] == ["git", "checkout"] else None


def _joined_by_and(words: list[str]) -> list[list[str]]:
    commands: list[list[str]] = [[]]
    for word in words:
        if word == "&&":
            commands.append([])
        else:
            commands[-1].append(word)
    return commands


@cache
def parser_of(subcommand: str) -> Any:
    """The parser of fit, validate, test or predict: to build it takes longer than to parse a command."""
    found: list[Any] = []

    def keep(cli: CLI, parser: Any, args: Any) -> None:
        found.append(parser)
        raise SystemExit

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CLI, "parse_arguments", keep)
        run_here(subcommand)
    return found[0]


@cache
def history() -> tuple[str, ...]:
    """Every commit up to this one; the calling test is skipped where there are not all of them."""
    asked = ["git", "rev-parse", "--show-toplevel", "--is-shallow-repository"]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True)
    if done.returncode or done.stdout.split() != [str(ROOT), "false"]:
        pytest.skip("needs a git repository with its whole history")
    return tuple(git("rev-list", "HEAD").split())


def git(*args: str) -> str:
    return subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def is_in_history(commit: str) -> bool:
    return any(known.startswith(commit) for known in history())
