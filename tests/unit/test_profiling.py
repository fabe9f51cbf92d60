"""Profiles: where they cannot be written, and the time to write them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hpcdask.errors import UsageError
from hpcdask.node import profiling
from hpcdask.spec.specs import WorkerSpec


def test_a_folder_that_cannot_be_made_and_a_missing_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    spec = WorkerSpec(profile="py-spy", profile_folder=str(tmp_path / "file" / "profiles"))
    monkeypatch.setattr(profiling, "find_spy", lambda: "py-spy")
    with pytest.raises(UsageError, match="file/profiles cannot be made"):
        profiling.check(spec)
    monkeypatch.setattr(profiling, "find_spy", lambda: None)
    with pytest.raises(UsageError, match="pip install py-spy"):
        profiling.check(spec)
