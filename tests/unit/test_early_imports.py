"""How a rank learns that its program imports a collection of Dask's."""

from __future__ import annotations

import asyncio
import importlib
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcdask.errors import HpcdaskError
from hpcdask.gpu.first_use import IMPORT
from hpcdask.node import early_imports
from launching import until

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
import asyncio, sys
from hpcdask.node import early_imports
asyncio.run(early_imports.load("no_such_module", "dask.array"))
print("dask.array" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True\n", done.stderr


def test_an_import_that_hangs_holds_nothing_up_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """distributed sees a hanging event loop, but not a thread."""
    over = threading.Event()
    monkeypatch.setattr(early_imports.importlib, "import_module", lambda name: over.wait(60))
    monkeypatch.setattr(early_imports, "DEADLINE_S", 0.1)

    async def run() -> None:
        try:
            async with asyncio.timeout(20):
                await early_imports.load(MODULE)
        finally:
            over.set()

    asyncio.run(run())


def test_graphs_wait_and_only_workers_that_can_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is unpickled meanwhile imports modules of a package that is not whole yet."""

    async def run() -> None:
        graphs: asyncio.Queue[int] = asyncio.Queue()
        sent, whole = [], asyncio.Event()

        async def load(module: str) -> None:
            assert module == MODULE
            await whole.wait()

        async def update_graph(number: int) -> None:
            graphs.put_nowait(number)

        monkeypatch.setattr(early_imports, "load", load)
        monkeypatch.setattr(early_imports, "MODULES", {MODULE})
        able = SimpleNamespace(extra={IMPORT: True})
        scheduler = SimpleNamespace(
            workers={"a": able, "b": SimpleNamespace(extra={})},
            worker_send=lambda *message: sent.append(message),
            stream_handlers={"update-graph": update_graph},
        )
        imports = early_imports.EarlyImports(scheduler)
        handler = scheduler.stream_handlers["update-graph"]
        await handler(number=1)
        assert graphs.get_nowait() == 1
        loading = asyncio.create_task(imports.load(MODULE))
        await until(lambda: sent, 30, "the worker is told")
        assert sent == [("a", {"op": IMPORT, "modules": [MODULE]})]
        graph = asyncio.create_task(handler(number=2))
        _, pending = await asyncio.wait([graph, loading], timeout=0.2)
        assert pending == {graph, loading}
        assert graphs.empty()
        whole.set()
        async with asyncio.timeout(30):
            await asyncio.gather(graph, loading)
        assert graphs.get_nowait() == 2

    asyncio.run(run())


def test_a_distributed_without_that_message_is_refused() -> None:
    with pytest.raises(HpcdaskError, match="update-graph"):
        early_imports.EarlyImports(SimpleNamespace(stream_handlers={}))
