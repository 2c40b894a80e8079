"""Headless Chromium, driven by its DevTools protocol over a pipe."""

import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]


class Page:
    """A page in Chromium, and all that it logged, threw and requested."""

    def __init__(self, send: Callable[..., Any]) -> None:
        self.send = send
        self.errors: list[str] = []
        self.requests: list[str] = []

    def visit(self, path: Path) -> None:
        """Open a file in this page, also if it is open already, and wait until it is loaded."""
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.readyState === 'complete' && location.protocol === 'file:'")

    def evaluate(self, script: str) -> Any:
        """Return the value of a JavaScript expression; a promise is awaited."""
        answer = self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, *, seconds: float = 20) -> Any:
        """Return the value of an expression as soon as it is true."""
        deadline = time.monotonic() + seconds
        while not (value := self.evaluate(script)):
            assert time.monotonic() < deadline, (
                f"{script}: not true after {seconds} s; {self.errors}"
            )
            time.sleep(0.02)
        return value

    def press(self, key: str, *, code: int = 0, text: str = "") -> None:
        """Press and release a key. code: its number in Windows, for Enter, Tab and arrows."""
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                **extra,
            )

    def click(self, selector: str) -> None:
        """Scroll to the first element of a selector and click with the mouse at its center."""
        x, y = self.center(selector)
        self.mouse("mousePressed", x, y)
        self.mouse("mouseReleased", x, y)

    def mouse(self, kind: str, x: float, y: float, **extra: Any) -> None:
        """Send an event of the mouse: mousePressed, mouseReleased or mouseMoved."""
        button = "none" if kind == "mouseMoved" and not extra else "left"
        self.send(
            "Input.dispatchMouseEvent",
            **{"type": kind, "x": x, "y": y, "button": button, "clickCount": 1} | extra,
        )

    def center(self, selector: str) -> tuple[float, float]:
        """Scroll to the first element of a selector and return the place of its center."""
        return tuple(
            self.evaluate(f"""(() => {{
            const node = document.querySelector({json.dumps(selector)});
            node.scrollIntoView({{ block: "center", behavior: "instant" }});
            const {{ x, y, width, height }} = node.getBoundingClientRect();
            return [x + width / 2, y + height / 2];
        }})()""")
        )


class Chromium:
    """A process of Chromium. Messages are JSON that end in NUL, on its file descriptors 3 and 4."""

    def __init__(
        self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int
    ) -> None:
        self.process = process
        self.to_browser = to_browser
        self.from_browser = from_browser
        self.buffer = b""
        self.number = 0
        self.pages: dict[str, Page] = {}

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """Open a file and return its page after it was loaded."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self.pages[session] = Page(
            lambda method, **values: self.send(method, session, **values)
        )
        for domain in ("Runtime", "Log", "Network", "Page"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.send("Emulation.setEmulatedMedia", features=[theme])
        page.visit(path)
        return page

    def close(self, page: Page) -> None:
        """Close a page."""
        page.send("Page.close")

    def send(self, method: str, session: str | None = None, **values: Any) -> Any:
        """Send a command and return its result; events that arrive before it are noted."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": values} | (
            {"sessionId": session} if session else {}
        )
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self.note(answer)

    def receive(self, *, seconds: float = 30) -> dict[str, Any]:
        """Return the next message of the browser."""
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            left = max(0.0, deadline - time.monotonic())
            assert select.select([self.from_browser], [], [], left)[0], (
                f"Chromium was silent for {seconds} s"
            )
            data = os.read(self.from_browser, 1 << 20)
            assert data, "Chromium ended"
            self.buffer += data
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def note(self, event: dict[str, Any]) -> None:
        """Note an error, a message on the console or a request of a page."""
        page = self.pages.get(event.get("sessionId", ""))
        values = event.get("params", {})
        if page is None:
            return
        match event.get("method"):
            case "Runtime.exceptionThrown":
                page.errors.append(json.dumps(values["exceptionDetails"]))
            case "Runtime.consoleAPICalled":
                page.errors.append(f"console.{values['type']}: {values['args']}")
            case "Log.entryAdded":
                page.errors.append(f"{values['entry']['level']}: {values['entry']['text']}")
            case "Network.requestWillBeSent":
                page.requests.append(values["request"]["url"])


@contextmanager
def chromium(profile: Path) -> Iterator[Chromium]:
    """Yield a Chromium with an empty profile in `profile`, which ends with the context."""
    assert CHROMIUM
    ours: list[int] = []
    theirs: list[int] = []
    for read_end, write_end in (os.pipe(), os.pipe()):
        ends = (read_end, write_end) if not ours else (write_end, read_end)
        # 3 and 4 must be free in the shell that puts the pipes there
        theirs.append(fcntl.fcntl(ends[0], fcntl.F_DUPFD, 20))
        os.close(ends[0])
        ours.append(ends[1])
    command = [
        "bash",
        "-c",
        f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}',
        "bash",
        CHROMIUM,
        *FLAGS,
        f"--user-data-dir={profile}",
        "about:blank",
    ]
    process = subprocess.Popen(
        command,
        pass_fds=theirs,
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for descriptor in theirs:
        os.close(descriptor)
    try:
        yield Chromium(process, ours[0], ours[1])
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for descriptor in ours:
            os.close(descriptor)
