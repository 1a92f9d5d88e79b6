"""Executes the notebooks as they are, with small sizes in place of those in the cell tagged "parameters"."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"

SYNTHETIC = 'DATA = ["--data.dataset=synthetic"]\n'

SMALL = {
    "dp_versus_ddp.ipynb": SYNTHETIC
    + "BATCH, STEPS, FAULTY_STEPS, LEARNING_RATES, TOO_LARGE = 32, 3, 30, (0.1,), (100.0,)\n",
    # Two schedules of four, and a small network.
    "model_parallel.ipynb": SYNTHETIC
    + 'SCHEDULES = ("1F1B", "ZBVZeroBubble")\nARCH, BATCH, MICROBATCHES, STEPS = "tiny", 16, 4, 4\n',
    # Four runs instead of six, a tenth of the images; the statements about counts stay exact.
    "per_rank_accuracy.ipynb": SYNTHETIC
    + "PROCESS_COUNTS = (1, 2)\nPADDED_PROCESSES = 2\nNUM_TEST = 1001\n"
    + 'FIT = ["--trainer.max_epochs=6", "--data.num_train=3000", "--data.val_size=500"]\n',
}

CHECKS = {
    "dp_versus_ddp.ipynb": """
for one, other in same:
    assert trained.loc[one, other] < 1e-9
    assert running.loc[one, other] < 1e-9
assert trained.loc["dp", "ddp"] > 1e-4
assert means["kept"] == means["replica 0"] == 1.5
import math
assert all(map(math.isfinite, arrived["0.1"]))
assert diverges(lost["0.1"]) and diverges(arrived["100"]) and not diverges(arrived["0.1"])
""",
    "model_parallel.ipynb": """
assert table["formula"].tolist() == [1 / 2, 1 / 5, 1 / 5, 0]
assert (table["formula"] - table["recorded order, equal stages"]).abs().max() < 1e-9
assert table.loc["naive (mp)", "measured"] > 0.5 - 1e-9, "one process works for both devices"
first = with_microbatches.iloc[0]
assert first.max() - first.min() < 1e-5
assert (activations > 0).all()
import json
trace = json.loads((runs["1F1B (pp)"] / "timeline.json").read_text())
assert {event["pid"] for event in trace["traceEvents"]} == {0, 1}
""",
    "per_rank_accuracy.ipynb": """
assert comparison["processes"].tolist() == [1, 2]
assert comparison["total"].tolist() == [1001, 1001]
assert comparison["correct"].nunique() == 1
assert 200 < comparison["correct"][0] < 1001, "the network should have learned something, but not everything"
assert (comparison["test/acc x total"].round() == comparison["correct"]).all()
assert evaluations[2]["total"].tolist() == [501, 500, 1001]
assert padded["total"].tolist() == [501, 501, 1002]
assert 0 <= padded["correct"].iloc[-1] - exact["correct"].iloc[-1] <= 1
assert 0.05 < missing < 0.5
assert flagged < 0.02
assert found[-1] > found[0]
""",
}


def test_every_notebook_has_sizes_and_checks() -> None:
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == set(SMALL) == set(CHECKS)


@pytest.mark.parametrize("name", sorted(SMALL))
def test_a_committed_notebook_shows_its_output_and_no_path_of_a_machine(name: str) -> None:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    text = (NOTEBOOKS / name).read_text(encoding="utf-8")
    code = [cell for cell in notebook.cells if cell["cell_type"] == "code"]
    executed = [cell["execution_count"] for cell in code]
    outputs = [output for cell in code for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error" or output.get("name") == "stderr"]
    assert [output for output in outputs if "image/png" in output.get("data", {})]
    assert executed == list(range(1, len(executed) + 1)), "run it from top to bottom in a fresh kernel, then save it"
    assert not [piece for piece in ("/tmp", "/home/", "/root/", "/Users/", "site-packages") if piece in text]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # run folders and torch's caches go where pytest cleans up
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell["metadata"].get("tags", [])]
    parameters["source"] += "\n" + SMALL[name]
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=280, startup_timeout=120, kernel_name="python3", resources=resources).execute()
