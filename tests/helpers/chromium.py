"""Controls Chromium over its debugging pipe: needs the browser only, no driver and no package."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
TIMEOUT_SECONDS = 180.0


def browser() -> str | None:
    """The path of an installed Chromium."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Tab:
    """One page of a running browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _next(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise TimeoutError("the browser does not respond")
            self._rest += data
        line, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        return message

    def open(
        self, path: Path, width: int = 1100, height: int = 900, dark: bool = False, scale: float = 1
    ) -> None:
        """Load a file and wait until its script has run."""
        self.events.clear()
        self.set_view(width, height, dark, scale)
        self.call("Page.navigate", url=path.resolve().as_uri())
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not self.run("document.documentElement?.classList.contains('ready') ?? false"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"the script of {path} did not run to its end")
            time.sleep(0.05)

    def set_view(self, width: int, height: int = 900, dark: bool = False, scale: float = 1) -> None:
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression on the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(
                answer["exceptionDetails"].get("exception", {}).get("description", str(answer))
            )
        return answer["result"].get("value")

    def press(self, key: str, code: int) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text
            )

    def requests(self) -> list[str]:
        """Every address that was requested since the page was opened."""
        sent = [event for event in self.events if event.get("method") == "Network.requestWillBeSent"]
        return [str(event["params"]["request"]["url"]) for event in sent]

    def errors(self) -> list[str]:
        """Errors of the page's script, and what its security policy blocked."""
        findings = []
        for event in self.events:
            if event.get("method") == "Runtime.exceptionThrown":
                findings.append(str(event["params"]["exceptionDetails"]))
            if event.get("method") == "Runtime.consoleAPICalled" and event["params"]["type"] == "error":
                findings.append(str(event["params"]["args"]))
            if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
                findings.append(str(event["params"]["entry"]["text"]))
        return findings

    def screenshot(self, path: Path, whole_page: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole_page)["data"]
        path.write_bytes(base64.b64decode(data))

    def print_pdf(self, path: Path) -> None:
        data = self.call("Page.printToPDF", printBackground=True)["data"]
        path.write_bytes(base64.b64decode(data))


@contextlib.contextmanager
def opened() -> Iterator[Tab]:
    """A browser for as long as the block runs."""
    name = browser()
    if name is None:
        raise FileNotFoundError("Chromium is not installed: apt-get install chromium")
    # The browser reads from descriptor 3 and writes to 4.
    theirs_in, ours_out = os.pipe()
    ours_in, theirs_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        command = [
            name,
            "--headless=new",
            "--remote-debugging-pipe",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
        ]
        shell = f'exec 3<&{theirs_in} 4>&{theirs_out}; exec "$@"'
        process = subprocess.Popen(
            ["bash", "-c", shell, "bash", *command],
            pass_fds=(theirs_in, theirs_out),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        try:
            yield Tab(ours_out, ours_in)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            os.close(ours_out)
            os.close(ours_in)
