"""`python -m lit_cifar export`: arguments, lines and exit status."""

import argparse
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from jsonargparse import ArgumentError, ArgumentParser
from torch import nn

from lit_cifar.errors import ConfigError
from lit_cifar.tools.commands.terminal import CommandParser, exit_orderly_when_terminated, say
from lit_cifar.tools.export.classifier import open_checkpoint
from lit_cifar.tools.export.folder import RECORD, check, check_free, digest, export
from lit_cifar.tools.export.formats import FORMATS

_HELP = "see python -m lit_cifar export --help"
_DESCRIPTION = """\
Write the network of a checkpoint to files for other programs: network.pt2 (torch.export) and network.onnx. The
normalisation is part of them: they take images as bytes and return logits. Each file is run again and compared with the
checkpoint on 100 test images before anything is said to be exported. export.json beside them has what was compared, the
names of the classes, and a hash of each file. `--check FOLDER` says whether these files have changed since."""


def main(args: list[str]) -> int:
    """Export, or check; return 0, or 1 if a file computes something else than the checkpoint.

    Raises:
        ConfigError: Arguments, a checkpoint, data or a folder that cannot work; files that have changed.
        SystemExit: After --help; with status 143 when terminated.
    """
    options, rest = export_parser().parse_known_args(args)
    if options.check is not None:
        _refuse_beside_check(args, options.check)
        say(f"unchanged since they were compared: {', '.join(check(Path(options.check)))}")
        return 0
    if options.checkpoint is None:
        raise ConfigError(
            "export needs a checkpoint", remedy="python -m lit_cifar export RUN_FOLDER/checkpoints/best.ckpt"
        )
    exit_orderly_when_terminated()
    return _export(options, rest)


def _refuse_beside_check(args: list[str], folder: str) -> None:
    if args not in (["--check", folder], [f"--check={folder}"]):
        raise ConfigError(
            "export --check compares files with their hashes, and takes nothing else",
            remedy=f"python -m lit_cifar export --check {shlex.quote(folder)}",
        )


def _export(options: argparse.Namespace, rest: list[str]) -> int:
    formats = [*FORMATS.values()] if options.format == "both" else [FORMATS[options.format]]
    for form in formats:
        form.check()
    path = Path(options.checkpoint)
    folder = _default_folder(path) if options.output is None else Path(options.output)
    check_free(folder)
    config = _configuration(options.config)
    root = options.root or config["data"].get("root", "data")
    network = own_network(options.own, rest, configured=config["model"].get("network"))
    trained = open_checkpoint(path, network=network, dataset=config["data"].get("dataset"), root=root)
    record = {"checkpoint": {"file": path.name, "sha256": digest(path)}, "data": trained.data.name}
    comparisons = export(trained, formats, folder=folder, record=record)
    if all(comparison.passed for comparison in comparisons):
        print(*comparisons, f"exported to {folder}; {RECORD} there says what goes in and out", sep="\n")
        return 0
    print(*comparisons, "nothing was exported: a file computes something else", sep="\n", file=sys.stderr)
    return 1


def own_network(name: str | None, arguments: list[str], *, configured: dict[str, Any] | None) -> nn.Module | None:
    """The user's own network, made as `fit` makes it; None if none is named.

    Args:
        name: Of its class, as "my_package.Net"; None for that of the configuration.
        arguments: Flags that begin with `--model.network.`.
        configured: Class and arguments in a run's `config.yaml`; None for one of this package's.

    Raises:
        ConfigError: There is no such class, or it does not take these arguments.
    """
    flags = [f"--model.network={name or json.dumps(configured)}"] if name or configured else []
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--model.network", type=nn.Module | None, default=None)
    try:
        network: nn.Module | None = parser.instantiate_classes(parser.parse_args([*flags, *arguments])).model.network
    except (ArgumentError, ImportError, TypeError, ValueError) as error:
        raise ConfigError(str(error), remedy=_HELP) from error
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
    parser.add_argument("checkpoint", nargs="?", metavar="CHECKPOINT", help="A file that `fit` wrote.")
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
    parser.add_argument("--check", metavar="FOLDER", help="Compare the files of an export with their hashes.")
    return parser
