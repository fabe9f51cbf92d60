"""Tests that need a CUDA GPU; without one they are skipped."""

from __future__ import annotations

import pytest

from hpcdask.devices import Gpu, has_nvidia_driver, visible_gpus


@pytest.fixture(scope="session")
def gpus() -> list[Gpu]:
    """The GPUs of this machine."""
    found = visible_gpus() if has_nvidia_driver() else []
    if not found:
        pytest.skip("no CUDA GPU on this machine")
    return found
