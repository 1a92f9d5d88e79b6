"""What has gone: a command, a flag or a key of a file is refused in one line that says what serves instead."""

from pathlib import Path

import pytest
from commands import refused

from lit_cifar.cli import gone


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of each kind, whatever the release has."""
    rows = {"dance": "walk", "--model.wings": "legs"}
    rows |= {"verify --song": "silence", "verify --modes=fly": "ddp"}
    monkeypatch.setattr(gone, "INSTEAD", rows)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["dance", "--help"], "the command dance has gone\n  instead: walk"),
        (["fit", "--model.wings=2"], "--model.wings has gone\n  instead: legs"),
        (["fit", "--model.wings.left", "2"], "--model.wings has gone\n  instead: legs"),
        (["verify", "--song=1"], "verify --song has gone\n  instead: silence"),
        (["verify", "--modes=pp,fly"], "verify --modes=fly has gone\n  instead: ddp"),
    ],
)
def test_words_that_have_gone(words: list[str], said: str) -> None:
    assert said in refused(*words)


@pytest.mark.parametrize(
    "words",
    [
        ["relations", "dance.py"],
        ["relations", "train.py", "--", "--model.wings=2"],  # a flag of the user's own script
        ["fit", "--run_dir=Bird", "--data.root", "Bird"],
        ["fit", "--model.network=my.Bird", "--model.network.wings=2"],
        ["test", "Bird"],
    ],
)
def test_words_that_only_look_so_are_left_alone(words: list[str]) -> None:
    gone.refuse_words(words)


@pytest.mark.parametrize("text", ["model: {wings: 2}", "fit: {model: {wings: {left: 2}}}"])
def test_keys_of_a_file_that_have_gone(text: str, tmp_path: Path) -> None:
    (tmp_path / "old.yaml").write_text(text)
    message = refused("fit", f"--config={tmp_path / 'old.yaml'}", f"--run_dir={tmp_path / 'run'}")
    assert "--model.wings has gone" in message
    assert not (tmp_path / "run").exists()
