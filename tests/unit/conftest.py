"""Settings of the fast lane, and a stand-in that several of its tests share."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# How long an example takes says nothing where several tests run at once
settings.register_profile(
    "busy", deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("busy")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Run the whole folder on all cores, if the command line does not say on how many."""
    whole = [Path(name).resolve() for name in config.args] == [Path(__file__).parent]
    alone = "PYTEST_XDIST_WORKER" in os.environ or config.getoption("usepdb")
    if whole and not alone and config.getoption("numprocesses", None) is None:
        config.option.numprocesses = min(4, len(os.sched_getaffinity(0)))


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[list], None]]:
    """Yield a function that has NVML's stand-in tell of these GPUs; until then it has no driver."""
    file = tmp_path / "nvml.json"
    monkeypatch.delenv("FAKE_NVML", raising=False)
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fakes"))
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr("hpcdask.gpu.nvml.has_nvidia_driver", lambda: False)

    def tell(gpus: list) -> None:
        part = file.with_suffix(".part")
        part.write_text(json.dumps(gpus))
        part.replace(file)  # a thread may be reading
        monkeypatch.setenv("FAKE_NVML", str(file))

    yield tell
    sys.modules.pop("pynvml", None)
