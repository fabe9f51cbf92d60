"""The user's program, which runs as ``python script.py`` does."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from dataclasses import dataclass, field

from hpcdask.bootstrap.environment import wants_folders
from hpcdask.errors import UsageError


@dataclass(frozen=True)
class Program:
    """Program to run: a script, a folder or zip with ``__main__.py``, or a module.

    `target` is a path, or with `is_module` (``-m``) the dotted name.
    """

    target: str
    arguments: list[str] = field(default_factory=list)
    is_module: bool = False

    @property
    def name(self) -> str:
        """Return the program's name: ``/path/to/script.py``, ``-m package.module``."""
        return f"-m {self.target}" if self.is_module else os.path.abspath(self.target)

    def check(self) -> None:
        """Find the program, before anything is started.

        Raises UsageError if it does not exist or cannot be read.
        """
        if self.is_module:
            name = self.target.partition(".")[0]  # importing a package is for its own process
            if not name or importlib.util.find_spec(name) is None:
                raise UsageError(
                    f"there is no module {name or self.target} in this environment: check its "
                    f"name, or install it beside hpcdask ({sys.executable})"
                )
            return
        if not os.path.exists(self.target):
            raise UsageError(
                f"the script {self.target} does not exist (looked in {os.getcwd()}). "
                f"Check the path; on several nodes it must be on a shared file system"
            )
        if not os.access(self.target, os.R_OK):
            raise UsageError(f"the script {self.target} cannot be read: check its permissions")

    def _is_script(self) -> bool:
        """Return whether it is no folder and no archive: a pipe is a script, too."""
        import zipfile

        path = self.target
        return not os.path.isdir(path) and not (os.path.isfile(path) and zipfile.is_zipfile(path))

    def set_path(self) -> None:
        """Put first in sys.path what plain python would, which workers need too.

        This process itself has `-P`: what it needs it does not take from there.
        """
        if self.is_module:
            folder = os.getcwd()
        elif self._is_script():
            folder = os.path.dirname(os.path.realpath(self.target))
        else:
            folder = os.path.join(os.getcwd(), self.target)
        if not wants_folders() or folder in (*sys.path[:1], *sys.path[-1:]):
            return
        if self.is_module and os.stat(folder).st_mode & stat.S_IWOTH:
            sys.path.append(folder)  # where anybody may put a module of any name
        else:
            sys.path.insert(0, folder)

    def command(self) -> list[str]:
        """Return the command that runs the program as plain Python does."""
        flags = sys.orig_argv[1:]
        if "-m" in flags:  # of ``python -u -m hpcdask.run``
            flags = flags[: flags.index("-m")]
        module = ["-m"] * self.is_module
        return [sys.executable, *flags, *module, self.target, *self.arguments]
