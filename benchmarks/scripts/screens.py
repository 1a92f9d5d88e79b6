"""Take README's pictures of TensorBoard and of a test's screen from a run: `screens.py RUNS PRINTED`.

TensorBoard's run was, with the defaults before d0eb74b, `fit --config configs/quickstart.yaml --data.dataset=cifar10
--data.num_train=10000 --trainer.max_epochs=8 --trainer.strategy=ddp --trainer.devices=2 --run_dir=RUNS/first`,
interrupted in its last epoch; the test's screen is of a run of `--model.arch=tiny --model.stem=strided
--data.num_train=20000 --data.val_size=2000`, then `test RUNS/first --trainer.strategy=ddp --trainer.devices=2 >
PRINTED`.
"""

import argparse
import asyncio
import base64
import html
import json
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
from PIL import Image

OUTPUT = Path(__file__).parents[2] / "docs" / "screens"
PORT = 6123
TAGS = "train%2Floss_step%7Cval%2Facc%24%7Cval%2Fconfusion%7Cval%2Fwrong"
TENSORBOARD = f"http://localhost:{PORT}/?darkMode=false&smoothing=0&tagFilter={TAGS}#timeseries"
SETTINGS = {"timeSeriesSettingsPaneOpened": False, "stepSelectorEnabled": False, "linkedTimeEnabled": False}
SETTINGS |= {"sideBarWidthInPercent": 21, "ignoreOutliers": False}
TERMINAL = "<body style='background:#1e1e1e;color:#e6e6e6;margin:18px'><pre style='font:20px/1.25 DejaVu Sans Mono'>{}"


async def picture(browser: str, url: str, name: str, *, size: tuple[int, int], settings: str = "{}") -> None:
    """What a browser of this size shows, at twice its resolution. TensorBoard reads `settings` of its storage."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        flags += ["--remote-debugging-port=9333", f"--user-data-dir={folder}", "about:blank"]
        with subprocess.Popen([browser, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
            await asyncio.sleep(5)  # until it answers
            async with aiohttp.ClientSession() as session:
                pages = await (await session.get("http://127.0.0.1:9333/json")).json()
                address = next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as tab:
                    await _sized_as(tab, size)
                    await _told(tab, "Page.navigate", url=url)
                    await asyncio.sleep(5)
                    stored = f"localStorage.setItem('_tb_global_settings', '{settings}')"
                    await _told(tab, "Runtime.evaluate", expression=stored)
                    await _told(tab, "Page.reload")
                    await asyncio.sleep(20)  # until all curves are drawn
                    shot = await _told(tab, "Page.captureScreenshot", format="png")
            process.terminate()
    with Image.open(BytesIO(base64.b64decode(shot["data"]))) as screen:
        smaller = screen.convert("RGB").resize((size[0] * 3 // 2, size[1] * 3 // 2))
        smaller.quantize(256).save(OUTPUT / f"{name}.png", optimize=True)


async def _told(tab: aiohttp.ClientWebSocketResponse, method: str, **params: Any) -> Any:
    """What the browser answers to a command of its debugging protocol."""
    await tab.send_json({"id": 1, "method": method, "params": params})
    while "id" not in (answer := await tab.receive_json()):
        pass
    return answer["result"]


async def _sized_as(tab: aiohttp.ClientWebSocketResponse, size: tuple[int, int]) -> None:
    shape = {"width": size[0], "height": size[1], "deviceScaleFactor": 2, "mobile": False}
    await _told(tab, "Emulation.setDeviceMetricsOverride", **shape)


def main(runs: Path, printed: Path, browser: str) -> None:
    """Write both pictures."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", runs, "--host", "localhost", "--port", str(PORT)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as server:
        time.sleep(20)  # until it has read the run
        asyncio.run(picture(browser, TENSORBOARD, "tensorboard", size=(980, 838), settings=json.dumps(SETTINGS)))
        server.terminate()
    lines = printed.read_text(encoding="utf-8").splitlines()
    start, end = (next(i for i, line in enumerate(lines) if mark in line) for mark in ("Accuracy per rank", "└"))
    with tempfile.NamedTemporaryFile("w", suffix=".html", encoding="utf-8") as page:
        page.write("<meta charset=utf-8>" + TERMINAL.format(html.escape("\n".join(lines[start : end + 1]))))
        page.flush()
        asyncio.run(picture(browser, f"file://{page.name}", "per_rank", size=(920, 245)))


def parser() -> argparse.ArgumentParser:
    """The script's arguments."""
    parser = argparse.ArgumentParser(description="Take README's pictures of screens from a run.")
    parser.add_argument("runs", type=Path, help="folder of the run `first`, for TensorBoard")
    parser.add_argument("printed", type=Path, help="file with what `test` printed")
    parser.add_argument("--browser", default="chromium", help="a Chromium or Chrome")
    return parser


if __name__ == "__main__":
    main(**vars(parser().parse_args()))
