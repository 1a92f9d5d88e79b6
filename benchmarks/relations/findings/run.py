"""Is what the pages of this folder tell still so? `python benchmarks/relations/findings/run.py [NAME ...]`.

Each page's program runs in a fresh process, in an empty folder, and its output is compared with the page's.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
LIMIT_S = 300


def parts(page: Path) -> tuple[str, str]:
    """The program of a page, and the output that it tells."""
    text = page.read_text(encoding="utf-8")
    program, output = (re.findall(rf"```{kind}\n(.*?)```", text, flags=re.DOTALL)[0] for kind in ("python", "text"))
    return program, output


def outcome(page: Path) -> str:
    program, expected = parts(page)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "program.py").write_text(program, encoding="utf-8")
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
        try:
            command = [sys.executable, "program.py"]
            run = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not shown any more: no end after {LIMIT_S} s"
    if missing := re.search(r"^ModuleNotFoundError: No module named '(\w+)", run.stderr, flags=re.MULTILINE):
        return f"cannot run: {missing[1]} is missing"
    same = [line.split() for line in run.stdout.splitlines()] == [line.split() for line in expected.splitlines()]
    if same and run.returncode == 0:
        return "shown"
    return f"not shown any more: exit status {run.returncode}, {(run.stdout + run.stderr).strip()[-300:]}"


def main(names: list[str]) -> int:
    pages = [HERE / f"{name}.md" for name in names] or sorted(HERE.glob("*.md"))
    outcomes = []
    for page in pages:
        begun = time.perf_counter()
        outcomes.append(outcome(page))
        print(f"{page.stem:42} {time.perf_counter() - begun:4.0f} s  {outcomes[-1]}", flush=True)
    return int(any(it.startswith("not shown") for it in outcomes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="names of pages; without one all are run")
    sys.exit(main(parser.parse_args().names))
