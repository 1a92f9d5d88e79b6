"""`python -m lit_cifar doctor`: arguments, page and exit status."""

import argparse
from pathlib import Path

from lit_cifar.tools.commands import terminal
from lit_cifar.tools.doctor.examination import examine
from lit_cifar.tools.doctor.page import print_page

_DESCRIPTION = """\
Whether this machine is fit to train in parallel, mode by mode. Looked at are devices, memory, links, versions, disk,
ports, network interfaces and what a launcher has left in the environment. Copies between GPUs are probed. Processes
calculate and send each other tensors: whoever is wrong or slow is named.
Exit status: 0 if no fault was found, 1 if one was, 2 for arguments that cannot work."""


def main(args: list[str]) -> int:
    """Examine, print, and return 0 if no fault was found, else 1."""
    options = doctor_parser().parse_args(args)
    json_file = terminal.writable(options.json)
    terminal.exit_orderly_when_terminated()
    found = examine(options.devices, folder=Path(options.run_dir), report=lambda line: terminal.say(f"checking {line}"))
    print_page(found, terminal.console())
    terminal.write_json(json_file, terminal.about() | found.to_json())
    return 1 if found.faults else 0


def doctor_parser() -> argparse.ArgumentParser:
    parser = terminal.CommandParser("doctor", description=_DESCRIPTION)
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
    return parser
