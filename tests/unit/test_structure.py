"""The limits that keep the package readable: its rooms, and the sizes of what is in them."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

import hpcdask

PACKAGE = Path(hpcdask.__file__).parent
ROOT = PACKAGE.parent
MODULES = sorted(PACKAGE.rglob("*.py"))
MODULE_LINES, CLASS_LINES, FUNCTION_LINES = 400, 300, 60
ROOT_MODULES, ROOMS, FLOORS = 8, 17, 10
#: Names of before: each thing is called by its subject now, and by one word.
FORMER = "JobPart|BoundWorker|Warmth|Sighting|Nursery|Keeper|Ledger|Departures|_Census|Warden|scout"


def test_the_root_has_few_modules_and_the_package_few_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= ROOT_MODULES
    assert len([path for path in PACKAGE.iterdir() if (path / "__init__.py").exists()]) <= ROOMS


def test_the_contract_has_few_floors_and_names_rooms():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (contract,) = (
        one
        for one in settings["tool"]["importlinter"]["contracts"]
        if one["type"] == "layers" and one["exhaustive"]
    )
    assert len(contract["layers"]) <= FLOORS
    assert not [layer for layer in contract["layers"] if ":" in layer], "rooms that need each other"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_nothing_is_too_long(path: Path):
    text = path.read_text()
    assert text.count("\n") <= MODULE_LINES
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            limit = CLASS_LINES if isinstance(node, ast.ClassDef) else FUNCTION_LINES
            assert node.end_lineno - node.lineno < limit, node.name


@pytest.mark.parametrize("room", ["bootstrap", "node", "comm", "gpu", "upstream"])
def test_what_the_probe_passes_through_imports_nothing_by_itself(room: str):
    """It is forked before distributed is imported."""
    assert not (PACKAGE / room / "__init__.py").read_text()


def test_former_names_are_gone():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in (PACKAGE, ROOT / "docs", ROOT / "examples", ROOT / "benchmarks")
        for path in folder.rglob("*")
        if path.suffix in {".py", ".md"}
        for line in path.read_text().splitlines()
        if re.search(rf"\b({FORMER})\b", line)
    ]
    assert not found
