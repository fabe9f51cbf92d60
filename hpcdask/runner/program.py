"""The user's program: run as ``__main__``, the way plain ``python`` would."""

from __future__ import annotations

import builtins
import importlib.util
import json
import os
import signal
import socket
import stat
import sys
import types
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader, SourcelessFileLoader
from typing import NoReturn

from hpcdask.bootstrap.reexec import restore_environment, wants_folders
from hpcdask.errors import UsageError
from hpcdask.process import PASSED_ON

from .protocol import StartProgram, read


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
            self._check_module()
            return
        if os.path.isdir(self.target):
            if not os.path.exists(os.path.join(self.target, "__main__.py")):
                raise UsageError(
                    f"{self.target} is a folder without __main__.py: name the script in it"
                )
            return
        if not os.path.exists(self.target):
            raise UsageError(
                f"the script {self.target} does not exist (looked in {os.getcwd()}). "
                f"Check the path; on several nodes it must be on a shared file system"
            )
        if not os.access(self.target, os.R_OK):
            raise UsageError(f"the script {self.target} cannot be read: check its permissions")
        if self.target.endswith(".pyc"):
            with open(self.target, "rb") as file:
                if file.read(4) != importlib.util.MAGIC_NUMBER:
                    raise UsageError(
                        f"{self.target} was not compiled by this Python ({sys.executable}): run "
                        f"the script that it was made from"
                    )

    def _check_module(self) -> None:
        """Look for the module without importing its packages, which is for its own process."""
        name, *rest = self.target.split(".")
        if name == "__main__":
            raise UsageError(
                "-m __main__: that is what runs already, and no module to run. Name the module"
            )
        spec = importlib.util.find_spec(name) if name else None
        while rest and spec is not None:
            if spec.submodule_search_locations is None:  # no package: nothing can be in it
                raise UsageError(
                    f"there is no module {self.target}: {name} is not a package. A script, such "
                    f"as {name}.py, is run without -m"
                )
            name = f"{name}.{rest.pop(0)}"
            spec = PathFinder.find_spec(name, spec.submodule_search_locations)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = PathFinder.find_spec(f"{name}.__main__", spec.submodule_search_locations)
        if spec is None:
            self._find_module()  # packages may extend their path when they are imported

    def _find_module(self) -> ModuleSpec:
        name = self.target
        try:
            spec = importlib.util.find_spec(name)
            if spec is not None and spec.submodule_search_locations is not None:
                spec = importlib.util.find_spec(f"{name}.__main__")
        except (ImportError, ValueError):
            spec = None
        if spec is None or spec.loader is None:
            raise UsageError(
                f"there is no module {name} to run in this environment: check its name, or "
                f"install it beside hpcdask ({sys.executable})"
            )
        return spec

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

    def run(self) -> NoReturn:
        """Become the program. Ends by `SystemExit`, with the code that plain Python would give."""
        module = types.ModuleType("__main__")
        module.__dict__["__builtins__"] = builtins
        sys.modules["__main__"] = module
        try:
            code = self._load(module)
            exec(code, module.__dict__)
        except SystemExit:
            raise
        except BaseException as error:
            _report(error)
            sys.exit(130 if isinstance(error, KeyboardInterrupt) else 1)
        sys.exit(0)

    def _load(self, module: types.ModuleType) -> types.CodeType:
        if not self.is_module and self._is_script():
            sys.argv = [self.target, *self.arguments]
            self.set_path()
            module.__file__ = path = os.path.join(os.getcwd(), self.target)
            if path.endswith(".pyc"):
                compiled = SourcelessFileLoader("__main__", path)
                module.__loader__ = compiled
                code = compiled.get_code("__main__")
                assert code is not None
                return code
            loader = SourceFileLoader("__main__", path)
            module.__loader__ = loader
            return compile(loader.get_data(path), path, "exec", dont_inherit=True)
        if self.is_module:
            spec = self._find_module()
        else:
            self.set_path()
            found = PathFinder.find_spec("__main__", sys.path[:1])
            if found is None:
                raise UsageError(f"{self.target} has no __main__.py: name a script")
            spec = found
        sys.argv = [spec.origin or self.target, *self.arguments]
        if not self.is_module:
            sys.argv[0] = self.target
        module.__spec__ = spec
        module.__package__ = spec.parent
        module.__loader__ = spec.loader
        module.__file__ = spec.origin
        assert spec.loader is not None
        code = spec.loader.get_code(spec.name)  # type: ignore[attr-defined]
        assert isinstance(code, types.CodeType)
        return code


def _report(error: BaseException) -> None:
    """Print an uncaught exception as Python does, without the frames above the program."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_frame.f_code.co_filename == __file__:
        traceback = traceback.tb_next
    error.__traceback__ = traceback
    sys.excepthook(type(error), error, traceback)


def await_start(sock: socket.socket) -> None:
    """In the program's process: wait until the cluster is ready; end if that never comes."""
    if not os.isatty(0):
        # The rank passes signals on. On a terminal the process stays in the foreground group,
        # where it may read and gets Ctrl-C itself.
        os.setpgid(0, 0)
    for number in PASSED_ON:  # meant for a program that has not started yet
        signal.signal(number, signal.SIG_IGN)
    order = hear_start(sock)
    sock.close()
    if order is None:
        os._exit(0)
    for number in PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    restore_environment()
    from hpcdask.client.connect import configure_client
    from hpcdask.node.observe import make_observable

    configure_client(order.address, order.file, on_gpus=order.on_gpus)
    make_observable()
    _free_blas(order.threads)


def hear_start(sock: socket.socket) -> StartProgram | None:
    """Wait for the rank to say that the cluster is ready: None when it will never be."""
    with sock.makefile("r") as stream:
        line = stream.readline()
    order = read(json.loads(line)) if line else None
    return order if isinstance(order, StartProgram) else None


def _free_blas(threads: int) -> None:
    """Give BLAS its threads back: NumPy loaded with one, in the rank, for the workers."""
    if "OPENBLAS_NUM_THREADS" not in os.environ and "OMP_NUM_THREADS" not in os.environ:
        import threadpoolctl

        threadpoolctl.threadpool_limits(threads, user_api="blas")
