"""The pages of the site: those of the repository, at their own paths, so that the same links hold in both.

MkDocs takes its pages from one folder, which may not be the one that holds mkdocs.yml: README.md would be left out.
"""

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/*.css",
    "docs/*.png",
    "docs/figures/*.png",
    "benchmarks/**/README.md",
    "notebooks/*.ipynb",
)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Put the repository's pages in the place of those that MkDocs has found in `docs_dir`."""
    for file in list(files):
        if Path(config.docs_dir) in Path(file.abs_src_path or "").parents:
            files.remove(file)
    for path in sorted(path for pattern in PAGES for path in ROOT.glob(pattern)):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files
