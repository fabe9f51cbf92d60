"""What is said of an error that came through processes."""

from __future__ import annotations

import copyreg
import importlib
import inspect
import pickle
import pkgutil
from typing import Any

import pytest

import hpcdask
from hpcdask.errors import DeviceError, HpcdaskError, root_cause


def classes(kind: type[HpcdaskError]) -> list[type[HpcdaskError]]:
    return [kind, *(one for sub in kind.__subclasses__() for one in classes(sub))]


def instance(kind: type[HpcdaskError]) -> HpcdaskError:
    """Return an error of a class, with whatever its constructor wants."""
    if not inspect.isfunction(kind.__init__):
        return kind("what, where, what next")
    parameters = inspect.signature(kind).parameters.values()
    given: dict[str, Any] = {
        one.name: True if one.annotation == "bool" else f"the {one.name}" for one in parameters
    }
    return kind(**given)


def test_every_error_survives_pickling(monkeypatch: pytest.MonkeyPatch):
    """Regression: the advice of MissingExtra became a TypeError on its way to the client."""
    for module in pkgutil.walk_packages(hpcdask.__path__, "hpcdask."):
        if not module.name.endswith(("__main__", "comm.ucx", "upstream.ucxx")):
            importlib.import_module(module.name)
    kinds = classes(HpcdaskError)
    assert {"MissingExtra", "GangError", "Refused", "JobsFailed"} <= {one.__name__ for one in kinds}
    for kind in kinds:
        monkeypatch.delitem(copyreg.dispatch_table, kind, raising=False)  # another package's help
        error = instance(kind)
        error.add_note("a note")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert (str(again), again.args, vars(again)) == (str(error), error.args, vars(error))


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_the_first_cause_is_told_but_an_error_of_ours_rather():
    """Regression: RMM's words were told, and not who is on the GPU."""
    error = caused(RuntimeError("Nanny failed to start."), OSError("no space left"))
    assert root_cause(error) == "OSError: no space left"
    ours = caused(DeviceError("no room for an RMM pool"), MemoryError("std::bad_alloc"))
    found = root_cause(caused(RuntimeError("Nanny failed"), ours))
    assert found == "DeviceError: no room for an RMM pool"
