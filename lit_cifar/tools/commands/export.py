"""`python -m lit_cifar export`: arguments, lines and exit status."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn

from lit_cifar.errors import ConfigError
from lit_cifar.tools.commands.terminal import CommandParser, exit_orderly_when_terminated
from lit_cifar.tools.export.classifier import open_checkpoint
from lit_cifar.tools.export.files import BOUND, FORMATS, RECORD, digest, export

_DESCRIPTION = """\
Write the network of a checkpoint to files for other programs: network.pt2 (torch.export) and network.onnx. The
normalisation is part of them: they take images as bytes and return logits. Each file is run again and compared with the
checkpoint before anything is said to be exported. export.json beside them has the names of the classes, what was
compared, and a hash of each file."""


def main(args: list[str]) -> int:
    """Export; return 0, or 1 if a file computes something else than the checkpoint."""
    options, rest = export_parser().parse_known_args(args)
    formats = [*FORMATS.values()] if options.format == "both" else [FORMATS[options.format]]
    for form in formats:
        form.check()
    path = Path(options.checkpoint)
    folder = _default_folder(path) if options.output is None else Path(options.output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not an empty folder", remedy="choose another: --output FOLDER")
    exit_orderly_when_terminated()
    config = _configuration(options.config)
    root = options.root or config["data"].get("root", "data")
    network = own_network(options.own, rest, configured=config["model"].get("network"))
    module, data = open_checkpoint(path, network=network, dataset=config["data"].get("dataset"), root=root)
    record = {"checkpoint": {"file": path.name, "sha256": digest(path)}, "data": data.name}
    found = export(module, data, formats, folder=folder, record=record)
    lines = [f"{file}: logits within {gap:.0e} of the checkpoint's" for file, gap in found.items()]
    if all(gap <= BOUND for gap in found.values()):
        print(*lines, f"exported to {folder}; {RECORD} there says what goes in and out", sep="\n")
        return 0
    print(*lines, "nothing was exported: a file computes something else", sep="\n", file=sys.stderr)
    return 1


def own_network(name: str | None, arguments: list[str], *, configured: dict[str, Any] | None) -> nn.Module | None:
    """The user's own network, made as `fit` makes it, of the class `name` or that of a run's `config.yaml`; or None.

    Raises:
        ConfigError: There is no such class, or it does not take these arguments.
    """
    flags = [f"--model.network={name or json.dumps(configured)}"] if name or configured else []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model.network", type=nn.Module | None, default=None)
    try:
        network: nn.Module | None = parser.instantiate_classes(parser.parse_args([*flags, *arguments])).model.network
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(str(error), remedy="see python -m lit_cifar export --help") from error
    return network


def _configuration(file: str | None) -> dict[str, dict[str, Any]]:
    """What a run's `config.yaml` says of model and data; nothing without one."""
    if file is None:
        return {"model": {}, "data": {}}
    try:
        found = yaml.safe_load(Path(file).read_text())
        return {name: dict(found[name]) for name in ("model", "data")}
    except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(
            f"--config={file} is not a run's configuration: {type(error).__name__}: {error}",
            remedy="pass --config RUN_FOLDER/config.yaml",
        ) from error


def _default_folder(checkpoint: Path) -> Path:
    """In the checkpoint's run folder, or beside a checkpoint that is in none."""
    folder = checkpoint.parent
    return (folder.parent if folder.name == "checkpoints" else folder) / "export"


def export_parser() -> argparse.ArgumentParser:
    parser = CommandParser("export", description=_DESCRIPTION)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="A file that `fit` wrote.")
    parser.add_argument("--format", choices=[*FORMATS, "both"], default="both", help="What to write (default: both).")
    parser.add_argument("--output", metavar="FOLDER", help="A new folder (default: RUN_FOLDER/export).")
    parser.add_argument("--data.root", dest="root", metavar="FOLDER", help="Where the data set is (default: data).")
    parser.add_argument(
        "--config", metavar="FILE", help="The run's config.yaml: where its data are, and the network if it is your own."
    )
    parser.add_argument(
        "--model.network",
        dest="own",
        metavar="CLASS",
        help="Your own network, as in `fit`; its arguments as --model.network.NAME=VALUE.",
    )
    return parser
