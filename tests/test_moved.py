"""Settings that have moved: files of before are read, command lines are told the new flag."""

import os
import re
from pathlib import Path

import pytest
import yaml
from documents import ROOT, parser_of

from lit_cifar.cli.moved import in_new_places, new_flag


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("{augment: true, cutout: 8, hue: 0.1}", {"augment": {"cutout": 8, "hue": 0.1}}),
        ("{augment: true, padding: null, num_ops: null}", {"augment": True}),
        ("{augment: false, padding: null, cutout: 0, reflect: false}", {"augment": False}),
        (
            "{decode: as_needed, num_workers: 2, seed: 1}",
            {"seed": 1, "pictures": {"decode": "as_needed", "num_workers": 2}},
        ),
        ("{cutout: 8, augment: {hue: 0.1}}", {"augment": {"hue": 0.1, "cutout": 8}}),
    ],
)
def test_settings_are_found_in_their_new_places(before: str, now: dict[str, object]) -> None:
    text = in_new_places(f"model: {{arch: tiny}}\ndata: {before}")
    assert yaml.safe_load(text) == {"model": {"arch": "tiny"}, "data": now}


@pytest.mark.parametrize("text", ["data: {augment: {cutout: 8}}", "data: tiny", "[data]", "data: {", ""])
def test_other_files_are_left_as_they_are(text: str) -> None:
    assert in_new_places(text) == text


def test_the_settings_of_an_earlier_run_are_read() -> None:
    """By the parser, after whose defaults they come, and before later flags."""
    file = ROOT / "benchmarks" / "gpu" / "2026-11-26" / "default" / "config.yaml"
    assert {"padding", "cutout", "decode"} <= yaml.safe_load(file.read_text())["data"].keys()
    data = parser_of("fit").parse_args(["fit", "--config", str(file), "--data.augment.cutout=8"]).fit.data
    assert (data.augment.cutout, data.augment.padding, data.pictures.decode) == (8, 4, "once")


def test_a_file_may_be_a_pipe() -> None:
    """As in `--config=<(sed s/32/64/ run.yaml)`: it can be read once."""
    read, write = os.pipe()
    os.write(write, b"model: {arch: tiny}")
    os.close(write)
    assert parser_of("fit").parse_args(["fit", f"--config=/dev/fd/{read}"]).fit.model.arch == "tiny"
    os.close(read)


@pytest.mark.parametrize("example", [*(ROOT / "examples").glob("*.py")], ids=lambda path: path.name)
def test_no_flag_of_an_example_has_moved(example: Path) -> None:
    flags = re.findall(r"\b(?:data|model)\.[a-z_.]+", example.read_text())
    assert [flag for flag in flags if new_flag(f"--{flag}") is not None] == []


def test_flags_have_a_new_name() -> None:
    assert new_flag("--data.cutout") == "--data.augment.cutout"
    assert new_flag("decode") == "--data.pictures.decode"
    assert new_flag("dp_size") == "data_parallel_size"
    assert new_flag("--data.seed") is None
