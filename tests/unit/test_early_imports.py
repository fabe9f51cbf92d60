"""How a rank learns that its program imports a collection of Dask's."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from hpcdask.node import early_imports

MODULE, OTHER = "seldom_used", "hardly_used"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with modules that stand for dask.array, and which nobody has imported."""
    for name in (MODULE, OTHER):
        (tmp_path / f"{name}.py").touch()
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(early_imports, "MODULES", {MODULE, OTHER})
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    return tmp_path


def test_each_import_is_told_once(module: Path) -> None:
    async def run() -> None:
        told: asyncio.Queue[str] = asyncio.Queue()
        early_imports.listen(str(module), told.put_nowait)
        early_imports.watch(str(module))
        for name in (MODULE, MODULE, OTHER):
            sys.modules.pop(name, None)
            assert importlib.import_module(name).__file__
        async with asyncio.timeout(30):
            assert [await told.get(), await told.get()] == [MODULE, OTHER]

    asyncio.run(run())


def test_a_program_whose_rank_does_not_listen_imports_as_ever(module: Path) -> None:
    early_imports.watch(str(module / "gone"))
    assert importlib.import_module(MODULE).__file__


def test_a_folder_whose_path_is_too_long_for_a_socket(module: Path) -> None:
    folder = module / ("long" * 30)
    folder.mkdir()

    async def run() -> None:
        early_imports.listen(str(folder), lambda module: pytest.fail(f"nobody tells of {module}"))
        early_imports.watch(str(folder))
        assert importlib.import_module(MODULE).__file__

    asyncio.run(run())


def test_what_is_loaded_is_there_in_the_end() -> None:
    code = """
import sys, threading
from hpcdask.node import early_imports
early_imports.load("dask.array")
early_imports.load("antigravity")
for thread in threading.enumerate():
    if thread.name == "early-import":
        thread.join(60)
print("dask.array" in sys.modules, "antigravity" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True False\n", done.stderr
