"""Take README's pictures of TensorBoard and of a test's screen from a run: `screens.py RUNS PRINTED`.

The run was `fit --model.arch=tiny --model.stem=strided --data.num_train=20000 --data.val_size=2000
--trainer.max_epochs=5 --trainer.log_every_n_steps=10 --trainer.strategy=ddp --trainer.devices=2 --run_dir=RUNS/first`
on the real CIFAR-10, then `test RUNS/first --trainer.strategy=ddp --trainer.devices=2 > PRINTED`.
"""

import argparse
import html
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

OUTPUT = Path(__file__).parents[2] / "docs" / "screens"
PORT = 6123
TAGS = "train%2Floss_step%7Cval%2Facc%24%7Cval%2Fconfusion%7Cval%2Fwrong"
TENSORBOARD = f"http://localhost:{PORT}/?darkMode=false&runFilter=first&smoothing=0.3&tagFilter={TAGS}#timeseries"
TERMINAL = "<body style='background:#1e1e1e;color:#e6e6e6;margin:18px'><pre style='font:20px/1.25 DejaVu Sans Mono'>{}"


def picture(browser: str, url: str, name: str, *, window: tuple[int, int], crop: tuple[int, int]) -> None:
    """What a browser without a screen shows, from the upper left corner on."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "screen.png"
        # Without 3D, TensorBoard draws its curves as SVG, which a screenshot has.
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-3d-apis", "--hide-scrollbars"]
        flags += [f"--window-size={window[0]},{window[1]}", "--virtual-time-budget=60000", f"--screenshot={file}"]
        subprocess.run([browser, *flags, url], check=True, capture_output=True)
        with Image.open(file) as screen:
            screen.convert("RGB").crop((0, 0, *crop)).quantize(256).save(OUTPUT / f"{name}.png", optimize=True)


def main(runs: Path, printed: Path, browser: str) -> None:
    """Write both pictures."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--host", "localhost", "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        time.sleep(20)  # until it has read the run
        picture(browser, TENSORBOARD, "tensorboard", window=(1460, 960), crop=(1205, 930))
        server.terminate()
    lines = printed.read_text(encoding="utf-8").splitlines()
    start, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in ("Accuracy per rank", "└"))
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as page:
        page.write("<meta charset=utf-8>" + TERMINAL.format(html.escape("\n".join(lines[start : end + 1]))))
        page.flush()
        picture(browser, f"file://{page.name}", "per_rank", window=(930, 400), crop=(920, 245))


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description="Take README's pictures of screens from a run.")
    parser.add_argument("runs", type=Path, help="folder of the run `first`, for TensorBoard")
    parser.add_argument("printed", type=Path, help="file with what `test` printed")
    parser.add_argument("--browser", default="chromium", help="a Chromium or Chrome")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
