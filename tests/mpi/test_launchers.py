"""The two MPIs that the tests of real launches stand on."""

import sys

import psutil
import pytest

from launching import Launcher, wait_for

pytestmark = pytest.mark.mpi

HELLO = """
from mpi4py import MPI
w = MPI.COMM_WORLD
print(f"{w.rank}/{w.size} {MPI.Get_library_version().split()[0]}\\n", end="", flush=True)
"""


@pytest.mark.parametrize(("fixture", "library"), [("openmpi", "Open"), ("mpich", "MPICH")])
def test_mpi4py_loads_the_launcher_s_own_mpi(request, fixture, library):
    launcher: Launcher = request.getfixturevalue(fixture)
    result = launcher.run(2, "python", "-c", HELLO)
    assert result.code == 0, result.err
    lines = sorted(result.out.split("\n"))[1:]
    assert [line.split()[0] for line in lines] == ["0/2", "1/2"]
    assert all(line.split()[1].startswith(library) for line in lines)


def test_environment_stdin_and_exit_code_pass_through(mpi):
    # Not read(): Open MPI 5 forwards what mpirun reads, but not its end
    program = "import os, sys; print(os.environ['X'], sys.stdin.readline()); sys.exit(3)"
    result = mpi.run(1, sys.executable, "-c", program, env={"X": "value"}, stdin="typed\n")
    assert (result.code, result.out) == (3, "value typed\n\n")


def test_a_launch_that_hangs_fails_with_its_output_and_is_ended(openmpi):
    program = "import time; print('started', flush=True); time.sleep(600)"
    openmpi.env["PYTHONFAULTHANDLER"] = "1"
    with pytest.raises(pytest.fail.Exception, match=r"(?s)started.*line 1 in <module>"):
        openmpi.run(2, sys.executable, "-c", program, timeout=1)
    wait_for(lambda: not openmpi.leftovers(), 5, "the launch's processes to end")


def test_a_process_left_behind_is_found_whatever_its_session(mpi):
    child = "import time; time.sleep(600)"
    program = (
        "import subprocess, sys;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True,"
        " stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)"
    )
    assert mpi.run(1, sys.executable, "-c", program).code == 0
    (left,) = wait_for(lambda: [p for p in mpi.leftovers() if child in p.cmdline()], 5, "child")
    with pytest.raises(pytest.fail.Exception, match=str(left.pid)):
        mpi.close(timeout=0.2)
    wait_for(lambda: not psutil.pid_exists(left.pid) or left.status() == "zombie", 5, "its end")
