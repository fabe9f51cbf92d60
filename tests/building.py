"""Builds the source distribution and the wheel of this checkout, for tests."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from launching import unavailable

ROOT = Path(__file__).parents[1]


class Built(NamedTuple):
    """What was built: the source distribution, and the wheel that was made from it."""

    sdist: Path
    wheel: Path


def build(folder: Path) -> Built:
    """Build both into a new folder, the wheel from what the source distribution contains."""
    env = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    if importlib.util.find_spec("hatchling") is None:
        tools = folder / "tools"
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile"]
        done = subprocess.run([*command, "--target", tools, "hatchling>=1.24"], check=False)
        if done.returncode:
            unavailable("hatchling is not installed, and pip cannot install it")
        env["PYTHONPATH"] = str(tools)
    sdist = _hatchling("sdist", ROOT, folder / "dist", env)
    (folder / "source").mkdir()
    subprocess.run(["tar", "-xf", sdist, "-C", folder / "source"], check=True)
    (source,) = (folder / "source").iterdir()
    return Built(sdist, _hatchling("wheel", source, folder / "dist", env))


def _hatchling(kind: str, source: Path, out: Path, env: dict[str, str]) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", out]
    done = subprocess.run(
        command, cwd=source, env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.tar.gz" if kind == "sdist" else "*.whl")
    return path
