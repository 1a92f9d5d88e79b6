"""The page: its sections in the template, with the style sheet in it."""

from collections.abc import Sequence
from pathlib import Path
from string import Template

from lit_cifar import __version__
from lit_cifar.html_report import figures, overview
from lit_cifar.html_report.comparison import check_comparable, names_of
from lit_cifar.html_report.markup import Markup, element, joined
from lit_cifar.html_report.run import Run, read_run

_HERE = Path(__file__).parent


def page_of(folders: Sequence[Path]) -> str:
    """One HTML page about the runs in these folders, which loads nothing from anywhere.

    Raises:
        ConfigError: A folder is not that of a run, is given twice, or has a damaged file; or the runs have different
            data sets.
    """
    names = names_of(folders)
    runs = [read_run(folder) for folder in folders]
    check_comparable(runs, names)
    title = f"{runs[0].environment['data']}: {names[0] if len(runs) == 1 else f'{len(runs)} runs'}"
    template = Template((_HERE / "page.html").read_text(encoding="ascii"))
    return template.substitute(
        title=joined(title),
        style=(_HERE / "page.css").read_text(encoding="ascii"),
        sections=joined(*_sections(runs, names)),
        version=joined(__version__),
    )


def _sections(runs: Sequence[Run], names: Sequence[str]) -> list[Markup]:
    contents = {
        "Runs": overview.runs_table(runs, names),
        "Settings that differ": overview.settings_table(runs, names),
        "Loss and accuracy": figures.curves(runs, names),
        "Classes": figures.by_class(runs, names),
        "Ranks": figures.by_rank(runs, names),
        "Throughput": figures.throughput(runs, names),
        "Samples": overview.samples_table(runs, names),
        "Repeat": overview.repeat_commands(runs, names),
    }
    return [
        element("section", element("h2", heading), _explained(heading), content)
        for heading, content in contents.items()
        if content is not None
    ]


def _explained(heading: str) -> Markup | None:
    return element("p", _WORDS[heading]) if heading in _WORDS else None


_WORDS = {
    "Loss and accuracy": "Training values are means over the epoch, validation follows it.",
    "Classes": "Of the latest evaluation. In a matrix the diagonal is right; a mistake is the darker the more frequent.",
    "Ranks": "Each image is counted once. The bars are expected to differ by chance.",
    "Throughput": "Training images over all processes per second of wall time, without validation.",
    "Samples": "Every sample was used once in each epoch. Runs with the same digest used the same samples in the same "
    "steps.",
    "Repeat": "The configuration of a run has all of its settings. The command needs the run's folder.",
}
