"""What of a folder of wheels this Python lacks, and its installation beside what is there; standard library only."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_ROOT = Path(__file__).parents[2]


def missing(folder: Path, floors: Mapping[str, str]) -> list[Path]:
    """The wheels in `folder` whose package is not here, or older than its floor, and those of this project itself.

    Args:
        folder: Holds at most one wheel of each package.
        floors: Oldest versions that do, by normalised name.
    """
    return [wheel for wheel in sorted(folder.glob("*.whl")) if not _is_here(wheel, floors)]


def _is_here(wheel: Path, floors: Mapping[str, str]) -> bool:
    name = normalised(wheel.name.split("-")[0])
    try:
        found = version(name)
    except PackageNotFoundError:
        return False
    return _numbers(found) >= _numbers(floors.get(name, "0"))


def floors(pyproject: Path = _ROOT / "pyproject.toml") -> dict[str, str]:
    """The oldest versions that the project takes, by normalised name."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    found = (re.match(r"([\w.-]+)(?:\[.*\])?>=([\d.]+)", requirement) for requirement in wanted)
    return {normalised(match[1]): match[2] for match in found if match}


def normalised(name: str) -> str:
    """As the package index writes names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text.split("+")[0])[:3]]


def install(wheels: list[Path], site: Path) -> subprocess.CompletedProcess[str]:
    """Put `wheels` into the folder `site`, which nothing is fetched for."""
    words = ["-m", "pip", "install", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade"]
    words += ["--disable-pip-version-check", "--root-user-action=ignore", "--target", str(site), *map(str, wheels)]
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=120)
