"""Files and folders that only this user can have made or changed, also where all may write."""

from __future__ import annotations

import contextlib
import errno
import grp
import os
import pwd
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

#: The file in a rank's scratch folder that says whose it is.
OWNER = "owner"


class NotPrivate(PermissionError):
    """Error: another user made the file or may change it, or it is no plain file."""


def others_may_write(status: os.stat_result) -> bool:
    """Return whether users beside its owner may write a file, or in a folder."""
    ours = status.st_uid == os.geteuid()  # the administrators' may have any group
    by_group = ours and status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid)
    return bool(status.st_mode & stat.S_IWOTH or by_group)


def _is_private_group(group: int) -> bool:
    """Return whether a group is the user's own, as many sites give, and has no other members."""
    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False
    return found.gr_name == user and set(found.gr_mem) <= {user}


def refuse_open(path: str) -> None:
    """Raise `NotPrivate` if any user may rename `path`, or a folder on the way to it."""
    lowest = Path(os.path.realpath(path))
    for at in (lowest, *lowest.parents):
        mode = at.stat().st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"any user may rename what lies in {at} (chmod +t {at} mends it)"
            raise NotPrivate(errno.EPERM, text, path)


def _open(path: str, flags: int) -> int:
    """Open a plain file of this user that nobody else may write; raise NotPrivate for others."""
    file = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)  # a pipe would wait
    status = os.fstat(file)
    if not stat.S_ISREG(status.st_mode):
        reason = "is no plain file"
    elif status.st_uid != os.geteuid():
        reason = f"belongs to another user (uid {status.st_uid})"
    elif others_may_write(status):
        reason = f"may be changed by others: chmod go-w {path}, if you trust what it says"
    else:
        return file
    os.close(file)
    raise NotPrivate(errno.EPERM, reason, path)


def read(path: str) -> str:
    """Return the text of a plain file that only this user may write; else raise NotPrivate."""
    with open(_open(path, os.O_RDONLY), "rb") as stream:
        return stream.read().decode()


def open_lock(path: str) -> int:
    """Return a descriptor of a file to lock, 0600, made if it is missing. Raises OSError."""
    return _open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW)


def write_private(path: str, text: str) -> None:
    """Write a 0600 file that appears whole or not at all."""
    temporary = f"{path}.{os.urandom(6).hex()}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(file, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def make_folder(path: str) -> None:
    """Make a folder of this user if it is missing, and its mode 0700. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid != os.geteuid():
        raise NotPrivate(errno.EPERM, f"belongs to another user (uid {status.st_uid})", path)
    os.chmod(path, 0o700)


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, all 0700; those that exist stay as they are."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def make_owned_folder(base: str, owner: str, announce: Callable[[str], None]) -> str:
    """Make a folder of a process in `base`, 0700, whose path `announce` gets before it exists."""
    folder = os.path.join(base, f"hpcdask-{os.getuid()}-{os.urandom(8).hex()}")
    announce(folder)
    os.mkdir(folder, 0o700)
    mark = os.open(os.path.join(folder, OWNER), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(mark, "w") as file:
        file.write(owner)
    return folder


def node_folder(name: str) -> str:
    path = f"/tmp/hpcdask-{name}-{os.geteuid()}"  # TMPDIR is often each job's own
    make_folder(path)
    return path


def remove(path: str, owner: str = "") -> None:
    """Remove a file, a folder that `owner` has marked (`OWNER`), or one with a note only."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
        elif os.stat(path).st_uid == os.geteuid():
            _remove_folder(path, owner)


def _remove_folder(path: str, owner: str) -> None:
    inside = [entry.path for entry in os.scandir(path)]
    if (mark := os.path.join(path, OWNER)) not in inside:
        for file in inside:
            if os.path.basename(file).startswith("note.json"):  # of ranks that meet
                os.unlink(file)
        os.rmdir(path)
    elif read(mark) in (owner, ""):  # its maker may be killed before it writes
        for folder in inside:  # the mark last: this process may be killed meanwhile
            shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(path, ignore_errors=True)
