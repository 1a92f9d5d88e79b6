"""Mutation testing of `verify`: what is planted, what became of it, and that every mutation is caught."""

from collections.abc import Iterator
from typing import Any

import pytest

from lit_cifar.tools.modes import sized_modes
from tests.mutations import of_one_process
from tests.mutations.catalogue import BY_NAME, OF_FILES, OF_MODES, OF_PARTS, on_python_path
from tests.mutations.planting import Mutation
from tests.mutations.self_test import Finding, findings_table, self_test

SCALED = BY_NAME["scaled-loss"]


@pytest.mark.parametrize(
    ("finding", "right", "word"),
    [
        (Finding(None, "ddp", [], True), True, "passed"),
        (Finding(None, "ddp", ["off"], True), False, "FAIL"),
        (Finding(SCALED, "ddp", ["off"], True, acted=True), True, "caught"),
        (Finding(SCALED, "ddp", [], True, acted=True), False, "missed"),
        (Finding(SCALED, "ddp", ["off"], True), False, "did not act"),
        (Finding(SCALED, "ddp", ["exit status 1"], False, acted=True), False, "broke"),
        (Finding(SCALED, "ddp", ["x"], False, acted=True, guard="sample audit"), True, "caught"),
        (Finding(SCALED, "ddp", ["x"], False, guard="sample audit"), False, "did not act"),
    ],
)
def test_a_mistake_must_act_and_be_caught(finding: Finding, right: bool, word: str) -> None:
    assert finding.right == right
    assert finding.verdict == word
    assert findings_table([finding]).row_count == 1


def test_every_mode_has_mistakes_of_its_own() -> None:
    """A mode of several processes also has one that one of them makes. `ddp_flat` has `ddp`'s and `ddp_pp`'s."""
    modes = {name: mode for name, mode in sized_modes(4).items() if name != "ddp_flat"}
    planted = {(mutation.mode, mutation.devices) for mutation in OF_MODES}
    assert {mode for mode, _ in planted} == set(modes)
    assert all(mode in sized_modes(devices) for mode, devices in planted)
    of_one = {mutation.mode for mutation in of_one_process.MUTATIONS}
    assert of_one == {name for name, mode in modes.items() if mode.num_processes > 1}
    assert len(BY_NAME) == len(OF_MODES) + len(OF_PARTS) + len(OF_FILES), "each has a name of its own"


def of_each_mode(mutations: list[Mutation], with_parts: bool, which: str, mark: pytest.MarkDecorator) -> Iterator[Any]:
    for mode in dict.fromkeys(mutation.mode for mutation in mutations):
        own = [mutation for mutation in mutations if mutation.mode == mode]
        yield pytest.param(own, with_parts, marks=mark, id=f"{which}, {mode}")


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("planted", "with_parts"),
    [
        *of_each_mode(OF_MODES, False, "of modes", pytest.mark.slow),
        *of_each_mode(OF_PARTS, True, "by bits", pytest.mark.exhaustive),
        *of_each_mode(OF_FILES, False, "of files", pytest.mark.slow),
    ],
)
def test_the_whole_self_test(planted: list[Mutation], with_parts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", on_python_path())  # for the processes of a run to find `tests.mutations`
    findings = self_test(planted, with_parts=with_parts)
    assert [(f.mode, f.mutation and f.mutation.name, f.problems[:1]) for f in findings if not f.right] == []
    assert {f.mutation for f in findings} - {None} == {*planted}
