"""Where the clusters of these tests keep their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from launching import wait_for, walk


@pytest.fixture
def folder(marker: str, tmp_path: Path) -> Iterator[Path]:
    """Yield the clusters' base; at the end no process, no key and no request may be left."""
    base = tmp_path / "clusters"

    def secrets() -> list[Path]:
        return [path for path in walk(base) if path.name.endswith(("keys", ".pickle"))]

    yield base
    wait_for(lambda: not secrets(), 30, "keys and requests to be gone")
