"""The limits that keep the package readable: its rooms, and the sizes of what is in them."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

import hpcdask

PACKAGE = Path(hpcdask.__file__).parent
ROOT = PACKAGE.parent
ROOT_MODULES, ROOMS, FLOORS = 8, 17, 11


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


@pytest.mark.parametrize("room", ["bootstrap", "node", "comm", "gpu", "upstream"])
def test_rooms_of_the_first_moments_import_nothing_by_themselves(room: str):
    """They are imported in a rank's own process, which has no distributed."""
    assert not (PACKAGE / room / "__init__.py").read_text()


def test_one_module_speaks_to_nvml():
    naming = [path for path in PACKAGE.rglob("*.py") if "import pynvml" in path.read_text()]
    assert naming == [PACKAGE / "gpu" / "nvml.py"]
