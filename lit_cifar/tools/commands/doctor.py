"""`python -m lit_cifar doctor`: arguments, page and exit status."""

import argparse
from pathlib import Path

from torch.distributed import is_torchelastic_launched

from lit_cifar.errors import ConfigError
from lit_cifar.tools.commands.terminal import (
    CommandParser,
    about,
    console,
    exit_orderly_when_terminated,
    picture_file,
    say,
    writable,
    write_json,
)
from lit_cifar.tools.doctor.examination import examine
from lit_cifar.tools.doctor.page import draw, print_page

_DESCRIPTION = """\
Whether this machine is fit to train in parallel, mode by mode. Looked at are devices, memory, links, versions, disk,
ports, network interfaces and what a launcher has left in the environment. Copies between GPUs are probed. Processes
calculate and send each other tensors: whoever is wrong or slow is named.
Exit status: 0 if no fault was found, 1 if one was, 2 for arguments that cannot work."""


def main(args: list[str]) -> int:
    """Examine, print, and return 0 if no fault was found, else 1.

    Raises:
        ConfigError: Arguments that cannot work, or torchrun has started this process.
        SystemExit: After --help; with status 143 when terminated.
    """
    options = doctor_parser().parse_args(args)
    if is_torchelastic_launched():
        raise ConfigError(
            "torchrun has started this process, and doctor starts its own",
            remedy="run python -m lit_cifar doctor without torchrun, once on each machine",
        )
    json_file, figure = writable(options.json), picture_file(options.figure, example="links.png")
    exit_orderly_when_terminated()
    found = examine(options.devices, folder=Path(options.run_dir), report=lambda line: say(f"checking {line}"))
    print_page(found, console())
    write_json(json_file, about() | found.to_json())
    if figure is not None:
        draw(found.links, figure)
    return 1 if found.faults else 0


def doctor_parser() -> argparse.ArgumentParser:
    """The command's options."""
    parser = CommandParser("doctor", description=_DESCRIPTION)
    parser.add_argument(
        "--devices",
        type=int,
        metavar="N",
        help="Processes that calculate and send each other tensors (default: one for each GPU, or 2 on the CPU).",
    )
    parser.add_argument(
        "--run_dir", default="runs", metavar="FOLDER", help="Where runs will be written (default: runs)."
    )
    parser.add_argument("--json", metavar="FILE", help="Write everything that was found, versions and hardware to it.")
    parser.add_argument("--figure", metavar="FILE", help="Draw the links between the GPUs, as PNG, SVG or PDF.")
    return parser
