"""Strangers of tests: another Unix user, which needs root."""

from __future__ import annotations

import os
import shutil
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

UID = 54321
root_only = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be another user, too")


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """A folder without sticky bit in which everybody may do everything, in one that is safe."""
    outer = tempfile.mkdtemp(prefix="hpcdask-test-", dir="/tmp")
    os.chmod(outer, 0o755)
    inner = Path(outer) / "open"
    inner.mkdir()
    inner.chmod(0o777)
    yield inner
    shutil.rmtree(outer)


def as_stranger(act: Callable[[], object]) -> None:
    """Call a function in a process of another user; it must not raise."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(UID)
            os.setuid(UID)
            os.umask(0o022)
            act()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0


#: What other modules' names are put on: it tells, and hides what is installed.
MODULE = """
import os
with open(os.environ["OWNED"], "a") as file:
    file.write(__name__ + "\\n")
raise ImportError
"""


def put_modules(folder: Path, *names: str) -> None:
    """Put packages there that write to the file which the variable OWNED names."""
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(MODULE)
