"""`python -m lit_cifar report`: a page about runs."""

import argparse
from pathlib import Path

from lit_cifar.errors import ConfigError
from lit_cifar.tools.commands.terminal import CommandParser, say

_DESCRIPTION = """\
Write one HTML page about runs of `fit`, `validate` and `test`: what they reached, in what their settings differ, loss
and accuracy, classes, ranks, throughput, samples, and the command that repeats each. The page is a single file that
loads nothing from the network. Several runs of the same data set are shown in the same charts."""


def main(args: list[str]) -> int:
    """Write the page and return 0."""
    options = report_parser().parse_args(args)
    from lit_cifar.tools.html_report.page import page_of  # its libraries draw: nothing else here needs them

    page = page_of([Path(run) for run in options.runs])
    target = Path(options.output)
    try:
        target.write_bytes(page.encode(errors="replace"))
    except OSError as error:
        raise ConfigError(
            f"--output={target} cannot be written: {error.strerror}", remedy="choose another file"
        ) from error
    say(f"wrote {target}, {target.stat().st_size / 1000:,.0f} kB")
    return 0


def report_parser() -> argparse.ArgumentParser:
    parser = CommandParser("report", description=_DESCRIPTION)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Run folders.")
    parser.add_argument(
        "--output", default="report.html", metavar="FILE", help="Where to write the page (default: report.html)."
    )
    return parser
