"""Tests that need a CUDA GPU; without one they are skipped."""

from __future__ import annotations

import pytest

from hpcdask.gpu.devices import Gpu, visible_gpus
from hpcdask.gpu.driver import has_nvidia_driver


@pytest.fixture(scope="session")
def gpus() -> list[Gpu]:
    """The GPUs of this machine."""
    found = visible_gpus() if has_nvidia_driver() else []
    if not found:
        pytest.skip("no CUDA GPU on this machine")
    return found
