"""Rendezvous: the ranks learn where rank 0 is.

Rank 0 publishes one small note: its address, a nonce, and the credentials. Everything else goes
over the link (`hpcdask.runner.link`). The note is a file, 0600, renamed into place, in a 0700
folder that is named after the launch: the launcher's id, the job's id and its restart count, so
that an earlier life of a requeued job cannot be mistaken for this one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from dataclasses import dataclass, field

import dask.config

from hpcdask.bootstrap.ranks import Rank
from hpcdask.errors import LaunchError
from hpcdask.security import private
from hpcdask.security.credentials import Credentials
from hpcdask.spec.records import Record

#: The file with the note.
NOTE = "note.json"


@dataclass(frozen=True)
class RendezvousInfo(Record):
    """Rank 0's note: where it listens, and what it takes to be let in.

    `host` is its node's name. A rank that cannot reach the address may try `others`.
    """

    address: str
    port: int
    host: str
    nonce: str
    credentials: Credentials
    others: list[str] = field(default_factory=list)


class Rendezvous:
    """Rank 0's note in a private folder.

    For the ranks of one node the folder is in the temporary folder. With `shared`, ranks of other
    nodes must see it: then it is in the home folder, or in the folder that Dask's configuration
    names as ``hpcdask.shared-directory``. `launch_id` is the same for all ranks of this launch and
    for no other.
    """

    def __init__(self, launch_id: str, *, shared: bool) -> None:
        base = tempfile.gettempdir()
        if shared:
            base = dask.config.get("hpcdask.shared-directory", None) or os.path.expanduser("~")
        name = f".hpcdask-{os.geteuid()}-{hashlib.sha256(launch_id.encode()).hexdigest()[:16]}"
        self.folder = os.path.join(os.path.abspath(base), name)
        self._launch_id = launch_id

    @classmethod
    def of(cls, rank: Rank) -> Rendezvous:
        """Return the rendezvous of a rank's launch."""
        return cls(rank.launch_id, shared=not rank.one_node)

    def publish(self, info: RendezvousInfo) -> None:
        """Write the note, over that of a life that left one."""
        text = json.dumps({**info.to_json(), "launch": self._launch_id})
        try:
            private.make_folder(self.folder)
            private.write_private(os.path.join(self.folder, NOTE), text)
        except OSError as error:
            raise LaunchError(
                f"the ranks cannot meet in {self.folder}: {error.strerror}. It must be a place "
                f"that all nodes share and you can write: set TMPDIR or HOME, or "
                f"hpcdask.shared-directory in Dask's configuration"
            ) from None

    def fetch(self) -> RendezvousInfo | None:
        """Return the note as it stands: at an older life's address nobody answers."""
        with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # ESTALE, too
            os.listdir(os.path.dirname(self.folder))  # makes NFS look again
            found = dict(json.loads(private.read(os.path.join(self.folder, NOTE))))
            if found.pop("launch", None) == self._launch_id:
                return RendezvousInfo.from_json(found)
        return None

    def close(self) -> None:
        """Remove the folder."""
        private.remove(self.folder)
