"""A real headless Chromium, driven through its own pipe: no port, no driver, no further package."""

from __future__ import annotations

import base64
import json
import os
import select
import subprocess
import time
from pathlib import Path
from typing import Any

from programs import need_program
from tunetool.measure.marked_processes import naming
from waiting import PATIENCE, until

_START = 'exec chromium "$@" 3<&"$READ" 4>&"$WRITE"'
_COMPLAINTS = ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening")


class Browser:
    """One browser with one tab; what the page said and asked for since it was opened."""

    def __init__(self, folder: Path) -> None:
        need_program("chromium")
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ["--headless=new", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--no-sandbox"]
        options += ["--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update"]
        self._profile = f"--user-data-dir={folder / 'profile'}"
        options += [self._profile, "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", _START, "bash", *options],
            env={**os.environ, "HOME": str(folder), "READ": str(theirs_in), "WRITE": str(theirs_out)},
            pass_fds=(theirs_in, theirs_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._number, self._buffer, self._session = 0, b"", ""
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End it."""
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()
        # Its other processes write into the profile for a moment longer.
        until(lambda: not naming(self._profile), "the end of Chromium's processes")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A call of the DevTools protocol, and its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._out, rest) :]
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer["error"])
                result: dict[str, Any] = answer["result"]
                return result
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._in, 2**20) if ready else b""
            assert part, "the browser does not answer"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def open(self, page: Path, *, dark: bool = False, width: int = 1280, scripts: bool = True) -> None:
        """Open the file in a window of that width, and wait until it is drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", media="", features=[theme])
        self.call("Emulation.setScriptExecutionDisabled", value=not scripts)
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri())
        while not self.said("Page.loadEventFired"):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript on the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def said(self, *methods: str) -> list[dict[str, Any]]:
        """The events of these kinds since the page was opened."""
        return [event["params"] for event in self.events if event.get("method") in methods]

    @property
    def complaints(self) -> list[dict[str, Any]]:
        """Errors, what the policy refused, what was written to the console, and dialogs."""
        return self.said(*_COMPLAINTS, "Runtime.consoleAPICalled")

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        return [event["request"]["url"] for event in self.said("Network.requestWillBeSent")]

    def press(self, key: str, text: str = "") -> None:
        """Press and release a key."""
        codes = {"Tab": 9, "Enter": 13}
        details = {"key": key, "code": key, "windowsVirtualKeyCode": codes.get(key, 0)}
        self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **details)
        self.call("Input.dispatchKeyEvent", type="keyUp", **details)

    def picture(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """A screenshot, for people: of the whole page, or of the rectangle ``clip``."""
        part = {"clip": clip} if clip is not None else {}
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, **part)
        path.write_bytes(base64.b64decode(shot["data"]))
