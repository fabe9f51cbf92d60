"""Dask's defaults where arrays are on GPUs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import dask.array as da
import dask.config
import pytest
from distributed import Client, LocalCluster

from hpcdask.client import defaults
from hpcdask.client.connect import configure_client, forget_client

CHUNK_SIZE, METHOD = "array.chunk-size", "array.rechunk.method"
OF_DASK = {CHUNK_SIZE: "128MiB", METHOD: None}
OURS = {CHUNK_SIZE: "512MiB", METHOD: "tasks"}


def now() -> dict[str, Any]:
    return {name: dask.config.get(name) for name in OF_DASK}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    with dask.config.set(OF_DASK):
        yield


@pytest.mark.parametrize(
    "own", [{}, {CHUNK_SIZE: "64MiB"}, {METHOD: "p2p"}, {METHOD: "tasks"}], ids=str
)
def test_they_are_ours_until_the_last_cluster_is_closed_but_what_the_program_set(own: dict):
    with dask.config.set(own):
        with defaults.suiting_devices():
            with defaults.suiting_devices():
                assert now() == {**OURS, **own}
            assert now() == {**OURS, **own}
        assert now() == {**OF_DASK, **own}


def test_what_the_program_sets_later_stays():
    with defaults.suiting_devices():
        dask.config.set({CHUNK_SIZE: "1GiB", METHOD: "p2p"})
    assert now() == {CHUNK_SIZE: "1GiB", METHOD: "p2p"}


@pytest.mark.parametrize(
    ("variable", "name", "value"),
    [
        ("DASK_ARRAY__CHUNK_SIZE", CHUNK_SIZE, "128MiB"),  # also what Dask has by default
        ("DASK_ARRAY__CHUNK_SIZE", CHUNK_SIZE, "96MiB"),
        ("DASK_ARRAY__RECHUNK__METHOD", METHOD, "p2p"),
    ],
)
def test_what_the_user_configured_stays(variable: str, name: str, value: str):
    program = (
        "import dask.config; from hpcdask.client.defaults import suit_devices; suit_devices();"
        f"print(dask.config.get('{name}'))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={variable: value},
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout == f"{value}\n"


@pytest.mark.parametrize(("on_gpus", "expected"), [(True, OURS), (False, OF_DASK)])
def test_a_program_of_a_run(monkeypatch: pytest.MonkeyPatch, on_gpus: bool, expected: dict):
    for name in ("HPCDASK_SCHEDULER_FILE", "DASK_SCHEDULER_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    configure_client("tls://127.0.0.1:1", "/tmp/gone/scheduler.json", on_gpus=on_gpus)
    try:
        assert now() == expected
    finally:
        forget_client()
    assert now() == OF_DASK


def test_a_rechunk_of_many_chunks_goes_by_tasks_on_gpus_only():
    """distributed's P2P, which dask chooses by itself, fails with CuPy arrays."""

    def layers() -> str:
        return " ".join(da.ones((400, 400), chunks=(1, 400)).rechunk((400, 1)).dask.layers)

    local = {"n_workers": 1, "processes": False, "dashboard_address": None}
    with LocalCluster(**local) as cluster, Client(cluster), dask.config.set({CHUNK_SIZE: "1 B"}):
        assert "rechunk-p2p" in layers()
        with defaults.suiting_devices():
            assert "rechunk-p2p" not in layers()
            with dask.config.set({METHOD: "p2p"}):
                assert "rechunk-p2p" in layers()
