"""Headless Chromium over its DevTools protocol: opens a page, moves the pointer, evaluates expressions."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import debian
from helpers.waiting import wait_until

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for the tests of a module. Fails if a page had an error."""
    with Browser(tmp_path_factory.mktemp("profile")) as found:
        yield found
        assert found.errors == []


class Browser:
    """A page of a new browser without a network. Its commands are written to a pipe, so that no port is needed."""

    def __init__(self, profile: Path) -> None:
        assert PROGRAM is not None, f"Chromium is not installed: {debian.INSTALL}"
        to_browser, self._to = os.pipe()
        self._from, from_browser = os.pipe()

        def pipes() -> None:  # the browser reads file descriptor 3 and writes 4
            os.dup2(os.dup(to_browser), 3)
            os.dup2(os.dup(from_browser), 4)

        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
        self._process = subprocess.Popen(
            [PROGRAM, *flags, f"--user-data-dir={profile}", "about:blank"], preexec_fn=pipes, close_fds=False,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self._number, self._unread, self._session = 0, b"", None
        self.errors: list[Any] = []
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> Any:
        """Sends a command. Returns its result. Errors of the page are collected in `errors`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._unread:
            found = os.read(self._from, 1 << 20)
            assert found, "the browser has ended"
            self._unread += found
        line, _, self._unread = self._unread.partition(b"\0")
        return dict(json.loads(line))

    def open(self, page: Path, width: int = 1300, height: int = 900) -> None:
        """Opens a file, and waits until it is loaded and drawn."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        self.call("Page.navigate", url=page.absolute().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression is true."""
        wait_until(lambda: self(expression), f"not true: {expression}")

    def __call__(self, expression: str) -> Any:
        """Returns the value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def texts(self, selector: str) -> list[str]:
        """Returns the texts of the elements of a selector."""
        found = self(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")
        return [re.sub(r"\s+", " ", text).strip() for text in found]

    def place(self, selector: str, x: float, y: float) -> tuple[float, float]:
        """Scrolls to the first element of a selector. Returns a point in it, by shares of its width and height."""
        left, top, width, height = self(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView({{ block: 'center' }});"
            " const r = e.getBoundingClientRect(); return [r.x, r.y, r.width, r.height] })()"
        )
        return left + x * width, top + y * height

    def mouse(self, kind: str, at: tuple[float, float], clicks: int = 0) -> None:
        """Sends an event of the pointer: Moved, Pressed or Released. `clicks` > 0: with the left button."""
        button = {"button": "left", "buttons": 1, "clickCount": clicks} if clicks else {}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=at[0], y=at[1], **button)

    def key(self, name: str) -> None:
        """Presses a key, such as ArrowRight, and releases it."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name)

    def drag(self, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Drags with the left button."""
        self.mouse("Moved", start)
        self.mouse("Pressed", start, 1)
        for share in (0.3, 0.7, 1.0):
            self.mouse("Moved", (start[0] + share * (end[0] - start[0]), start[1] + share * (end[1] - start[1])), 1)
        self.mouse("Released", end, 1)
