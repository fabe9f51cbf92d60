"""Folder of a cluster on disk: script, submissions, logs, keys, and its owner.

::

    BASE/CLUSTER/              0700, on a file system that the nodes share; see `base_path`
        cluster.json           queue, and the process that holds the cluster
        report.json            what the cluster tells others; see `ClusterReport`
        script.sh              of every job; script-GROUP.sh of those of a group
        jobs                   ids and times of the jobs that submissions brought
        submitting-GROUP       while a submission has brought no job (yet)
        logs/                  JOBID.log, and queue-JOBID.log of the queue itself
        keys                   while the cluster lives
        watchdog.log           what was done after the notebook's death

Ids are recorded right after a submission. Those that a crash keeps from being recorded are
found by the tag, which is on each job before it exists.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hpcdask.errors import UsageError
from hpcdask.process import home_folder, owner_lives, owner_text
from hpcdask.security.private import make_folders, others_may_write, refuse_open, write_private

from .state import ClusterReport

#: How the tags of batch jobs begin after ``hpcdask:``. No cluster's name has two dashes.
BATCH = "submit-"


class Owner(str):
    """Process that holds a cluster or run, as `owner_text` names it."""

    @property
    def host(self) -> str:
        return self.split()[0]

    @property
    def pid(self) -> int:
        return int(self.split()[2])

    def lives(self) -> bool | None:
        """Return whether it still runs; None if that cannot be seen from here."""
        return owner_lives(self)


@dataclass(eq=False)
class ClusterFolder:
    """The folder of one cluster, whose id is the folder's name; `owner` holds the cluster.

    `created` and `ended` are unix times. `ended` is None until the cluster's jobs are known to be
    gone. The credentials lie in `keys` while it lives.
    """

    path: Path
    queue: str
    owner: Owner
    created: float
    ended: float | None = None

    def __post_init__(self) -> None:
        self.name = self.path.name
        self.keys = self.path / "keys"
        self.tag = f"hpcdask:{self.name}"  # what its jobs carry

    @classmethod
    def create(
        cls, name: str, queue: str, base: str | os.PathLike[str] | None = None
    ) -> ClusterFolder:
        """Make the folder of a cluster that this process holds.

        A missing base is made. A folder in another than the usual base gets a link there.
        Raises UsageError if the base belongs to another user, others may write in it, or it cannot
        be made.
        """
        parent = base_path(base)
        path = parent / name
        try:
            make_owned(parent)
            path.mkdir(0o700)
            (path / "logs").mkdir(0o700)
            folder = cls(path, queue, Owner(owner_text()), time.time())
            folder._write()
        except OSError as error:
            raise UsageError(
                f"the cluster's folder {path} cannot be made: {error.strerror}. Name another place "
                f"that the nodes share: shared_temp_directory=…"
            ) from None
        if parent != (usual := base_path()):
            with contextlib.suppress(OSError):
                make_folders(str(usual))
                (usual / name).symlink_to(path)
        return folder

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> ClusterFolder:
        """Open the folder of a cluster, of this or another process.

        Raises UsageError if it is no cluster's folder, or belongs to, or is open to, somebody else.
        """
        path = Path(os.path.abspath(path))
        try:
            status = path.lstat()
            known = json.loads((path / "cluster.json").read_text())
            known["owner"] = Owner(known["owner"])
            folder = cls(path, **known)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(f"{path} is not the folder of a cluster: {error}") from None
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
            raise UsageError(f"{path} is not a folder of yours")
        if status.st_mode & 0o077:
            raise UsageError(f"{path} is open to others: chmod 700 {path}, if you trust it")
        return folder

    def _write(self) -> None:
        names = ("queue", "owner", "created", "ended")
        self.write("cluster.json", json.dumps({name: getattr(self, name) for name in names}))

    def write(self, name: str, text: str, *, mode: int = 0o600) -> Path:
        """Write a file that appears whole or not at all, for this user alone; return its path."""
        path = self.path / name
        write_private(str(path), text)
        path.chmod(mode)
        return path

    def take_over(self) -> None:
        """Make this process the one that holds the cluster."""
        self.owner = Owner(owner_text())
        self._write()

    def write_report(self, report: ClusterReport) -> None:
        """Publish the state of the cluster to other processes."""
        self.write("report.json", json.dumps(report.to_json()))

    def report(self) -> ClusterReport:
        """Return what the cluster told last; an empty report if that cannot be read."""
        try:
            return ClusterReport.from_json(json.loads((self.path / "report.json").read_text()))
        except (OSError, ValueError, TypeError, AttributeError):
            return ClusterReport()

    def script(self, group: str = "") -> Path:
        """Return the path of the script of a group's jobs."""
        return self.path / (f"script-{group}.sh" if group else "script.sh")

    def write_script(self, text: str, group: str = "") -> None:
        """Keep the script of all submissions."""
        self.write(self.script(group).name, text, mode=0o700)

    def begin_submission(self, group: str = "") -> Path:
        """Note that a submission begins, until it has brought jobs; return its script."""
        # with some bytes, so that a full disk is noticed before there is a job
        self.write(f"submitting-{group}", f"{time.time()}\n")
        return self.script(group)

    def record(self, ids: Iterable[str], group: str = "") -> None:
        """Record jobs that a submission brought, now."""
        lines = "".join(f"{job_id} {time.time()}\n" for job_id in ids)
        path = self.path / "jobs"
        with open(path, "a", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            file.write(lines)
        (self.path / f"submitting-{group}").unlink(missing_ok=True)

    def submitted(self) -> dict[str, float]:
        """Return the unix times at which the recorded jobs were submitted, the oldest first."""
        with contextlib.suppress(OSError):
            lines = map(str.split, (self.path / "jobs").read_text().splitlines())
            return {words[0]: float(words[1]) for words in lines if len(words) == 2}
        return {}

    def awaits_jobs(self, within_s: float) -> bool:
        """Return whether a submission that has brought no job (yet) began so short a time ago."""
        begun = [path.stat().st_mtime for path in self.path.glob("submitting-*")]
        return time.time() - max(begun, default=0) < within_s

    def logs_in(self, path: str | os.PathLike[str]) -> None:
        """Put the logs into another folder, made if missing; call it before the first job.

        Raises UsageError if it belongs to another user, others may write in it, or it cannot be
        made.
        """
        target = base_path(path)
        try:
            make_owned(target)
            (self.path / "logs").rmdir()
            (self.path / "logs").symlink_to(target)
        except OSError as error:
            raise UsageError(f"log_directory: {target} cannot be used: {error.strerror}") from None

    def log_path(self, job_id: str) -> Path:
        """Return the path of the log that the job itself writes."""
        return self.path / "logs" / f"{job_id}.log"

    def logs_of(self, ids: Iterable[str]) -> dict[str, list[Path]]:
        """Return the logs that exist of each job: the queue's own first, then what the job wrote.

        The queue's is named as well as the queue can: numbers count, punctuation does not.
        """
        found: dict[str, list[Path]] = {job_id: [] for job_id in ids}
        by_words = {tuple(_words(job_id)): job_id for job_id in found}
        logs = self.path / "logs"
        paths = sorted(logs.iterdir()) if logs.is_dir() else []
        for path in paths:
            if path.match("queue-*.log"):
                words = _words(path.stem)[1:]
                heads = (tuple(words[:count]) for count in range(len(words), 0, -1))
                if job_id := next(filter(None, map(by_words.get, heads)), None):
                    found[job_id].append(path)
        for job_id in found.keys() & {path.stem for path in paths if path.suffix == ".log"}:
            found[job_id].append(self.log_path(job_id))
        return found

    def tails(self, ids: Iterable[str], lines: int | None = None) -> dict[str, list[str]]:
        """Return the last lines of each job's logs, or all; none where there are no logs (yet)."""
        found = {}
        for job_id, paths in self.logs_of(ids).items():
            end: deque[str] = deque(maxlen=lines)
            for path in paths:
                with contextlib.suppress(OSError), path.open(errors="replace") as file:
                    end.extend(line.rstrip("\n") for line in file)
            found[job_id] = list(end)
        return found

    def remove_keys(self) -> None:
        """Remove the credentials: nobody can join the cluster any more."""
        self.keys.unlink(missing_ok=True)

    def mark_ended(self) -> None:
        """Note that the cluster is over and its jobs are gone; the keys go, too."""
        self.remove_keys()
        self.ended = time.time()
        with contextlib.suppress(FileNotFoundError):  # the user removed the folder
            self._write()

    def lives(self) -> bool | None:
        """Return whether the process that holds the cluster runs; None: not visible here."""
        return False if self.ended is not None else self.owner.lives()


def new_name(name: str) -> str:
    """Return a new id, with no dot and one dash: see the tags of Moab and of hpcdask submit."""
    return re.sub(r"[^A-Za-z0-9_]+", "_", f"{name}")[:40] + f"-{os.urandom(3).hex()}"


def base_path(base: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of the clusters' folders, absolute; by default that of `home_folder`.

    A site's configuration may name each user's own, such as ``/scratch/hpcdask/$USER``. Raises
    UsageError for a variable that is not set.
    """
    path = os.path.abspath(os.path.expanduser(os.path.expandvars(base or home_folder())))
    if unset := re.search(r"\$\w+|\$\{\w+\}", path):
        raise UsageError(f"{unset[0]} is not set here, in {path}: set it, or name another folder")
    return Path(path)


def list_clusters(base: str | os.PathLike[str] | None = None) -> list[ClusterFolder]:
    """Return all clusters of this user in a base, oldest first; other folders are skipped.

    The usual base has links to those in others.
    """
    found = []
    for path in base_path(base).glob("*"):
        with contextlib.suppress(UsageError, OSError):
            target = path.readlink() if path.is_symlink() else path
            if target.name == path.name:
                found.append(ClusterFolder.open(target))
    return sorted(found, key=lambda folder: folder.created)


def prune(base: str | os.PathLike[str] | None = None) -> list[str]:
    """Remove the folders of clusters that ended 30 days ago or earlier; return their names."""
    removed = []
    for folder in list_clusters(base):
        if folder.ended is not None and folder.ended < time.time() - 30 * 86400:
            shutil.rmtree(folder.path, ignore_errors=True)
            removed.append(folder.name)
            if (link := base_path() / folder.name).is_symlink():
                link.unlink(missing_ok=True)
    return removed


def make_owned(path: Path) -> None:
    """Make a folder if it is missing. Raises OSError, too.

    Raises UsageError for one in which others could replace files: it belongs to another user, or
    others may write in it.
    """
    make_folders(str(path))
    status = path.stat()
    yours = f"name one of yours, such as {path}/$USER"
    if status.st_uid != os.geteuid():
        raise UsageError(f"{path} belongs to another user (uid {status.st_uid}): {yours}")
    if others_may_write(status):
        raise UsageError(f"others may write in {path}: chmod go-w {path}, or {yours}")
    refuse_open(str(path))


def _words(text: str) -> list[str]:
    return re.findall(r"[0-9A-Za-z]+", text)
