"""Pages in a real browser, for tests: Chromium or Chrome, without a window."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path
from typing import Any

from tornado.websocket import websocket_connect

from launching import unavailable, wait_for

#: Not chromium-browser: Ubuntu's is a snap, which cannot read other folders.
BROWSERS = ("chromium", "google-chrome")

WATCH = """<script>
const errors = [];
addEventListener('error', e => errors.push(e.message));
console.error = (...all) => errors.push(all.join(' '));
addEventListener('load', () => {
  const told = document.createElement('pre');
  told.id = 'told';
  told.textContent = JSON.stringify({
    errors,
    loaded: performance.getEntriesByType('resource').map(e => e.name),
    seen: (() => { %s })(),
  });
  document.body.append(told);
});
</script>"""


def _command(folder: Path, *options: str) -> list[str]:
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        unavailable("no chromium on this machine: apt-get install chromium, or google-chrome")
    return [
        *(str(browser), "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
        *(f"--user-data-dir={folder / 'profile'}", "--hide-scrollbars", *options),
    ]


def run(folder: Path, *options: str) -> str:
    """Start Chromium with these options, and return what it wrote."""
    done = subprocess.run(_command(folder, *options), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def look(folder: Path, body: str, script: str) -> Any:
    """What the body of a script finds on a page with this body.

    AssertionError when the page has an error or loads anything.
    """
    page = folder / "looked-at.html"
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{WATCH % script}{body}")
    text = run(folder, "--virtual-time-budget=2000", "--dump-dom", page.as_uri())
    told = json.loads(re.search(r'<pre id="told">(.*?)</pre>', text, re.DOTALL)[1])
    assert told["errors"] == []
    assert told["loaded"] == []
    return told["seen"]


def photograph(folder: Path, body: str, picture: Path, size: tuple[int, int]) -> None:
    """Make a PNG of a page with this body."""
    page = folder / "photographed.html"
    page.write_text(f"<!DOCTYPE html><meta charset='utf-8'>{body}")
    run(folder, "--window-size={},{}".format(*size), f"--screenshot={picture}", page.as_uri())


def watch(folder: Path, url: str, ready: str, size: tuple[int, int]) -> bytes:
    """Photograph a page that goes on changing, as PNG, once this JavaScript is true on it."""
    told = folder / "profile" / "DevToolsActivePort"
    told.unlink(missing_ok=True)
    options = ("--remote-debugging-port=0", "--window-size={},{}".format(*size), url)
    process = subprocess.Popen(_command(folder, *options), stderr=subprocess.DEVNULL)
    try:
        wait_for(lambda: told.is_file() and told.read_text().count("\n"), 60, "the browser's port")
        port = told.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json", timeout=60) as answer:
            (page,) = [one for one in json.load(answer) if one["type"] == "page"]
        return asyncio.run(asyncio.wait_for(_shot(page["webSocketDebuggerUrl"], ready, size), 300))
    finally:
        process.terminate()
        process.wait(60)


async def _shot(address: str, ready: str, size: tuple[int, int]) -> bytes:
    socket = await websocket_connect(address, max_message_size=2**27)

    async def ask(method: str, **parameters: Any) -> dict[str, Any]:
        await socket.write_message(json.dumps({"id": 1, "method": method, "params": parameters}))
        while (answer := json.loads(await socket.read_message())).get("id") != 1:
            pass  # an event
        return answer

    # a window has a least width, and less height than asked for
    metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
    await ask("Emulation.setDeviceMetricsOverride", **metrics)
    wait = (
        f"new Promise(end => {{(function look() {{({ready}) ? end() : setTimeout(look, 200)}})()}})"
    )
    while "error" in await ask("Runtime.evaluate", expression=wait, awaitPromise=True):
        pass  # the page had only begun to load
    return base64.b64decode((await ask("Page.captureScreenshot"))["result"]["data"])


if __name__ == "__main__":  # PAGE.html PICTURE.png WIDTH HEIGHT
    with tempfile.TemporaryDirectory() as made:
        source, picture, *pixels = sys.argv[1:]
        width, height = map(int, pixels)
        photograph(Path(made), Path(source).read_text(), Path(picture), (width, height))
