"""What is said of an error that came through processes."""

from __future__ import annotations

from hpcdask.errors import DeviceError, root_cause


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def test_the_first_cause_is_told():
    error = caused(RuntimeError("Nanny failed to start."), OSError("no space left"))
    assert root_cause(error) == "OSError: no space left"


def test_an_error_of_ours_is_told_rather_than_what_it_came_from():
    """RMM's words were told, and not who is on the GPU."""
    ours = caused(DeviceError("no room for an RMM pool"), MemoryError("std::bad_alloc"))
    assert root_cause(caused(RuntimeError("Nanny failed"), ours)) == (
        "DeviceError: no room for an RMM pool"
    )
