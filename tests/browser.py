"""A headless Chromium, told what to do over two pipes by its DevTools protocol, without a package for it."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_TIMEOUT_S = 60.0
# The browser reads commands from 3 and writes answers to 4.
_WITH_PIPES = "import os, sys; os.dup2({0}, 3); os.dup2({1}, 4); os.execv(sys.argv[1], sys.argv[1:])"


def chromium() -> str | None:
    """The browser that the environment variable CHROMIUM names, or one that is installed; None without any."""
    named = os.environ.get("CHROMIUM")
    return next((path for name in (named, *_NAMES) if name and (path := shutil.which(name))), None)


class Tab:
    """A page of a browser.

    Attributes:
        problems: What its console says: errors and warnings of scripts, of files that do not load, of what is blocked.
    """

    def __init__(self, commands: int, answers: int) -> None:
        self.problems: list[str] = []
        self._commands, self._answers, self._buffer, self._number = commands, answers, b"", 0
        self._session: dict[str, str] = {}
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log"):
            self.do(f"{domain}.enable")

    def open(self, page: Path, *, width: int = 1280, scheme: str = "light") -> None:
        """Load a page in a window of that width, on a system with a light or a dark look."""
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=800, deviceScaleFactor=1, mobile=False)
        self.do("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        self.do("Page.navigate", url=page.as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """What a script comes to, on the page."""
        return self.do("Runtime.evaluate", expression=script, returnByValue=True)["result"]["value"]

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        found: dict[str, Any] = answer["result"]
        return found

    def _receive(self) -> dict[str, Any]:
        """The next answer or event; an event of the console is a problem."""
        deadline = time.monotonic() + _TIMEOUT_S
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._answers], [], [], max(0.0, deadline - time.monotonic()))
            part = os.read(self._answers, 2**20) if ready else b""
            if not part:
                raise AssertionError("the browser ends or does not answer")
            self._buffer += part
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if message.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(json.dumps(message["params"]))
        return message


@contextmanager
def browser_tab(profile: Path) -> Iterator[Tab]:
    """A tab of a new browser, which keeps its files in `profile`."""
    program = chromium()
    assert program is not None
    # Above the numbers that the browser's own ends get.
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for pipe in (os.pipe(), os.pipe()) for end in _and_close(pipe)]
    theirs, ours = (ends[0], ends[3]), (ends[1], ends[2])
    flags = ["--headless", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", f"--user-data-dir={profile}"]
    flags += ["--no-sandbox"] if os.geteuid() == 0 else []
    process = subprocess.Popen(
        [sys.executable, "-SE", "-c", _WITH_PIPES.format(*theirs), program, *flags],
        pass_fds=theirs,
        start_new_session=True,
        stderr=subprocess.DEVNULL,
    )
    for end in theirs:
        os.close(end)
    try:
        yield Tab(*ours)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for end in ours:
            os.close(end)


def _and_close(pipe: tuple[int, int]) -> Iterator[int]:
    """Its ends, each closed after it was used."""
    for end in pipe:
        yield end
        os.close(end)
