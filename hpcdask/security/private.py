"""Files and folders that only this user can have made or changed, also where all may write."""

from __future__ import annotations

import contextlib
import errno
import os
import stat

#: The file in a rank's scratch folder that says whose it is.
OWNER = "owner"
#: Names of keys and of a note, also while they are written.
KEYS = r"(ca|(scheduler|worker|client)\.(cert|key))\.pem(\.[0-9a-f]{12})?"
NOTE = r"note\.json(\.[0-9a-f]{12})?"


class NotPrivate(PermissionError):
    """Error: another user made the file or may change it, or it is no plain file."""


def others_may_write(status: os.stat_result) -> bool:
    """Return whether users beside its owner may write a file, or in a folder.

    The group's bits count where the file is this user's, and the group is not.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    ours = status.st_uid == os.geteuid()
    return bool(ours and status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid))


def _is_private_group(group: int) -> bool:
    """Return whether a group is the user's own, as many sites give: its bits mean nothing then."""
    import grp
    import pwd

    try:
        found, user = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
        return found.gr_name == user and set(found.gr_mem) <= {user}
    except KeyError:
        return False


def refuse_open(path: str) -> None:
    """Raise `NotPrivate` if any user may rename `path`, or a folder on the way to it."""
    at = os.path.realpath(path)
    while True:
        mode = os.stat(at).st_mode
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            text = f"any user may rename what lies in {at} (chmod +t {at} mends it)"
            raise NotPrivate(errno.EPERM, text, path)
        if at == os.path.dirname(at):
            return
        at = os.path.dirname(at)


def read(path: str) -> str:
    """Return the text of a plain file of this user, which nobody else may write.

    Raises NotPrivate if it is something else, and OSError or UnicodeDecodeError if it cannot be
    read.
    """
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait
    with open(file, "rb") as stream:
        _check(os.fstat(file), path)
        return stream.read().decode()


def _check(status: os.stat_result, path: str) -> None:
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "is no plain file"
    elif status.st_uid != os.geteuid():
        why = f"belongs to another user (uid {status.st_uid})"
    elif others_may_write(status):
        why = f"may be changed by others: chmod go-w {path}, if you trust what it says"
    if why:
        raise NotPrivate(errno.EPERM, why, path)


def check_folder(path: str) -> os.stat_result:
    """Return the status of a folder of this user; a link is none. Raises OSError."""
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
    if status.st_uid != os.geteuid():
        raise NotPrivate(errno.EPERM, f"belongs to another user (uid {status.st_uid})", path)
    return status


def make_folder(path: str) -> None:
    """Make a folder of this user if it is missing, and its mode 0700. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    check_folder(path)
    os.chmod(path, 0o700)


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, all 0700; those that exist stay as they are."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def node_folder(name: str) -> str:
    """Make a folder for all processes of this user on this node, 0700. Raises OSError.

    It is in /tmp, since TMPDIR is often each job's own.
    """
    path = f"/tmp/hpcdask-{name}-{os.geteuid()}"
    make_folder(path)
    return path


def open_lock(path: str) -> int:
    """Return a descriptor of a file to lock, 0600, made if it is missing. Raises OSError."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    try:
        _check(os.fstat(file), path)
    except BaseException:
        os.close(file)
        raise
    return file


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


def remove(path: str, owner: str = "") -> None:
    """Remove a file, or a folder of this user as far as hpcdask made it; leave what cannot go.

    A folder goes with all that it holds if its file `OWNER` says `owner`. Without that file, only
    keys and notes go: the user may have put another folder in its place.
    """
    import re
    import shutil

    with contextlib.suppress(OSError, UnicodeDecodeError):
        if os.path.islink(path) or not os.path.isdir(path):
            os.unlink(path)
            return
        check_folder(path)
        names = os.listdir(path)
        if OWNER in names:
            if read(os.path.join(path, OWNER)) not in (owner, ""):  # its maker may be killed early
                return
            for name in names:  # the file `OWNER` last: this process may be killed meanwhile
                shutil.rmtree(os.path.join(path, name), ignore_errors=True)
            shutil.rmtree(path, ignore_errors=True)
            return
        for name in names:
            if re.fullmatch(f"{KEYS}|{NOTE}", name):
                os.unlink(os.path.join(path, name))
        os.rmdir(path)
