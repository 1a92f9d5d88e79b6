"""Record the loss of `examples/two_bugs.py` with its bugs, and of mended for ten seeds: `two_bugs.py RECORD.json`.

The losses are those of rank 0, each a mean over its own words.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from lit_cifar.tools.terminal import about, write_json

SCRIPT = Path(__file__).parents[2] / "examples" / "two_bugs.py"
STEPS = 120
MENDED = {
    "for words, following in loader:": "loader.sampler.set_epoch(epoch)\n        for words, following in loader:",
    "following.flatten())": """following.flatten(), reduction="sum")
            num_words = (following != -100).sum()
            own = loss / num_words
            dist.all_reduce(num_words)
            loss = loss * dist.get_world_size() / num_words""",
    "{loss.item()": "{own.item()",
}


def program(*, seed: int, mended: bool) -> str:
    """The script with other weights and another order of its samples, and without its bugs."""
    changes = {
        "    model = Distributed": f"    torch.manual_seed({seed})\n    model = Distributed",
        "DistributedSampler(data)": f"DistributedSampler(data, seed={seed})",
    }
    text = SCRIPT.read_text(encoding="utf-8")
    for old, new in (changes | (MENDED if mended else {})).items():
        if text.count(old) != 1:
            raise ValueError(f"{SCRIPT} does not have {old!r} once")
        text = text.replace(old, new)
    return text


def losses(source: str) -> list[float]:
    """What rank 0 of two processes prints."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(source)
        file.flush()
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", file.name]
        ended = subprocess.run(command, check=False, capture_output=True, text=True)
    found = [float(loss) for loss in re.findall(r"loss (\S+)", ended.stdout)]
    if len(found) != STEPS:  # else all is done, though on busy cores gloo aborts the end of one process in ten
        raise RuntimeError(ended.stderr)
    return found


def main(record: Path) -> None:
    """Write the record."""
    mended = [losses(program(seed=seed, mended=True)) for seed in range(10)]
    write_json(record, about() | {"with_bugs": losses(program(seed=0, mended=False)), "mended": mended})


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("record", type=Path)
    return parser


if __name__ == "__main__":
    main(parser().parse_args().record)
