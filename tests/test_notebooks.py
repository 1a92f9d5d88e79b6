"""Executes the notebooks as they are, with small sizes in place of those of the cell "parameters"; and their runs."""

import ast
import json
import os
import re
import sys
from importlib import import_module
from pathlib import Path

import nbformat
import pytest
from documents import ROOT, SCRIPTS
from nbclient import NotebookClient

from analysis import notebook as runs

NOTEBOOKS = ROOT / "notebooks"

SYNTHETIC = 'DATA = ["--data.dataset=synthetic"]\n'

SMALL = {
    "dp_versus_ddp.ipynb": SYNTHETIC + "BATCH, STEPS = 16, 2\n",
    "fault_tolerance.ipynb": (
        'DATASET = "synthetic"\n'
        'SIZES["small"] = {"arch": "tiny", "stem": "imagenet", "num_train": 1270, "batch": 32, "save_every": 7}\n'
    ),
    # Two schedules of three, and a small network.
    "model_parallel.ipynb": SYNTHETIC + 'SCHEDULES = ("1F1B", "Interleaved1F1B")\nARCH, BATCH, STEPS = "tiny", 16, 3\n',
    # Four runs instead of six, a tenth of the images; the statements about counts stay exact.
    "per_rank_accuracy.ipynb": SYNTHETIC
    + "PROCESS_COUNTS = (1, 2)\nPADDED_PROCESSES = 2\nNUM_TEST = 1001\n"
    + 'FIT = ["--trainer.max_epochs=6", "--data.num_train=3000", "--data.val_size=500"]\n',
    "same_bits.ipynb": SYNTHETIC
    + 'ARCH, DEVICES, OTHER_MODES = "tiny", (1, 2), ()\n'
    + "BATCH, STEPS, EPOCHS = 16, 4, 2\n",
    "scaling.ipynb": SYNTHETIC
    + 'MODES, ONLY_MEMORY, ROUNDS, SEEDS, RULES = ("ddp",), (), 1, (0,), ("linear",)\n'
    + 'NETWORK, BATCH, STEPS = ["--model.arch=tiny", "--model.stem=imagenet"], 16, 8\n'
    + "NUM_TRAIN, NUM_VAL, EPOCHS, TARGET = 640, 200, 1, 0.1\n",
    "shuffling.ipynb": 'SIZE = "tiny"\nDATA = ["--data.dataset=synthetic"]\n'
    f"RECORD = {str(ROOT / 'benchmarks' / 'shuffling' / '2026-11-23' / 'shuffling.json')!r}\n",
}

CHECKS = {
    "dp_versus_ddp.ipynb": """
assert largest_difference(dp, single) < 1e-12 > largest_difference(rank0["plain"], single)
assert (forgotten.loc["train_ddp"] < 1e-12).all()
assert all(map(torch.isfinite, map(torch.tensor, arrived["0.1"])))
""",
    "fault_tolerance.ipynb": """
assert "lit_cifar: rank 1 " in killed.output and "SIGKILL" in killed.output
assert difference == 0 and not any(problems.values())
assert accounts["lit_cifar"].tolist()[:3] == [120, 120, 0.0]
assert accounts["loop"].tolist()[:2] == [120, 160]
assert accounts.loc["largest difference of weights", "loop"] > 1e-3
assert 0 <= mine["steps_repeated"] <= 14, "two saves, if the last one was not yet whole"
assert min(mine["killed_after_step"], theirs["killed_after_step"]) >= KILL_AT == 96
assert 40 <= theirs["resumed_from_step"] < 80, "as seen from outside; the log has counted them"
assert same_before
assert uses_per_epoch(log).tolist()[:2] == [1270, 2540]
assert uses_per_epoch(undisturbed_log).tolist() == [1270] * 3
""",
    "model_parallel.ipynb": """
assert table["formula"].tolist() == [1 / 2, 1 / 5, 1 / 9]
assert table.loc["naive (mp)", "measured"] > 0.5 - 1e-9, "one process works for both devices"
assert waiting(measured(1)) > 0.5 - 1e-9
assert len(losses) == STEPS
assert (table["keeps for backward (MiB)"] > 0).all()
""",
    "per_rank_accuracy.ipynb": """
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
    "same_bits.ipynb": """
assert same_digests and same_metrics
assert (digests["off", "1 device"] != digests["off", "2 devices"]).all()
assert distances["on: 2 devices and 1"].tolist() == [0, 0]
assert (distances["off: 2 devices and 1"] > 1e-4).all(), "BatchNorm sees other parts"
assert rounding.iloc[0] < 1e-4 and 0 < rounding.iloc[2] < another.iloc[2] / 2, growth.to_string()
""",
    "scaling.ipynb": """
assert speed[["mode", "devices"]].values.tolist() == [["single", 1], ["threads", 2], ["ddp", 2]]
assert memory.loc[("ddp", 2), "all processes"] == 2 * one
assert [curves[way, 0]["step"].tolist() for way in WAYS] == [[9, 19], [9, 19], [4, 9]]
from analysis.run_frames import read_metrics
assert read_metrics(RUNS / "grown, linear 0")["lr-SGD"].iloc[-1] == 2 * RATE
""",
    "shuffling.ipynb": """
assert that_moved(torch_with) == that_moved_in_ours(ours_with) == 8
assert that_moved(torch_without) == that_moved_in_ours(ours_without) == 0
assert len(ours) == ours["loss"].nunique() == 4, "both kinds train, and otherwise"
assert abs(article.difference - 2.06) < 1e-9
assert len(record) == 2 * 3 * seeds == 2 * 3 * pairs.num_runs[0]
named = [f"{number:.2f}" for number in (pairs.difference, pairs.low, pairs.high)]
assert named == ["1.97", "1.66", "2.27"], "the conclusion names them"
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
    assert f"<!--n:minutes-{name.removesuffix('.ipynb')}-->" in notebook.cells[0].source
    assert not [piece for piece in ("/tmp", "/home/", "/root/", "/Users/", "site-packages") if piece in text]


@pytest.mark.parametrize("name", sorted(SMALL))
def test_the_outputs_of_a_notebook_took_at_most_three_minutes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(SCRIPTS)
    assert import_module("pages").clock_s(json.loads((NOTEBOOKS / name).read_text(encoding="utf-8"))) <= 180


@pytest.mark.parametrize("name", sorted(SMALL))
def test_what_a_notebook_imports_is_there(name: str) -> None:
    cells = nbformat.read(NOTEBOOKS / name, as_version=4).cells
    source = "\n".join(re.sub(r"(?m)^ *[%!].*", "", cell.source) for cell in cells if cell.cell_type == "code")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [each.name for each in node.names]
            module = __import__(node.module, fromlist=names)  # with its submodules of these names
            assert not [name for name in names if not hasattr(module, name)]


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SMALL))
def test_notebook_runs_from_top_to_bottom(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(NOTEBOOKS))  # Jupyter's folder, from which notebooks import
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # run folders and torch's caches go where pytest cleans up
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    (parameters,) = [cell for cell in notebook.cells if "parameters" in cell["metadata"].get("tags", [])]
    parameters["source"] += "\n" + SMALL[name]
    notebook.cells.append(nbformat.v4.new_code_cell(CHECKS[name]))
    resources = {"metadata": {"path": tmp_path}}
    NotebookClient(notebook, timeout=280, startup_timeout=120, kernel_name="python3", resources=resources).execute()


def test_a_run_that_failed_raises_its_last_lines(capfd: pytest.CaptureFixture[str]) -> None:
    import_module("ipykernel")  # as another test may have done: that makes no notebook
    command = [sys.executable, "-c", "print('ddp_spawn', flush=True); raise SystemExit('none')"]
    with pytest.raises(RuntimeError, match="torchrun: exit status 1\nddp_spawn\nnone"):
        runs.Run(command, title="torchrun", environment=os.environ).wait()
    assert capfd.readouterr().out.startswith("torchrun: exit status 1 after ")


def test_runs_print_and_fail_as_on_the_command_line(capfd: pytest.CaptureFixture[str]) -> None:
    assert "ddp_spawn" in runs.run("doctor")
    assert capfd.readouterr().out.startswith("lit_cifar doctor: 1 run done after ")
    with pytest.raises(RuntimeError, match=r"(?s)lit_cifar fit: exit status 2\n.*--model.arch"):
        runs.run_all([["doctor"], ["fit", "--model.arch=none"]], at_once=2)


@pytest.mark.parametrize(
    ("flags", "number"),
    [
        (["--trainer.strategy=ddp", "--trainer.devices=3"], 3),
        (["--trainer.strategy=PipelineStrategy", "--trainer.devices=2"], 2),
        (["--trainer.devices=2"], 1),
        (["--trainer.strategy=dp", "--trainer.devices=2"], 1),
        (["--trainer.strategy=ddp_spawn", "--trainer.devices=2"], 1),
        (["--trainer.strategy=ddp", "--trainer.devices=auto"], 1),
    ],
)
def test_processes_are_forked_for_modes_that_start_none_by_themselves(flags: list[str], number: int) -> None:
    assert runs.num_processes(["fit", *flags]) == number
