"""A headless Chromium driven over its DevTools pipe: no driver, no port, no package."""

from __future__ import annotations

import base64
import contextlib
import fcntl
import itertools
import json
import os
import select
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any, Self

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 120.0


def installed() -> str | None:
    """Path of a browser that can be driven, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class BrowserError(AssertionError):
    """The browser ended, or says that something went wrong."""


class Browser:
    """One page. ``problems`` collects uncaught exceptions, console errors and every request that leaves the page."""

    def __init__(self, width: int = 1200, height: int = 900) -> None:
        path = installed()
        assert path is not None
        self._profile = tempfile.mkdtemp(prefix="leyline-browser-")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()
        # Above 4, so that moving them there cannot overwrite each other.
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_browser, from_browser)]
        log = os.open(os.path.join(self._profile, "log"), os.O_WRONLY | os.O_CREAT, 0o600)
        actions = [
            (os.POSIX_SPAWN_DUP2, log, 1),
            (os.POSIX_SPAWN_DUP2, log, 2),
            (os.POSIX_SPAWN_DUP2, ends[0], 3),
            (os.POSIX_SPAWN_DUP2, ends[1], 4),
        ]
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe"]
        options += [f"--user-data-dir={self._profile}", "--hide-scrollbars", "--disable-dev-shm-usage", "about:blank"]
        self._pid = os.posix_spawn(path, [path, *options], os.environ, file_actions=actions, setpgroup=0)
        for end in (to_browser, from_browser, log, *ends):
            os.close(end)
        self._buffer = b""
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        target = self._call("Target.createTarget", {"url": "about:blank"})["targetId"]
        attached = self._call("Target.attachToTarget", {"targetId": target, "flatten": True})
        self._session: str | None = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")
        self.resize(width, height)

    _session: str | None = None

    def open(self, page: Path) -> None:
        """Load a file and wait until it is drawn."""
        self._call("Page.navigate", {"url": page.resolve().as_uri()})
        self.wait("document.readyState === 'complete' && location.href.startsWith('file:')")

    def resize(self, width: int, height: int, *, phone: bool = False) -> None:
        """Set the size of the window in CSS pixels."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._call("Emulation.setDeviceMetricsOverride", metrics)

    def prefer(self, scheme: str) -> None:
        """``light`` or ``dark``."""
        self._call("Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": scheme}]})

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        reply = self._call("Runtime.evaluate", {"expression": expression, "returnByValue": True})
        if "exceptionDetails" in reply:
            raise BrowserError(f"{expression}: {reply['exceptionDetails'].get('exception', {}).get('description')}")
        return reply["result"].get("value")

    def wait(self, condition: str) -> None:
        """Until an expression is true."""
        deadline = time.monotonic() + _SECONDS
        while not self.run(condition):
            if time.monotonic() > deadline:
                raise BrowserError(f"still not: {condition}")
            time.sleep(0.05)

    def click(self, selector: str) -> None:
        """A real mouse click in the middle of the element, wherever that is on the screen."""
        box = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect(); return [b.x + b.width / 2, b.y + b.height / 2]; })()"
        )
        event = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self._call("Input.dispatchMouseEvent", {"type": kind, **event})

    def press(self, key: str) -> None:
        """A key press in the focused element."""
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", {"type": kind, "key": key, "code": key})

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        reply = self._call("Page.captureScreenshot", {"captureBeyondViewport": True})
        path.write_bytes(base64.b64decode(reply["data"]))

    def close(self) -> None:
        """End the browser and all it started."""
        os.close(self._write)
        os.close(self._read)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._pid, 9)
        os.waitpid(self._pid, 0)
        for _ in range(50):
            shutil.rmtree(self._profile, ignore_errors=True)
            if not os.path.exists(self._profile):
                return
            time.sleep(0.1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _call(self, method: str, params: dict[str, Any] | None = None) -> dict[str, Any]:
        number = next(self._ids)
        message: dict[str, Any] = {"id": number, "method": method, "params": params or {}}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._receive()
            if reply.get("id") == number:
                if "error" in reply:
                    raise BrowserError(f"{method}: {reply['error']}")
                return dict(reply["result"])
            self._note(reply)

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + _SECONDS
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read, 1 << 20) if ready else b""
            if not piece:
                log = Path(self._profile, "log").read_text(errors="replace")[-2000:]
                raise BrowserError(f"the browser does not answer: {log}")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(line))

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            self.problems.append(str(params["exceptionDetails"].get("exception", {}).get("description")))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(str(params["args"]))
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.problems.append(f"request to {url}")
