"""Files and folders that only this user can have made or changed.

Others may write where they lie, as in /tmp. So what is opened here is looked at by its descriptor,
after it was opened: nobody can put something else in its place between the look and the use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator

#: More than any file has that is read here.
LIMIT = 1 << 20
#: The file in a rank's scratch folder that says whose it is.
OWNER = "owner"
#: Names in the other folders that are made here, also while they are written.
KNOWN = r"(note\.json|ca\.pem|(scheduler|worker|client)\.(cert|key)\.pem|owner)(\.[0-9a-f]{12})?"


class NotPrivate(PermissionError):
    """Another user made it or may change it, or it is no plain file. ``strerror`` says which."""


def others_may_write(status: os.stat_result) -> bool:
    """Whether users beside its owner may write a file, or in a folder.

    The group's bits count where the file is this user's, and the group is not.
    """
    if status.st_mode & stat.S_IWOTH:
        return True
    ours = status.st_uid == os.geteuid()
    return bool(ours and status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid))


def _is_private_group(group: int) -> bool:
    """Whether it is the user's own, which many sites give to each: then its bits mean nothing."""
    import grp
    import pwd

    try:
        return grp.getgrgid(group).gr_name == pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return False


def open_to_all(path: str) -> str | None:
    """The folder on the way to `path`, or itself, in which any user may rename what others own."""
    for start in {os.path.abspath(path), os.path.realpath(path)}:
        at = start
        while True:
            mode = os.stat(at).st_mode
            if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
                return at
            if at == os.path.dirname(at):
                break
            at = os.path.dirname(at)
    return None


def foreign_link(path: str) -> str | None:
    """The link on the way to `path`, or itself, that another user may have put there.

    As for the kernel (``fs.protected_symlinks``), that is in a folder where any user may write, if
    neither this user nor the folder's owner has the link.
    """
    at = os.path.abspath(path)
    while (above := os.path.dirname(at)) != at:
        one, folder = os.lstat(at), os.stat(above)
        trusted = one.st_uid in (os.geteuid(), folder.st_uid)
        if stat.S_ISLNK(one.st_mode) and folder.st_mode & stat.S_IWOTH and not trusted:
            return at
        at = above
    return None


def refuse_open(path: str) -> None:
    """Raise `NotPrivate` for a folder in whose place any user may put something else."""
    if found := foreign_link(path):
        raise NotPrivate(errno.EPERM, f"{found} is a link of another user", path)
    if found := open_to_all(path):
        raise NotPrivate(
            errno.EPERM,
            f"any user may rename what lies in {found} (chmod +t {found} mends it)",
            path,
        )


def read(path: str, *, dir_fd: int | None = None) -> str:
    """The text of a plain file of this user, which nobody else may write.

    In a folder given by its descriptor, a link is refused. Raises NotPrivate if the path is
    something else, and OSError or UnicodeDecodeError if it cannot be read.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY  # a pipe would wait
    file = os.open(path, flags | (0 if dir_fd is None else os.O_NOFOLLOW), dir_fd=dir_fd)
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        _check(status, path)
        if status.st_size > LIMIT:
            raise NotPrivate(errno.EFBIG, f"has {status.st_size:,} bytes, {LIMIT:,} at most", path)
        return stream.read(LIMIT).decode()


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


def open_folder(path: str) -> int:
    """A descriptor of a folder of this user; a link is none. Raises OSError."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    owner = os.fstat(folder).st_uid
    if owner != os.geteuid():
        os.close(folder)
        raise NotPrivate(errno.EPERM, f"belongs to another user (uid {owner})", path)
    return folder


@contextlib.contextmanager
def closing(descriptor: int) -> Iterator[int]:
    """Close a descriptor at the end of the block."""
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def make_folder(path: str) -> int:
    """A descriptor of a folder of this user, 0700, made if it is missing. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    folder = open_folder(path)
    os.fchmod(folder, 0o700)  # whatever the umask or an ACL says
    return folder


def make_folders(path: str) -> None:
    """Make a folder and its missing parents, all 0700; those that exist stay as they are."""
    if not os.path.isdir(path):
        make_folders(os.path.dirname(path))
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)


def node_folder(name: str) -> str:
    """A folder for all processes of this user on this node, 0700.

    In /tmp, since TMPDIR is often each job's own, and in the home folder where another user has
    taken the name. Raises OSError.
    """
    path = f"/tmp/hpcdask-{name}-{os.geteuid()}"
    try:
        os.close(make_folder(path))
    except OSError:
        path = os.path.expanduser(f"~/.hpcdask/{name}-{os.uname().nodename}")
        make_folders(os.path.dirname(path))
        os.close(make_folder(path))
    return path


def open_lock(path: str) -> int:
    """A descriptor of a file to lock, 0600, made if it is missing.

    A file that has another name too may be one that somebody has linked here. Raises OSError.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    file = os.open(path, flags, 0o600)
    try:
        status = os.fstat(file)
        _check(status, path)
        if status.st_nlink != 1:
            raise NotPrivate(errno.EPERM, "has another name too", path)
    except BaseException:
        os.close(file)
        raise
    return file


def write_private(path: str, text: str, *, dir_fd: int | None = None) -> None:
    """Write a 0600 file that appears whole or not at all."""
    temporary = f"{path}.{os.urandom(6).hex()}"
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=dir_fd)
    try:
        with open(file, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except BaseException:
        os.unlink(temporary, dir_fd=dir_fd)
        raise


def remove(path: str, owner: str = "") -> None:
    """Remove a file or folder of this user, as far as it is one that hpcdask made.

    Another folder of the same user may have been put in its place. So a folder goes with all that
    it holds only if its file `OWNER` says `owner`; else only files of `KNOWN` names do.
    What cannot be removed stays.
    """
    with contextlib.suppress(OSError):
        at = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        with closing(at):
            _remove_in(at, os.path.basename(path), owner)


def _remove_in(at: int, name: str, owner: str) -> None:
    import re
    import shutil

    status = os.stat(name, dir_fd=at, follow_symlinks=False)
    if status.st_uid != os.geteuid():
        return
    if not stat.S_ISDIR(status.st_mode):
        os.unlink(name, dir_fd=at)
        return
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    with closing(os.open(name, flags, dir_fd=at)) as folder:
        if os.fstat(folder).st_uid != os.geteuid():
            return
        said = None
        with contextlib.suppress(OSError, UnicodeDecodeError):
            said = read(OWNER, dir_fd=folder)
            if not (owner and owner.startswith(said)):  # its process may have died while it wrote
                return
        whole = said is not None and said == owner
        for entry in sorted(os.listdir(folder), key=OWNER.__eq__):  # what says so goes last
            if not whole and not re.fullmatch(KNOWN, entry):
                continue
            with contextlib.suppress(OSError):
                os.unlink(entry, dir_fd=folder)
                continue
            if whole:
                shutil.rmtree(entry, ignore_errors=True, dir_fd=folder)
    os.rmdir(name, dir_fd=at)
