"""What dependencies keep to themselves and hpcdask uses: it stands behind one seam, and is there.

A test that fails here after an update says what moved. `hpcdask.upstream` has a module for most
of them, docs/design.md what would make them superfluous.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import dask
import pytest
from dask.highlevelgraph import HighLevelGraph
from distributed import Client, Scheduler, Worker
from distributed.core import Status

import hpcdask
from hpcdask.errors import UsageError
from hpcdask.upstream import distributed, parts
from launching import needs

PACKAGE = Path(hpcdask.__file__).parent

# The seam

#: Private by their names only: Python documents them.
DOCUMENTED = {"_asdict", "_exit", "_replace"}


def private(name: object) -> bool:
    return isinstance(name, str) and re.fullmatch(r"_[a-z]\w*", name) is not None


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0]


def defined(node: ast.AST) -> object:
    """The name that a piece of a program gives to something of its own."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(getattr(node, "ctx", None), ast.Store):
        name = ast.unparse(node).removeprefix("self.").removeprefix("cls.")
        return name if name.isidentifier() else None
    return None


def named(node: ast.AST) -> list[object]:
    """What a piece of a program may name of others."""
    match node:
        case ast.Attribute(attr=name):
            return [name]
        case ast.Import(names=found):
            return [part for one in found for part in one.name.split(".")]
        case ast.ImportFrom(module=str(module), names=found, level=0):
            parts = [*module.split("."), *(one.name for one in found)]
            return [] if parts[0] == "hpcdask" else parts
        case ast.Call(func=ast.Name("getattr" | "setattr" | "hasattr" | "delattr"), args=given):
            return [one.value for one in given if isinstance(one, ast.Constant)]
    return []


def uses(trees: dict[Path, ast.AST]) -> list[str]:
    """Private names of others outside of the seam: none that the same room defines."""
    own: dict[str, set[object]] = {}
    for path, tree in trees.items():
        own.setdefault(room(path), set(DOCUMENTED)).update(map(defined, ast.walk(tree)))
    return [
        f"{path.relative_to(PACKAGE)}:{node.lineno}: {name}"
        for path, tree in trees.items()
        if room(path) != "upstream"
        for node in ast.walk(tree)
        for name in named(node)
        if private(name) and name not in own[room(path)]
    ]


def test_private_parts_of_dependencies_stand_behind_the_seam():
    found = uses({path: ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")})
    assert not found, "these belong into hpcdask/upstream"


# distributed


async def test_what_is_set_on_live_servers_is_there():
    """Each of these would be set in silence, and do nothing, if distributed had moved it."""
    local = {"host": "127.0.0.1", "dashboard_address": "127.0.0.1:0"}
    async with (
        Scheduler(**local) as scheduler,
        Worker(scheduler.address, **local) as worker,
        Client(scheduler.address, asynchronous=True) as client,
    ):
        to_worker = scheduler.stream_comms[worker.address]
        for stream in (to_worker, worker.batched_stream, client.scheduler_comm):
            distributed.send_at_once(stream)
        distributed.set_message_limit(worker, 2**30)
        assert worker.state.transfer_message_bytes_limit == 2**30


@pytest.mark.parametrize(
    "use",
    [
        distributed.send_at_once,
        lambda there: distributed.set_message_limit(there, 1),
        parts.prologue,
        lambda there: parts.results_on_device(SimpleNamespace(device_buffer=there)),
    ],
)
def test_what_moved_is_named(use):
    """With the versions that have it, before it is set."""
    part = SimpleNamespace()
    there = SimpleNamespace(state=part, _comm_buffer=part, metadata=part, fast=part)
    with pytest.raises(UsageError, match=r"private parts of (\S+), .* changed .* Use \1 \d"):
        use(there)


@pytest.mark.parametrize(
    ("module", "texts"),
    [
        ("worker", [distributed.HEARTBEAT_FAILED, *distributed.PEER_LEFT]),
        ("worker", [f'reason="{distributed.CONNECTION_BROKEN}"']),
        ("worker", [f'reason="{distributed.HEARTBEAT_ERROR}"']),
        ("nanny", [f'"{distributed.NOT_CONNECTED}"', f'"{distributed.RESTARTING}']),
        ("comm.tcp", [distributed.HANDSHAKE_FAILED]),
        ("comm.core", [distributed.CONNECT_TIMED_OUT]),
        ("scheduler", [f'"reason": "{distributed.SCHEDULER_CLOSED}"']),
    ],
)
def test_distributed_still_says(module, texts):
    """Lines of its log that hpcdask leaves out, and reasons of workers that close, have moved."""
    source = inspect.getsource(importlib.import_module(f"distributed.{module}"))
    assert [text for text in texts if text in source] == texts


@pytest.mark.parametrize(
    "path",
    [
        "hpcdask.clusters.base.BaseCluster",
        "hpcdask.comm.peers.PeerPool",
        "hpcdask.comm.peers.PeerWorker",
        "hpcdask.node.device_worker.DeviceWorker",
        "hpcdask.node.nanny.BoundNanny",
    ],
)
def test_what_is_overridden_is_there(path):
    """distributed would not call a method of ours whose name it has given up."""
    kind = pkgutil.resolve_name(path)
    called = set(re.findall(r"super\(\)\.(\w+)", inspect.getsource(kind))) - {"__init__"}
    assert called
    assert not [one for one in called if not any(hasattr(base, one) for base in kind.__bases__)]


async def test_a_cluster_has_its_loop_its_adaptive_and_its_log():
    from distributed.deploy.cluster import Cluster

    cluster = Cluster(asynchronous=True, quiet=True)
    assert callable(distributed.loop_runner(cluster).start)
    assert distributed.adaptive(cluster) is None
    distributed.log(cluster, "a line")
    assert [line for _, line in cluster._cluster_manager_logs] == ["a line"]
    cluster.status = Status.closed


def test_nannies_preload_nothing_into_the_fork_server(monkeypatch):
    """distributed's `get_mp_context` reads this, and imports every optional package else."""
    from distributed import utils

    monkeypatch.setattr(utils, "_forkserver_preload_set", False)
    distributed.preload_nothing()
    assert "_forkserver_preload_set" in utils.get_mp_context.__code__.co_names
    monkeypatch.delattr(utils, "_forkserver_preload_set")
    with pytest.raises(UsageError, match=r"distributed\.utils\._forkserver_preload_set"):
        distributed.preload_nothing()


# dask


def test_what_is_culled_is_what_dask_culls():
    distributed.cull_by_layer()
    distributed.cull_by_layer()  # once is enough
    numbers = [dask.delayed(len)("1" * size) for size in range(20)]
    sums = [dask.delayed(sum)(numbers[start:]) for start in range(15)]
    unwanted = dask.delayed(max)(numbers)
    ours = HighLevelGraph.merge(*(one.dask for one in (*sums, unwanted)))
    keys = [one.key for one in sums]
    found = ours.cull(keys).to_dict()
    assert set(found) == {one.key for one in numbers + sums}
    assert dask.get(found, keys) == tuple(sum(range(start, 20)) for start in range(15))

    class Wanted(set):
        """Keys that may be looked up, and not be walked through."""

        def __iter__(self):
            raise AssertionError("all wanted keys were looked at for one layer")

    layer = numbers[0].dask.layers[numbers[0].key]
    kept, needs_of = layer.cull(Wanted({numbers[0].key, "x"}), set())
    assert dict(kept) == dict(numbers[0].dask)
    assert needs_of == {numbers[0].key: set()}


# The others


def test_jobs_have_their_prologue():
    from dask_jobqueue.slurm import SLURMJob

    lines = ["module load cuda"]
    job = SLURMJob(None, "job", cores=1, memory="1GB", job_script_prologue=lines)
    assert list(parts.prologue(job)) == lines


@needs("dask_cuda")
def test_the_store_counts_what_is_on_the_device(tmp_path):
    from dask_cuda.device_host_file import DeviceHostFile

    store = DeviceHostFile(str(tmp_path), device_memory_limit=1000, memory_limit=1000)
    assert parts.results_on_device(store).total_weight == 0
    assert parts.results_on_device({}) is None


UCX = """
import inspect, sys, types
from hpcdask.upstream import ucxx as upstream
from ucxx._lib import libucxx
from ucxx._lib_async import Endpoint, application_context
if sys.argv[1:]:  # as if it imported the class by name
    application_context.ucx_api = types.SimpleNamespace(**vars(libucxx))
upstream.start()
features = libucxx.Feature
allowed = int(features.TAG.value | features.STREAM.value | features.WAKEUP.value)
assert upstream._context().context.feature_flags == allowed
assert upstream.worker().epoll_file_descriptor >= 0
assert list(inspect.signature(Endpoint).parameters) == ["endpoint", "ctx", "tags"]
listener = upstream.base.UCXXListener("0", None)
assert upstream.listened_port(listener) == 0 and upstream.array(b'x').nbytes == 1
assert upstream.keep_running() < upstream.keep_running()
"""


@needs("distributed_ucxx")
@pytest.mark.parametrize("patched", [True, False])
def test_ucx_starts_without_active_messages_or_not_at_all(patched):
    """A security boundary: with them a stranger has a worker allocate what he says."""
    command = [sys.executable, "-W", "ignore", "-c", UCX, *([] if patched else ["unpatched"])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode == 0) is patched, done.stderr
    assert ("private parts of ucxx" in done.stderr) is not patched, done.stderr
