"""The page: its sections in the template, with the style sheet in it."""

from collections.abc import Sequence
from pathlib import Path
from string import Template

from lit_cifar import __version__
from lit_cifar.html_report import chart_sections, table_sections
from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.html_report.run_differences import check_comparable, names_of
from lit_cifar.html_report.run_reader import read_run

# Title, explanation and content of each section, in their order.
_SECTIONS = (
    ("Summary", "Intervals of accuracies are those of 95 % (Wilson).", table_sections.summary),
    ("Settings that differ", "", table_sections.settings_that_differ),
    (
        "Loss and accuracy",
        "Training values are means over an epoch, while the network changes. Validation follows the epoch.",
        chart_sections.curves,
    ),
    (
        "Classes",
        "Of the latest evaluation. The diagonal of a matrix counts images that were recognised. Elsewhere, a stronger "
        "color is a larger share of the true class.",
        chart_sections.classes,
    ),
    (
        "Ranks",
        "Of the latest evaluation. Ranks have different images, so some difference is chance.",
        chart_sections.ranks,
    ),
    (
        "Throughput",
        "Images per second of wall time, over all processes. Validation and checkpoints are left out.",
        chart_sections.throughput,
    ),
    (
        "Samples",
        "Runs with the same digest after the same number of epochs used the same samples in the same steps.",
        table_sections.samples,
    ),
    ("Repeat", "The configuration in the run folder has every setting of the run.", table_sections.repeat),
)


def page_of(folders: Sequence[Path]) -> str:
    """One HTML page about the runs in these folders, which loads nothing from anywhere.

    Raises:
        ConfigError: A folder is not that of a run, is given twice, or has a damaged file; or the runs have different
            data sets.
    """
    runs = dict(zip(names_of(folders), map(read_run, folders), strict=True))
    check_comparable(runs)
    data = next(iter(runs.values())).environment["data"]
    here = Path(__file__).parent
    return Template((here / "page.html").read_text(encoding="ascii")).substitute(
        title=joined(f"{data}: {next(iter(runs)) if len(runs) == 1 else f'{len(runs)} runs'}"),
        style=(here / "page.css").read_text(encoding="ascii"),
        sections=joined(*(_section(title, words, content(runs)) for title, words, content in _SECTIONS)),
        version=joined(__version__),
    )


def _section(title: str, words: str, content: Markup | None) -> Markup | None:
    explained = element("p", words) if words else None
    return None if content is None else element("section", element("h2", title), explained, content)
