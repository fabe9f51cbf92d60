"""The template: a single-threaded process that has imported all a worker needs, and forks.

It is multiprocessing's own fork server, started by a fork of the rank instead of a new
Python, so that imports are paid once. distributed's nannies use it through the method
``forkserver`` as they would use Python's. It must be forked before the rank starts an event
loop, a thread, MPI, CUDA or UCX.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

from hpcdask.comm import ucx_hooks
from hpcdask.gpu import devices, driver
from hpcdask.process import FILES, SIGNALS, detach_standard_streams
from hpcdask.upstream import multiprocessing as upstream

if TYPE_CHECKING:
    from hpcdask.spec.specs import WorkerSpec

    from .forking import Forker

#: What the template imports, as far as it is installed; none of it makes a CUDA call. dask-cuda,
#: which has the device's store, takes 0.2 s to import cuda.core.
PRELOAD = ("cuda.core",)


def leave_signals_to_the_rank() -> None:
    """Make this process survive what is sent to the whole job: the rank ends it in good order.

    Handlers rather than SIG_IGN, which programs that a Dask task starts would inherit.
    """
    for number in SIGNALS:
        signal.signal(number, _leave_it)


def _leave_it(number: int, frame: object) -> None:
    """A signal for the rank, not for its parts."""


def start(folder: str, in_child: Callable[[], None], preimport: Sequence[str] = ()) -> None:
    """Fork the template and make it this process's fork server, with its socket in a 0700 folder.

    ``in_child`` is called in it first, to close what belongs to the rank. It imports what is
    installed of ``preimport``, which must make no CUDA call, while the rank goes on.
    """
    import dask.config

    from hpcdask.upstream import distributed

    upstream.check()
    distributed.preload_nothing()
    dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"})
    _start_resource_tracker()
    # A socket's path may have 107 characters, the folder's may have more
    address = f"/proc/{os.getpid()}/fd/{os.open(folder, os.O_PATH | os.O_DIRECTORY)}/template"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    os.chmod(address, 0o600)
    listener.listen()
    alive_read, alive_write = os.pipe()
    key = os.urandom(32) if upstream.wants_key() else b""
    key_option = _in_pipe(key) if key else {}
    pid = os.fork()
    if pid == 0:
        try:
            os.close(alive_write)
            in_child()
            leave_signals_to_the_rank()
            detach_standard_streams(output=False)
            multiprocessing.current_process().name = "template"
            upstream.serve(listener.detach(), alive_read, preimport, **key_option)
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(0)
    listener.close()
    for end in (alive_read, *key_option.values()):
        os.close(end)
    upstream.use_server(address, alive_write, pid, key, _connect)


def _in_pipe(key: bytes) -> dict[str, int]:
    """Where the fork server is to read its key from, as the option of its main function."""
    key_read, key_write = os.pipe()
    os.write(key_write, key)
    os.close(key_write)
    return {"authkey_r": key_read}


def adopt(pid: int, line: socket.socket) -> None:
    """Make this child, which waits in `wait_for_worker`, the next process that is started."""
    _offered.append((pid, line))


def wait_for_worker(line: socket.socket) -> NoReturn:
    """Become what the parent starts next; end where the parent does, or gives the line up."""
    code = 0
    try:
        order = upstream.receive_order(line)
        line.close()
        code = 1
        code = upstream.obey(order)
    except EOFError:
        pass
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(code)


#: Processes that wait to be the next that is started, and the lines to them.
_offered: list[tuple[int, socket.socket]] = []


def _connect(fds: list[int]) -> tuple[int, int]:
    """In the place of multiprocessing's function: a new process, from the template or offered.

    Returns where the process's id and exit code can be read, and where it expects its work.
    """
    while _offered:
        if told := _give_order(*_offered.pop(), fds):
            return told
    return upstream.ask_server(fds)


def _give_order(pid: int, line: socket.socket, fds: list[int]) -> tuple[int, int] | None:
    """Send what the template's child would get; None where the process is gone."""
    status, status_write = os.pipe()
    data_read, data = os.pipe()
    try:
        with line:
            upstream.send_order(line, data_read, fds)
    except OSError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.close(status)
        os.close(data)
        return None
    else:
        upstream.write_number(status_write, pid)
        return status, data
    finally:
        os.close(data_read)
        # only its parent learns how it ends
        threading.Thread(target=_tell_end, args=(pid, status_write), daemon=True).start()


def _tell_end(pid: int, status: int) -> None:
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(OSError):  # nobody wants to know any more
        upstream.write_number(status, code)
    os.close(status)


def stop() -> None:
    """Close this process's hold on the template, which ends when its workers have too."""
    upstream.leave_server()


def _start_resource_tracker() -> None:
    """Start it in a session of its own, and silent.

    Launchers signal the rank's whole process group. MPICH kills it, and the tracker with it, which
    then unlinks no semaphore; Open MPI sends SIGUSR1 to it, which the tracker does not survive.
    """
    read_end, write_end = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    program = (  # MPICH leaves copies of the rank's streams, and waits for their end
        f"import os;os.closerange(3,{read_end});os.closerange({read_end + 1},{FILES});"
        f"from multiprocessing.resource_tracker import main;main({read_end})"
    )
    os.set_inheritable(read_end, True)
    os.posix_spawn(
        sys.executable,
        [sys.executable, "-P", "-S", "-c", program],  # it needs the standard library only
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, null, fd) for fd in (0, 1, 2)],
        setsid=True,
    )
    os.close(read_end)
    os.close(null)
    upstream.use_tracker(write_end)


def prepare_forks() -> None:
    """Do once what each fork would do, and keep the garbage collector off what they share.

    Scheduler, workers and clients tell one another the versions of their packages, which takes
    20 ms to find out. The collector was off since
    `hpcdask.bootstrap.reexec.reexecute`, and is on from here.
    """
    from distributed.versions import get_versions

    get_versions()
    gc.freeze()
    gc.enable()


def start_forkserver(spec: WorkerSpec, scratch: str, forker: Forker, *, peers: bool) -> None:
    """Fork the template of this rank's workers. This is the last fork of a rank.

    ``peers``: there may be other workers on GPUs to exchange data with.
    """
    import dask.config

    cuda = spec.device != "cpu" and driver.has_nvidia_driver()
    likely = cuda and spec.protocol == "auto" and peers

    def in_child() -> None:
        forker.close_in_child()
        if spec.protocol == "ucx" or likely:
            ucx_hooks.install(dask.config.get("distributed.nanny.environ", None))

    start(scratch, in_child, PRELOAD)
    if cuda:
        devices.start_nvml()
