"""Dask's defaults where arrays are on GPUs."""

from __future__ import annotations

import subprocess
import sys

import dask.config
import pytest

from hpcdask.client import defaults
from hpcdask.client.connect import configure_client, forget_client

OF_DASK, OURS = "128MiB", "512MiB"


def size() -> str:
    return str(dask.config.get("array.chunk-size"))


@pytest.fixture(autouse=True)
def as_before():
    with dask.config.set({"array.chunk-size": OF_DASK}):
        yield


def test_until_the_last_cluster_is_closed():
    with defaults.suiting_devices():
        with defaults.suiting_devices():
            assert size() == OURS
        assert size() == OURS
    assert size() == OF_DASK


def test_what_the_program_set_stays():
    with dask.config.set({"array.chunk-size": "64MiB"}):
        with defaults.suiting_devices():
            assert size() == "64MiB"
        assert size() == "64MiB"
    with defaults.suiting_devices():
        dask.config.set({"array.chunk-size": "1GiB"})
    assert size() == "1GiB"


@pytest.mark.parametrize("configured", ["128MiB", "96MiB"])
def test_what_the_user_configured_stays(configured: str):
    """Also where that is what Dask has by default."""
    program = (
        "import dask.config; from hpcdask.client.defaults import suit_devices; suit_devices();"
        "print(dask.config.get('array.chunk-size'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"DASK_ARRAY__CHUNK_SIZE": configured},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout == f"{configured}\n"


@pytest.mark.parametrize(("on_gpus", "expected"), [(True, OURS), (False, OF_DASK)])
def test_a_program_of_a_run(monkeypatch: pytest.MonkeyPatch, on_gpus: bool, expected: str):
    for name in ("HPCDASK_SCHEDULER_FILE", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    configure_client("tls://127.0.0.1:1", "/tmp/gone/scheduler.json", on_gpus=on_gpus)
    try:
        assert size() == expected
    finally:
        forget_client()
    assert size() == OF_DASK
