"""`python -m lit_cifar relations`: runs anyone's training in pairs that must train the same model."""

import argparse
import os
import shutil
import sys
import textwrap
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lit_cifar import internals
from lit_cifar.checks.relations.judging import RELATIONS, Relation, judged
from lit_cifar.checks.relations.notebooks import SUFFIX, cells_of
from lit_cifar.checks.relations.options import with_further_arguments
from lit_cifar.checks.relations.own_files import has_landlock
from lit_cifar.checks.relations.own_resume import resumed
from lit_cifar.checks.relations.plan import LIMIT_S, Limits, Target
from lit_cifar.checks.verdict import NO_VERDICT, Verdict, exit_status, summary
from lit_cifar.errors import ConfigError, bounded, nearest
from lit_cifar.reporting.environment import about
from lit_cifar.tools.terminal import CommandParser, exit_orderly_when_terminated, positive, say, writable, write_json

_DESCRIPTION = """\
Run your own training script in pairs that must train the same model: resumed or not, on one process or two, with one
batch or two microbatches, evaluated in other batches. Say what differs. A script is taken as it is; what could not be
judged is said, with the flag or the call of lit_cifar.relations that would let it. Runs are short, on the CPU, in
float64, each in a folder that mirrors this one; your files stay as they are."""
_CLASSES = "lit_cifar.checks.relations.classes"  # the script that fits --module
_RANKS = 6  # so many batches can be divided among 1, 2 and 3 ranks
_MAIN = ("resume", "evaluation", "ranks")  # what is named, if it is not judged
_BY_FLAG = ("accumulate", "batch_size", "evaluation_batch")  # knobs whose flag the reader may name
_ON_CPU = "GPUs and mixed precision (runs are on the CPU, in one precision)"
_ON_OWN_DEVICES = "what is smaller than rounding there"
_UNGUARDED = ", files written by C code or other programs (this Linux has no Landlock that keeps them from yours)"
_EPILOG = """\
exit status: 0 all that was judged is equal, 1 a relation fails, 2 a mistake in the command, 3 nothing could be judged,
  or not all of --only, or a relation ended by an error of its own

  python -m lit_cifar relations train.py
  python -m lit_cifar relations train.py --only=resume,ranks -- --lr=0.1
  python -m lit_cifar relations --module=my_package.MyModule --data=my_package.MyData -- --trainer.max_epochs=2"""


def main(args: list[str]) -> int:
    exit_orderly_when_terminated()
    internals.require(internals.RELATIONS)
    words, arguments = (args[: args.index("--")], args[args.index("--") + 1 :]) if "--" in args else (args, [])
    options = relations_parser().parse_args(words)
    file = writable(options.json)
    target = _target(options, arguments)
    evaluated = dict.fromkeys(("evaluated", "undivided"), -(-options.batches // _RANKS) * _RANKS)
    limits = Limits(batches=options.batches, epochs=options.epochs, steps=options.steps, **evaluated)
    limit_s = bounded("--limit", options.limit, 1, 10**6)
    how = {"limit_s": limit_s, "made_data": options.fake_data, "on_own_devices": options.gpu}
    chosen, verdicts = _chosen(options), []
    for verdict in judged(target, chosen, limits=limits, **how):
        verdicts.append(verdict)
        if verdict.outcome != "abstain":
            say(str(verdict))
    _say_what_is_open([verdict for verdict in verdicts if verdict.outcome == "abstain"])
    unguarded = "" if has_landlock() else _UNGUARDED
    say(f"not looked at: {_ON_OWN_DEVICES if options.gpu else _ON_CPU}, later steps{unguarded}")
    found = verdicts[1:] or [verdict for verdict in verdicts if verdict.outcome == "fail"]
    must = {name for name in chosen if options.only is not None or name not in RELATIONS}  # asked for by name
    unjudged = [name for name in chosen if (name in must or name in _MAIN) and not _is_judged(name, found)]
    is_open = bool(unjudged) and (options.strict or not must.isdisjoint(unjudged))
    if unjudged and verdicts[1:]:
        strict = "" if is_open else f"; --strict makes it exit status {NO_VERDICT}"
        say(f"NOT JUDGED: {', '.join(unjudged).upper()}. What would judge it stands above{strict}")
    say(summary(found))
    write_json(file, about() | {"target": asdict(target), "verdicts": [asdict(verdict) for verdict in verdicts]})
    return exit_status(verdict.outcome for verdict in found) or (NO_VERDICT if is_open else 0)


def _say_what_is_open(verdicts: list[Verdict]) -> None:
    """What was not judged: in one block all that some lines in the script would change, then the others."""
    if lines := [verdict for verdict in verdicts if verdict.paste]:
        say("NOT JUDGED, until the script has these lines (outside of the checker they give its own values):")
        say("    from lit_cifar import relations")
    for verdict in lines:
        say(f"    # {verdict.relation}: {verdict.text}")
        say(textwrap.indent(verdict.paste, "    "))
    if others := [verdict for verdict in verdicts if not verdict.paste]:
        say("NOT JUDGED, because:")
    for verdict in others:
        say(f"        {verdict.relation:26} {verdict.text}")


def _is_judged(name: str, verdicts: list[Verdict]) -> bool:
    """Whether a relation has said something, and not given up."""
    own = [verdict for verdict in verdicts if name in verdict.asked]
    gave_up = any(verdict.relation == name and verdict.outcome in ("abstain", "crash") for verdict in own)
    return not gave_up and any(verdict.outcome in ("pass", "fail", "note") for verdict in own)


def relations_parser() -> argparse.ArgumentParser:
    parser = CommandParser("relations", description=_DESCRIPTION, epilog=_EPILOG)
    add = parser.add_argument
    add("program", nargs="?", metavar="SCRIPT", help="A script, notebook or command; its arguments follow a --.")
    add("--module", metavar="CLASS", help="In place of a script, a LightningModule; its flags follow a --.")
    add("--data", metavar="CLASS", help="A LightningDataModule for --module.")
    add("-m", dest="is_module", action="store_true", help="SCRIPT is a module, as for `python -m`.")
    add("--only", metavar="A,B", help=f"Of {', '.join(RELATIONS)}.")
    add("--same", action="append", default=[], metavar="ARGUMENTS", help="Of the script, that should change nothing.")
    add("--fake-data", action="store_true", help="Few made samples in place of known data sets; no download.")
    add("--gpu", action="store_true", help="On its own devices, in its precision, against the spread of equal runs.")
    add("--resume-by", metavar="ARGUMENTS", help="Of the script, that resume it: '--resume {checkpoint}'.")
    for name, of in {"batches": "an epoch", "epochs": "a Trainer", "steps": "a script"}.items():
        usual = vars(Limits())[name]
        add(f"--{name}", type=positive, default=usual, metavar="N", help=f"At most, of {of} (default: {usual}).")
    for knob in _BY_FLAG:
        add(f"--{knob.replace('_', '-')}-by", metavar="FLAG", help="The script's flag for it, if no name says so.")
    add("--limit", type=float, default=LIMIT_S, metavar="S", help=f"Seconds of a run (default: {LIMIT_S:g}).")
    add("--strict", action="store_true", help=f"Exit status {NO_VERDICT} unless {', '.join(_MAIN)} are judged.")
    add("--json", metavar="FILE", help="Write all differences there.")
    return parser


def _target(options: argparse.Namespace, arguments: list[str]) -> Target:
    program, folder = options.program, Path.cwd()
    if (program is None) == (options.module is None):
        raise ConfigError("what to train is not said once", remedy="pass a script, -m and a module, or --module=CLASS")
    if options.module is None and options.data is not None:
        raise ConfigError(f"--data={options.data} has no effect without --module", remedy="add --module=CLASS")
    if options.module is not None:
        program = _CLASSES
        arguments = [options.module, options.data or "", *arguments]
    elif not options.is_module:
        path = Path(os.path.normpath(Path(program).absolute()))
        path = path if path.is_file() else _command(program)
        if path.suffix == SUFFIX:
            cells_of(path)
        elif path.suffix and not path.suffix.startswith(".py"):
            with path.open("rb") as file:
                _check_python(path, file.readline(256))
        program = str(path.relative_to(folder)) if path.is_relative_to(folder) else str(path)
    return Target(
        program=program,
        arguments=tuple(arguments),
        is_module=options.is_module or options.module is not None,
        folder=str(folder),
        flags=tuple((knob, word) for knob in _BY_FLAG if (word := vars(options)[f"{knob}_by"])),
    )


def _command(name: str) -> Path:
    """The file of a command that a package has installed, which is a Python script."""
    found = None if os.sep in name else shutil.which(name, path=Path(sys.executable).parent) or shutil.which(name)
    if found is None:
        raise ConfigError(f"{name} is no file", remedy="pass a script, a command, or -m and the name of a module")
    with Path(found).open("rb") as file:
        _check_python(Path(found), file.readline() + file.readline())
    return Path(found)


def _check_python(file: Path, first_lines: bytes) -> None:
    if b"python" not in first_lines:
        raise ConfigError(f"{file} is no Python script", remedy="pass the script that it starts")


def _chosen(options: argparse.Namespace) -> dict[str, Relation]:
    chosen: dict[str, Relation] = {}
    for name in RELATIONS if options.only is None else filter(None, options.only.split(",")):
        if name not in RELATIONS:
            near = nearest(name, RELATIONS)
            remedy = f"did you mean {near}?" if near else f"choose of {', '.join(RELATIONS)}"
            raise ConfigError(f"--only={name} is no relation", remedy=remedy)
        chosen[name] = RELATIONS[name]
    if options.resume_by is not None:
        if "resume" not in chosen:
            raise ConfigError(f"--resume-by has no effect with --only={options.only}", remedy="add resume to --only")
        chosen["resume"] = partial(resumed, by=options.resume_by)
    return chosen | {f"--same={words}": partial(with_further_arguments, words=words) for words in options.same}
