"""A headless Chromium that is driven through its DevTools protocol over two pipes, so that no
package is needed (https://chromedevtools.github.io/devtools-protocol).
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SECONDS = 120.0  # until a browser that does not answer is given up
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe "
    "--no-first-run --disable-background-networking --disable-component-update"
).split()


def installed() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Tab:
    """One tab. ``problems``: errors and warnings of the console, exceptions, and requests for
    anything but the page itself.
    """

    def __init__(self, sends: int, receives: int) -> None:
        self._sends, self._receives = sends, receives
        self._buffer, self._last = b"", 0
        self._session = ""
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a command. Events that come before it are looked at on the way."""
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._sends, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._last:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result

    def _next(self) -> dict[str, Any]:
        end = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._receives], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser does not answer"
            data = os.read(self._receives, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        known = message.get("params", {})
        method = message.get("method")
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(known["exceptionDetails"]))
        elif method == "Log.entryAdded" and known["entry"]["level"] in ("error", "warning"):
            self.problems.append(known["entry"]["text"])
        elif method == "Runtime.consoleAPICalled":
            self.problems.append(str(known["args"]))
        elif method == "Network.requestWillBeSent":
            url = known["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.problems.append(f"the page asks for {url}")
        return message

    def open(self, page: Path, width: int = 1400, height: int = 900) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        self.call("Page.navigate", url=page.as_uri())
        self.wait("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in found, (expression, found["exceptionDetails"])
        return found["result"].get("value")

    def wait(self, condition: str) -> None:
        """Returns when the JavaScript is true."""
        end = time.monotonic() + SECONDS
        while not self.evaluate(condition):
            assert time.monotonic() < end, condition
            time.sleep(0.01)

    def key(self, name: str) -> None:
        codes = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
        known = {"key": name, "code": name, "windowsVirtualKeyCode": codes[name]}
        text = {"text": "\r"} if name == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **known, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **known)

    def click(self, selector: str) -> None:
        """Scrolls an element into view and clicks at its middle."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).scrollIntoView()")
        x, y = self.evaluate(
            "(() => { const r = document.querySelector(" + json.dumps(selector) + ")"
            ".getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)


@contextmanager
def browser(program: str, folder: Path) -> Iterator[Tab]:
    """A tab of a new browser, which has a profile in ``folder`` and ends with the block."""
    # numbers that sh can redirect from: 3 and 4 are those of the browser's own ends
    commands, sends = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in os.pipe())
    receives, answers = (fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in os.pipe())
    process = subprocess.Popen(
        [
            *("bash", "-c", f'exec "$0" "$@" 3<&{commands} 4>&{answers}', program),
            *(*FLAGS, f"--user-data-dir={folder}"),
        ],
        pass_fds=(commands, answers),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(commands)
    os.close(answers)
    try:
        yield Tab(sends, receives)
    finally:
        process.kill()
        process.wait()
        os.close(sends)
        os.close(receives)
