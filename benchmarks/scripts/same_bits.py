"""Train every mode with virtual replicas and note the digest of its weights: `benchmarks/scripts/same_bits.py OUTPUT`.

Further flags go to `fit`, e.g. `--data.root=/datasets`. OUTPUT is written as JSON after every run. The same command
again completes it. With `--at_once=2`, modes of one process fill two cores: each process computes with one thread.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

from run_record import complete, run_script

from lit_cifar.checkpoint.files import DIGESTS
from lit_cifar.reporting.output import without_banners
from lit_cifar.tools.modes import SizedMode, sized_modes
from lit_cifar.tools.terminal import about, say
from lit_cifar.tools.verify.runs import refuse_if_invalid, run

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


def trained(mode: SizedMode, precision: str, flags: list[str]) -> dict[str, Any]:
    """Train once; the digest is that of all parameters and buffers after the last epoch."""
    with tempfile.TemporaryDirectory(prefix="same-bits-") as name:
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


def main(output: Path, flags: list[str], *, precisions: list[str], at_once: int = 1) -> None:
    """Runs of another commit or machine, or of other flags, are not continued."""
    cases = [
        (sized_modes(devices)[name].with_parts(), precision)
        for precision in precisions
        for devices, names in MODES.items()
        for name in names
    ]

    def tell(row: dict[str, Any]) -> None:
        place = f"{row['precision']} {row['mode']} on {row['devices']}"
        say(f"{place}: {row['sha256'][:16]} after {row['seconds']:.0f} s")

    here = {name: value for name, value in about().items() if name not in ("started", "command")}
    complete(
        output,
        cases,
        lambda case: trained(*case, flags),
        settings=here | {"parts": PARTS, "flags": [*FLAGS, *flags]},
        tell=tell,
        at_once=at_once,
    )


def parser() -> argparse.ArgumentParser:
    """The script's own arguments; the others go to `fit`."""
    parser = argparse.ArgumentParser(description="Note the digest of every mode's weights.")
    parser.add_argument("output", type=Path, help="JSON file to write")
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--at_once", type=int, default=1, help="runs at a time")
    return parser


if __name__ == "__main__":
    with without_banners():
        run_script(parser(), main)
