"""Folders of `save`: whole or not there, whatever ends the process that writes.

::

    PARENT/NAME/
        hpcdask.json   a `Note`; it names the data
        data-HEX/      a Zarr array, or Parquet files
    PARENT/.NAME.saving-HEX/
        owner          the process that saves, see `hpcdask.process.owner_text`
        new/           becomes PARENT/NAME, or its parts take the place of the parts there
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import re
import secrets
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from hpcdask.errors import UsageError
from hpcdask.logs import say
from hpcdask.process import owner_text
from hpcdask.security import private

NOTE = "hpcdask.json"
FORMAT = 1


def _version() -> str:
    return str(sys.modules["hpcdask"].__version__)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Note:
    """What a folder holds: `content` are the fields of the kind's own record."""

    kind: str
    data: str
    content: dict[str, Any]
    format: int = FORMAT
    hpcdask: str = field(default_factory=_version)
    saved: str = field(default_factory=_now)

    def to_json(self) -> str:
        """The text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises ValueError, KeyError or TypeError if it is no such text."""
        read = json.loads(text)
        if read["format"] != FORMAT:
            raise ValueError(f"format {read['format']}, and this hpcdask reads {FORMAT}")
        note = cls(**read)
        if not re.fullmatch(r"data-[0-9a-f]+", note.data):
            raise ValueError(f"data {note.data!r}")
        return note


def read_note(folder: Path) -> Note:
    """What a folder holds. Raises UsageError if it is no finished save."""
    try:
        return Note.from_json((folder / NOTE).read_text())
    except (FileNotFoundError, NotADirectoryError):
        what = "is no save of hpcdask's: it has no " + NOTE
        if not folder.exists():
            unfinished = [*_unfinished(folder)]
            what = "does not exist" + (
                f"; {unfinished[0]} was never finished" if unfinished else ""
            )
        raise UsageError(f"{folder} {what}") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(f"{folder / NOTE} cannot be read: {error}") from None


def _unfinished(folder: Path) -> list[Path]:
    return [
        path
        for path in folder.parent.glob(".*")
        if re.fullmatch(rf"\.{re.escape(folder.name)}\.saving-[0-9a-f]+", path.name)
    ]


def check_target(folder: Path, *, overwrite: bool) -> None:
    """Raise UsageError if nothing can be saved there."""
    parent = folder.parent
    if not parent.is_dir():
        raise UsageError(f"{folder}: there is no folder {parent}: make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: you may not write in {parent}: name another folder")
    try:
        private.refuse_open(str(parent))
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}") from None
    if not os.path.lexists(folder):
        return
    if not (folder / NOTE).is_file():
        raise UsageError(f"{folder} is there and no save of hpcdask's: name another folder")
    if not overwrite:
        raise UsageError(f"{folder} is there: overwrite=True replaces it, or name another folder")
    read_note(folder)
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{folder}: you may not write in it: name another folder")


class NewSave:
    """A save that is being written, beside its `folder`; `data` is where the data go.

    Raises UsageError, before anything is written, if it cannot be there.
    """

    def __init__(self, folder: Path, *, overwrite: bool) -> None:
        check_target(folder, overwrite=overwrite)
        self.folder = folder
        self._remove_dead()
        self._path = folder.parent / f".{folder.name}.saving-{secrets.token_hex(6)}"
        self.data = self._path / "new" / f"data-{secrets.token_hex(6)}"
        self._path.mkdir()
        (self._path / private.OWNER).write_text(owner_text())
        self.data.mkdir(parents=True)

    def _remove_dead(self) -> None:
        """Remove what saves into the same folder left that were killed."""
        for path in _unfinished(self.folder):
            try:
                said = private.read(str(path / private.OWNER))
                host, space, pid, _ = said.split(" ")
            except (OSError, ValueError):
                continue  # it has just begun or ended, or is another user's
            if [host, space] != owner_text().split(" ")[:2]:
                say(f"a save from {host} is unfinished in {path}: remove it if that has ended")
            elif said != owner_text(int(pid)):
                private.remove(str(path), said)

    def finish(self, kind: str, content: dict[str, Any]) -> None:
        """Put it in its place, or in that of an earlier save, which goes."""
        new = self._path / "new"
        (new / NOTE).write_text(Note(kind, self.data.name, content).to_json())
        if not os.path.lexists(self.folder):
            new.rename(self.folder)
        else:
            old = read_note(self.folder)
            self.data.rename(self.folder / self.data.name)
            os.replace(new / NOTE, self.folder / NOTE)
            # who reads it yet sees at once that it is gone, and not chunk by chunk
            (self.folder / old.data).rename(self._path / "old")

    def discard(self) -> None:
        """Remove what was written beside the folder."""
        shutil.rmtree(self._path, ignore_errors=True)
