"""A real browser for tests: the system's headless Chromium, driven by selenium."""

from __future__ import annotations

import base64
import json
import shutil
from importlib.util import find_spec
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
    if find_spec("selenium") is None:
        return "selenium not installed (pip install 'holdfast[dev]')"
    absent = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(absent)} not installed (Debian: apt install chromium chromium-driver)" if absent else None


class Browser:
    """One session; use as a context."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 900) -> None:
        self._flags = [*FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}"]

    def __enter__(self) -> Browser:
        from selenium.webdriver import Chrome, ChromeOptions
        from selenium.webdriver.chrome.service import Service

        options = ChromeOptions()
        options.binary_location = shutil.which("chromium") or ""
        for flag in self._flags:
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self._driver = Chrome(options, Service(shutil.which("chromedriver")))
        self._driver.get("about:blank")  # leaves the page of a new tab, which asks for things itself
        self.command("Emulation.setFocusEmulationEnabled", enabled=True)  # as if the window were the active one
        return self

    def __exit__(self, *_: object) -> None:
        self._driver.quit()

    def open(self, page: Path) -> None:
        self.log("performance")  # what came before does not count
        self._driver.get(page.as_uri())

    def run(self, script: str, *arguments: object) -> Any:
        """The value that the script returns."""
        return self._driver.execute_script(script, *arguments)

    def command(self, name: str, **options: object) -> Any:
        """One command of the DevTools protocol."""
        return self._driver.execute_cdp_cmd(name, options)

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
        self._driver.execute_async_script("requestAnimationFrame(() => requestAnimationFrame(arguments[0]))")
        self.command("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def log(self, kind: str = "browser") -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._driver.get_log(kind)
        return found

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]

    def screenshot(self, path: Path) -> None:
        """The whole page as PNG."""
        shot = self.command("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))
