"""A real browser for tests: headless Chromium, driven over the WebDriver protocol."""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)


def missing() -> str | None:
    """Why there is no browser to test in, or None."""
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: apt install chromium chromium-driver)" if absent else None


class Browser:
    """One session; use as a context."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port = free.getsockname()[1]
        self._flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]
        self._session = ""

    def __enter__(self) -> Browser:
        self._driver = subprocess.Popen(
            ["chromedriver", f"--port={self._port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": self._flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        for attempt in range(100):
            try:
                made = self._ask("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
                break
            except ConnectionError:
                if attempt == 99:
                    raise
                time.sleep(0.05)
        self._session = f"/session/{made['sessionId']}"
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("DELETE", self._session)
        finally:
            self._driver.terminate()
            self._driver.wait(10)

    def _ask(self, verb: str, path: str, body: dict[str, Any] | None = None) -> Any:
        url = f"http://127.0.0.1:{self._port}{path}"
        content = json.dumps(body or {}).encode() if verb == "POST" else None
        request = urllib.request.Request(url, content, {"Content-Type": "application/json"}, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=30) as reply:
                return json.load(reply)["value"]
        except urllib.error.HTTPError as error:
            raise AssertionError(json.load(error)["value"]["message"]) from None
        except urllib.error.URLError as error:
            raise ConnectionError(error.reason) from None

    def open(self, page: Path) -> None:
        self.log("performance")  # what came before does not count
        self._ask("POST", f"{self._session}/url", {"url": page.as_uri()})

    def run(self, script: str, *arguments: object) -> Any:
        """The value that the script returns."""
        return self._ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def command(self, name: str, **options: object) -> Any:
        """One command of the DevTools protocol."""
        return self._ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": name, "params": options})

    def resize(self, width: int, height: int = 800) -> None:
        self.command(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, scheme: str) -> None:
        self.command("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.command("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def hover(self, selector: str) -> None:
        """Moves the pointer to the middle of the first match."""
        x, y = self.run(
            "const e = document.querySelector(arguments[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left + b.width / 2, b.top + b.height / 2]",
            selector,
        )
        painted = "requestAnimationFrame(() => requestAnimationFrame(arguments[0]))"
        self._ask("POST", f"{self._session}/execute/async", {"script": painted, "args": []})
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def log(self, kind: str = "browser") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("POST", f"{self._session}/se/log", {"type": kind})
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
