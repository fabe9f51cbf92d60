"""The template: a single-threaded process that has imported all a worker needs, and forks.

It is multiprocessing's own fork server, started by a fork of the rank instead of a new
Python, so that imports are paid once. distributed's nannies use it through the method
``forkserver`` as they would use Python's. It must be forked before the rank starts an event
loop, a thread, MPI, CUDA or UCX.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import multiprocessing
import os
import platform
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from multiprocessing import connection
from typing import TYPE_CHECKING, NoReturn

from hpcdask.bootstrap import ranks
from hpcdask.comm import ucx_hooks
from hpcdask.errors import ClusterError, root_cause
from hpcdask.gpu import devices, driver
from hpcdask.process import FILES, SIGNALS, detach_standard_streams, process_start
from hpcdask.upstream import multiprocessing as upstream

if TYPE_CHECKING:
    from hpcdask.spec.specs import WorkerSpec

    from .forking import Forker

#: Seconds that the template has to fork a worker.
_deadline_s = 240.0


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
    # the folder is for a fork server of multiprocessing's, if this one is lost
    short = folder if len(os.fsencode(folder)) < 80 else None
    upstream.name_files(f"/hpcdask-{'.'.join(_life(os.getpid()))}", short)
    _purge_semaphores()
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
    """Have the next process that is started be this child, which waits in `wait_for_worker`."""
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

    Returns where the process's id and exit code can be read, and where it expects its work. Raises
    ClusterError if the template does not answer, or not as it should.
    """
    while _offered:
        if told := _give_order(*_offered.pop(), fds):
            return told
    answer: Future[tuple[int, int]] = Future()
    threading.Thread(target=_ask_template, args=(fds, answer), daemon=True).start()
    try:
        return answer.result(_deadline_s)
    except TimeoutError:
        problem = f"has not answered for {_deadline_s:g} s. Its imports may hang in a file system"
    except Exception as error:
        problem = f"failed ({root_cause(error)}), with Python {platform.python_version()}"
    raise ClusterError(
        f"the template on {socket.gethostname()}, of which workers are forks, {problem}. Start "
        f"again; if it stays, leave the node out"
    )


def _ask_template(fds: list[int], answer: Future[tuple[int, int]]) -> None:
    """Have the template fork, in a thread of its own: nothing else ends a wait for it."""
    try:
        status, data = upstream.ask_server(fds)
        connection.wait([status])  # for the id of the new process
        answer.set_result((status, data))
    except Exception as error:
        answer.set_exception(error)


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


def _life(pid: int) -> tuple[str, str, str]:
    """One process for good: its id, its start, and in which namespace they mean something."""
    return str(os.stat("/proc/self/ns/pid").st_ino), str(pid), process_start(pid)


def _purge_semaphores() -> None:
    """Remove what ranks of this node left that died with their tracker (`scancel JOB.STEP`)."""
    for path in glob.glob("/dev/shm/sem.hpcdask-*"):
        with contextlib.suppress(OSError, ValueError):
            space, pid, start = os.path.basename(path).split("-")[1].split(".")
            here, _, now = _life(int(pid))
            if os.lstat(path).st_uid == os.getuid() and space == here and start != now:
                os.unlink(path)


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
    _drop_idle_hook()
    _keep_pools_off_mpi()
    gc.freeze()
    gc.enable()


def _keep_pools_off_mpi() -> None:
    """Have processes that a program or a Dask task starts leave MPI alone, as these do."""
    if ranks.leaves_mpi_alone() and multiprocessing.get_all_start_methods()[0] == "forkserver":
        multiprocessing.set_forkserver_preload(["hpcdask.bootstrap.mpi_off"])


def _drop_idle_hook() -> None:
    """Take away the import hook that comes with dask-cuda, where it has nothing to patch any more.

    To look for patches of a module of Dask it holds Python's import lock, and waits with it for
    the module's package. A process hangs for good where another thread is importing that package.
    The patches of dask and distributed themselves are done by now.
    """
    hook = sys.modules.get("rapids_dask_dependency")
    if hook is None or hook.__file__ is None:
        return
    folder = os.path.join(os.path.dirname(hook.__file__), "patches")
    files = {
        os.path.relpath(os.path.join(at, name), folder)
        for at, _, names in os.walk(folder)
        for name in names
        if name.endswith(".py")
    }
    if files <= {"__init__.py", "dask/__init__.py", "distributed/__init__.py"}:
        sys.meta_path[:] = [
            finder
            for finder in sys.meta_path
            if not type(finder).__module__.startswith(f"{hook.__name__}.")
        ]


def start_forkserver(spec: WorkerSpec, scratch: str, forker: Forker, *, peers: bool) -> None:
    """Fork the template of this rank's workers. This is the last fork of a rank.

    ``peers``: there may be other workers on GPUs to exchange data with.
    """
    global _deadline_s
    import dask.config

    if spec.death_timeout:
        _deadline_s = 0.8 * spec.death_timeout  # the nanny waits so long, and does not say for what
    cuda = spec.device != "cpu" and driver.has_nvidia_driver()
    likely = cuda and spec.protocol == "auto" and peers

    def in_child() -> None:
        forker.close_in_child()
        if spec.protocol == "ucx" or likely:
            ucx_hooks.install(dask.config.get("distributed.nanny.environ", None))

    # dask-cuda, which has the device's store, takes 0.2 s to import it; it makes no CUDA call
    start(scratch, in_child, ["cuda.core"] if cuda else [])
    if cuda:
        devices.start_nvml()
