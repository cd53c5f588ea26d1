"""A headless Chromium, driven by the DevTools protocol over a pipe, without driver and port."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def find_chromium() -> str | None:
    """The browser of this machine; KGEN_CHROMIUM names another one."""
    if named := os.environ.get("KGEN_CHROMIUM"):
        return named
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class NoContextError(RuntimeError):
    """The browser could not evaluate an expression: the tab was loading another page."""


# What Chromium answers with when a navigation takes a page away from an expression, and what it
# answers with between two pages.
NO_CONTEXT = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)


class Page:
    """One tab.

    Attributes:
        events: Events that the browser has reported since the tab was opened.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self._session = ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") != self._number:
                self.events.append(answer)
                continue
            if "error" in answer:
                if answer["error"].get("message") in NO_CONTEXT:
                    raise NoContextError(f"{method}: {answer['error']}")
                raise RuntimeError(f"{method}: {answer['error']}")
            found: dict[str, Any] = answer["result"]
            return found

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(line)
        return parsed

    def evaluate(self, expression: str) -> Any:
        """Evaluate JavaScript; promises are awaited."""
        result = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(str(result["exceptionDetails"]))
        return result["result"].get("value")

    def open(self, file: Path, until: str, seconds: float = 60.0) -> None:
        """Load a file and wait until a JavaScript expression is true."""
        self.call("Page.navigate", url=file.resolve().as_uri())
        self.wait(until, seconds)

    def wait(self, until: str, seconds: float = 30.0) -> None:
        """Wait until a JavaScript expression is true, also in a page that is still loaded."""
        end = time.monotonic() + seconds
        while True:
            try:
                if self.evaluate(until):
                    return
                why = ""
            except NoContextError as error:
                why = str(error)
            if time.monotonic() > end:
                raise TimeoutError(f"{until}; {self.errors()}; {why}")
            time.sleep(0.02)

    def key(self, key: str, code: int, text: str = "") -> None:
        """Press and release a key."""
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **more
            )

    def errors(self) -> list[str]:
        """Exceptions, and warnings and errors on the console."""
        found = []
        for event in self.events:
            given = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(str(given["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if given["type"] in ("error", "warning", "assert"):
                    found.append(str(given["args"]))
                case "Log.entryAdded" if given["entry"]["level"] == "error":
                    found.append(str(given["entry"]))
        return found

    def requests(self) -> list[str]:
        """Addresses that the tab loaded."""
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event.get("method") == "Network.requestWillBeSent"
        ]


@contextmanager
def open_page(chromium: str, profile: Path) -> Iterator[Page]:
    """Start the browser with one empty tab; the browser ends with the block."""
    out_of_browser, browser_writes = os.pipe()
    browser_reads, into_browser = os.pipe()

    # The browser reads commands from file descriptor 3 and writes answers to file descriptor 4.
    command = [
        "bash", "-c", f"exec 3<&{browser_reads} 4>&{browser_writes}; exec \"$@\"", "browser",
        chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--no-first-run", f"--user-data-dir={profile}", "--window-size=1280,900",
        "--remote-debugging-pipe", "about:blank",
    ]
    process = subprocess.Popen(
        command, pass_fds=(browser_reads, browser_writes), stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )
    os.close(browser_reads)
    os.close(browser_writes)
    try:
        yield Page(into_browser, out_of_browser)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(into_browser)
        os.close(out_of_browser)
