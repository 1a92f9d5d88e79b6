"""What the documents print can be typed: the program of today takes every command, and every link leads somewhere.

A block that begins with `git checkout COMMIT` is for the program as it was at that commit, as the settings of old
records need it.
"""

import os
import re
import tomllib
from argparse import ArgumentParser
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from documents import PAGES, ROOT, SCRIPTS, blocks, commit_of, inline_commands, parser_of
from torch.distributed.run import get_args_parser

from lit_cifar.tools.doctor import doctor_parser
from lit_cifar.tools.ray import ray_parser
from lit_cifar.tools.relations import relations_parser
from lit_cifar.tools.verify.command import verify_parser
from tests.mutations.__main__ import parser as mutations_parser

RUN = ROOT / "docs" / "tutorial.md"  # `test_tutorial` runs its commands
OF_TODAY = sorted(
    {tuple(c) for page in PAGES if page != RUN for block in blocks(page) if not commit_of(block) for c in block}
    | {tuple(c) for page in PAGES for c in inline_commands(page)}
)
SETTING = re.compile(r"[A-Z_]+=")


def check_command(words: Sequence[str]) -> None:
    """Fails where a command names a program, file or option that does not exist."""
    while SETTING.match(words[0]):
        words = words[1:]
    match words:
        case ["python", "-m", "lit_cifar", *args]:
            check_program(args)
        case ["srun", *options]:
            program = next(place for place, word in enumerate(options) if word in ("python", "torchrun"))
            assert all(option.startswith("--") for option in options[:program])
            check_command(options[program:])
        case ["python", "-m", "tests.mutations", *args]:
            mutations_parser().parse_args([arg for arg in args if arg != "no-warmup"])  # which CONTRIBUTING.md adds
        case ["torchrun", *args]:
            options = get_args_parser().parse_args(args)
            if options.module:
                assert options.training_script == "lit_cifar"
                check_program(options.training_script_args)
            else:
                check_command(["python", options.training_script])
        case ["python", script, *args] if Path(script).parent == Path("benchmarks/scripts"):
            check_benchmark(Path(script).stem, args)
        case ["sbatch", script, *args] | [script, *args] if script.startswith("configs/cluster/"):
            assert os.access(script, os.X_OK)
            check_program(["fit", *args])
        case ["python", script, *args] if script.startswith(("benchmarks/silent_bugs/", "benchmarks/relations/")) or (
            Path(script).parent == Path("examples") and not args
        ):
            assert Path(script).exists()
        case ["python", "examples/sweep_optuna.py" as script, *args]:
            own = re.findall(r'"(--\w+)"', Path(script).read_text())
            parser_of("fit").parse_args(["fit", *(arg for arg in args if arg.split("=")[0] not in own)])
        case ["pip", "install", "-e", checkout] | ["pip", "install", "-e", checkout, "jupyterlab"]:
            known = tomllib.loads(Path("pyproject.toml").read_text())["project"]["optional-dependencies"]
            assert set(checkout.removeprefix(".").strip("[]").split(",")) <= {*known, ""}
        case ["pytest", *args]:
            check_pytest(args)
        case ["git", "clone", "URL_OF_THIS_PAGE", _] | ["cd", _] | ["mkdocs", "serve"] | ["mkdocs", "build", _]:
            pass
        case ["bash", "benchmarks/gpu_visit.sh", *args]:
            import_module("gpu_visit.__main__").parser().parse_args(args)
        case ["bash", path] | ["bash", "benchmarks/gpu_wheels.sh" as path, _] | ["jupyter", "lab", path]:
            assert Path(path).exists()
        case [script]:
            assert os.access(script, os.X_OK)
        case _:
            pytest.fail(f"{words[0]}: which options does this program take?")


def check_program(args: list[str]) -> None:
    match args[0]:
        case "doctor":
            doctor_parser().parse_args(args[1:])
        case "ray":
            options = ray_parser().parse_args(args[1:])
            parser_of("fit").parse_args([options.command, *options.flags])
        case "relations":
            relations_parser().parse_args(args[1 : args.index("--") if "--" in args else None])
        case "verify":
            _, rest = verify_parser().parse_known_args(args[1:])
            parser_of("fit").parse_args(["fit", *rest])
        case "validate" | "test" | "predict" if args[1:2] == ["RUN"]:  # see `spelled_out`
            parser_of(args[0]).parse_args([args[0], *args[2:]])
        case _:
            parser_of(args[0]).parse_args([arg.replace("RUN/config.yaml", "configs/quickstart.yaml") for arg in args])


_TRAIN = {"articles", "overhead", "recipes", "trials"}


def check_benchmark(script: str, args: list[str]) -> None:
    parser: ArgumentParser = import_module(script).parser()
    _, rest = parser.parse_known_args(args)
    if script in _TRAIN:
        parser_of("fit").parse_args(["fit", *rest])
    else:
        assert rest == []


def check_pytest(args: list[str]) -> None:
    options = tomllib.loads(Path("pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    match args:
        case []:
            pass
        case ["-m", marker, *part]:
            assert marker in {line.split(":")[0] for line in options["markers"]}
            assert [re.fullmatch(r"--(splits|group)=\d+", option) is not None for option in part] in ([], [True, True])
        case [path]:
            assert Path(path).exists()
        case _:
            pytest.fail(f"pytest {args}: teach this test what it means")


@pytest.fixture
def at_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPTS))


@pytest.mark.usefixtures("at_root")
@pytest.mark.parametrize("words", OF_TODAY, ids=" ".join)
def test_commands_parse(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    try:
        check_command(words)
    except SystemExit as stop:
        if stop.code:  # it is 0 after --help
            pytest.fail(capsys.readouterr().err)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere_and_files_exist_and_every_block_is_looked_at(page: Path) -> None:
    """No command is hidden where these tests do not look: in a block of another name."""
    text = page.read_text(encoding="utf-8")
    assert not re.search(r"^(<{7} |>{7} |={7}$)", text, flags=re.MULTILINE), "git has left its marks"
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    assert [target for target in targets if not (page.parent / target).exists()] == []
    named = re.findall(r"`((?:lit_cifar|configs|tests|notebooks|benchmarks|docs)/[\w./-]*)`", text)
    assert [name for name in named if not (ROOT / name).exists()] == []
    # `test_contributing` applies the diffs; Python is of programs of others.
    assert set(re.findall(r"^```(\w*)$", text, flags=re.MULTILINE)) <= {"bash", "text", "diff", "python", "yaml", ""}
    for settings in re.findall(r"^```yaml\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL):
        parser_of("fit").parse_object({"fit": yaml.safe_load(settings)} | {"subcommand": "fit"})
