"""Train every mode with virtual replicas and note the digest of its weights: `benchmarks/scripts/same_bits.py OUTPUT`.

Further flags go to `fit`, e.g. `--data.root=/datasets`. OUTPUT is written as JSON after every run. The same command
again completes it. With `--at_once=2`, modes of one process fill two cores: each process computes with one thread.
"""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.cli.usage_errors import cli_exit
from lit_cifar.errors import ConfigError
from lit_cifar.strategies.modes import Variant, variants
from lit_cifar.tools.commands.terminal import about, say
from lit_cifar.tools.verify.runs import quiet, refuse_if_invalid, run, workers

PARTS = 4
MODES = {
    2: ("single", "dp", "ddp", "ddp_spawn", "mp", "pp", "fsdp2"),
    4: ("dp", "ddp", "ddp_spawn", "mp", "ddp_mp", "pp", "ddp_pp", "fsdp2"),
}
PRECISIONS = ("32-true", "bf16-mixed")
FLAGS = (
    "--model.stem=imagenet",
    "--data.batch_size=64",
    "--data.num_train=740",
    "--data.val_size=100",
    "--data.eval_batch_size=100",
    "--trainer.max_epochs=1",
    "--trainer.accelerator=cpu",
    "--trainer.log_every_n_steps=1",
    "--figures.every_n_epochs=0",
)
TIMEOUT_S = 3600.0


def trained(mode: Variant, precision: str, flags: list[str]) -> dict[str, Any]:
    """Train once; the digest is that of all parameters and buffers after the last epoch."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name, quiet():
        folder = Path(name)
        outcome = run(
            *("fit", f"--virtual_replicas={PARTS}", *FLAGS, *flags, *mode.flags, f"--trainer.precision={precision}"),
            f"--run_dir={folder / 'run'}",
            folder=folder,
            threads=1,
            timeout_s=TIMEOUT_S,
            num_ranks=mode.num_ranks,
        )
        refuse_if_invalid(outcome)
        last = (folder / "run" / DIGESTS).read_text().split("\n")[-2]
        found = {"precision": precision, "mode": mode.name, "devices": mode.devices, "processes": mode.num_processes}
    return found | {"sha256": last.split()[0], "seconds": round(outcome.seconds, 1)}


def rows_of(output: Path, record: dict[str, Any]) -> list[dict[str, Any]]:
    """The finished runs in OUTPUT.

    Raises:
        ConfigError: they are runs of other flags, of another commit or of another machine.
    """
    before = json.loads(output.read_text())
    if differing := [key for key, value in record.items() if key not in ("rows", "started") and before[key] != value]:
        raise ConfigError(f"{output} has runs with other {', '.join(differing)}.", remedy="name another file")
    rows: list[dict[str, Any]] = before["rows"]
    return rows


def main(output: Path, flags: list[str], *, precisions: list[str], at_once: int = 1) -> None:
    record: dict[str, Any] = about() | {"parts": PARTS, "flags": [*FLAGS, *flags], "rows": []}
    if output.exists():
        record["rows"] = rows_of(output, record)
    finished = {(row["precision"], row["mode"], row["devices"]) for row in record["rows"]}
    missing = [
        (mode, precision)
        for precision in precisions
        for devices, names in MODES.items()
        for mode in (variants(devices)[name].with_parts() for name in names)
        if (precision, mode.name, mode.devices) not in finished
    ]
    with workers(at_once) as pool:
        for row in pool.map(lambda which: trained(which[0], which[1], flags), missing):
            record["rows"].append(row)
            output.write_text(json.dumps(record, indent=1) + "\n")
            place = f"{row['precision']} {row['mode']} on {row['devices']}"
            say(f"{place}: {row['sha256'][:16]} after {row['seconds']:.0f} s")


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Note the digest of every mode's weights.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time")
    return parser


if __name__ == "__main__":
    options, rest = parser().parse_known_args()
    with cli_exit():
        main(options.output, rest, precisions=options.precisions, at_once=options.at_once)
