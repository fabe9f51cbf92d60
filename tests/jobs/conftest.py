"""Where the clusters of these tests keep their files."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import describe, end, leftovers, wait_for, walk


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the clusters' base; at the end no process, no key and no request may be left."""
    marker = f"HPCDASK_TEST={uuid.uuid4().hex}"
    monkeypatch.setenv(*marker.split("="))
    base = tmp_path / "clusters"

    def secrets() -> list[Path]:
        return [path for path in walk(base) if path.suffix in (".pem", ".pickle")]

    yield base
    try:
        wait_for(lambda: not leftovers(marker) and not secrets(), 30, "all to be gone")
    except AssertionError:
        pytest.fail(f"left behind: {describe(leftovers(marker))} {secrets()}")
    finally:
        end(leftovers(marker))
