"""`benchmarks/scripts/articles.py`: the runs of the articles are trained with each seed, and a record is continued."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from commands import TINY
from documents import SCRIPTS, parser_of


@pytest.fixture
def articles(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import articles

    return articles


def test_a_record_is_continued_with_the_runs_that_it_lacks(
    articles: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def trained(case: Any, flags: list[str], *, seed: int, at_once: int) -> dict[str, Any]:
        asked.append((case.name, seed))
        counts = {"correct": 70 + 2 * seed, "total": 100, "seconds": 1}
        return {"name": case.name, "seed": seed, "losses": [2.0, 0.5]} | counts

    monkeypatch.setattr(articles, "trained", trained)
    output = tmp_path / "record.json"
    articles.main(output, [], seeds=1)
    articles.main(output, [], seeds=2)
    assert asked == [(case.name, seed) for seed in range(2) for case in articles.CASES]
    table = articles.summary(json.loads(output.read_text())["rows"])
    assert "| dp, 2 GPUs | 74.79 | 71.00 +- 1.41 | 0.500 | 2 |" in table


def test_the_cases_are_the_configurations_of_the_articles(articles: ModuleType) -> None:
    """On one device: global batch, parts of BatchNorm, order and momentum."""
    found = {}
    for case in articles.CASES:
        config = parser_of("fit").parse_args(["fit", *case.flags]).fit
        settings = config.model.optimizer.init_args
        parts = config.model.ghost_batchnorm.num_shards if config.model.ghost_batchnorm else 1
        order = "frozen" if config.data.frozen_order else "new"
        found[case.name] = (config.data.batch_size, parts, order, settings.nesterov, settings.weight_decay)
    assert found == {
        "one device": (128, 1, "new", False, 0.0),
        "one device, Nesterov momentum, weight decay 5e-4": (128, 1, "new", True, 5e-4),
        "dp, 2 GPUs": (128, 2, "new", False, 0.0),
        "ddp, 2 GPUs": (256, 2, "new", False, 0.0),
        "ddp, 2 GPUs, without set_epoch": (256, 2, "frozen", False, 0.0),
        "ddp, 4 GPUs": (512, 4, "new", False, 0.0),
        "ddp, 4 GPUs, without set_epoch": (512, 4, "frozen", False, 0.0),
    }


@pytest.mark.slow
def test_a_case_is_trained_and_tested(articles: ModuleType) -> None:
    found = articles.trained(articles.CASES[4], [*TINY, "--trainer.max_epochs=2"], seed=1)
    assert (found["num_gpus"], found["seed"], found["total"], len(found["losses"])) == (2, 1, 100, 2)
