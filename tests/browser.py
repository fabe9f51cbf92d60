"""Pages in a real browser, for tests: Chromium or Chrome, without a window."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

from launching import unavailable

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
