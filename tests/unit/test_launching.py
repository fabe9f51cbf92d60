"""The tests' own helpers, where a mistake would make another test flaky."""

from pathlib import Path

from launching import walk


def test_walk_goes_on_when_a_folder_vanishes(tmp_path: Path):
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    found = walk(tmp_path)
    folders = [next(found), next(found)]
    for folder in folders:
        (folder / "file").unlink()
        folder.rmdir()
    assert sorted(folders) == [tmp_path / "first", tmp_path / "second"]
    assert not list(found)
