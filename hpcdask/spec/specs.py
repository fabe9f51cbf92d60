"""WorkerSpec: everything a worker needs, parsed and checked once.

Every launcher turns its options into a `WorkerSpec`, and every process that it starts
gets it back from argv. The command line is made from the fields' metadata, so that an option
exists in one place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, get_type_hints

from hpcdask.errors import UsageError

from .argv import make_command, option_name, options, read, to_argv
from .keywords import Device, Protocol, RunKeywords
from .parsing import (
    UNREAD,
    _choice,
    _count,
    _libraries,
    _parse_memory_limit,
    _plain,
    _strings,
    _switch,
    parse_deadline,
    parse_device_memory,
    parse_groups,
    parse_port_range,
    parse_resources,
    parse_seconds,
)
from .signatures import Keyword


def _field(default: Any, text: str, parse: Callable[[Any, str], Any] = _plain, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, **more})


#: By the group in which the help text has the option.
_worker = partial(_field, group="Workers")
_memory = partial(_field, group="Memory")
_network = partial(_field, group="Network")
_start = partial(_field, group="Start")


def keywords_of(spec: type) -> list[Keyword]:
    """Return the fields of a spec as keywords."""
    types = get_type_hints(RunKeywords)
    return [
        Keyword(item.name, types[item.name], item.metadata["help"], item.default)
        for item in dataclasses.fields(spec)
    ]


@dataclass(frozen=True)
class WorkerSpec:
    """Worker: its device, its memory, its threads, its network.

    Every field is also an option of ``python -m hpcdask.run`` (``memory_limit`` is
    ``--memory-limit``). Values may be given as text; they are parsed here, once.

    `hpcdask.Runner` lists them.

    Raises
    ------
    UsageError
        A value is not understood; the message names the accepted forms.
    """

    device: Device = _worker(
        "auto",
        "What workers compute on. auto: GPUs where there are any, else the CPU.",
        _choice("auto", "cuda", "cpu"),
    )
    protocol: Protocol = _network(
        "auto",
        "How workers exchange data: tcp (TLS), or ucx (NVLink, InfiniBand). auto: ucx where NVLink "
        "or InfiniBand joins the GPUs, else tcp.",
        _choice("auto", "tcp", "ucx"),
    )
    interface: str | None = _network(
        None,
        "Network interface to listen on, such as ib0. auto: the fastest that all nodes have. "
        "Default: the one with the default route.",
        metavar="NAME",
    )
    port_range: str | None = _network(
        None,
        "Listen on ports of this range only, such as 20000-20999, for firewalls. Default: "
        "hpcdask.port-range of Dask's configuration, else any free ports.",
        parse_port_range,
    )
    nthreads: int | None = _worker(
        None,
        "Threads per worker. Default: 1 with a GPU. On a CPU, workers share the cores.",
        _count(1),
    )
    memory_limit: int | None = _memory(
        None,
        "Host memory per worker, such as 64GiB. Default: an equal share of what the job may use on "
        "the node.",
        _parse_memory_limit,
    )
    enable_nvlink: bool | None = _network(
        None,
        "Choose ucx as if NVLink joined the GPUs of each node, or keep ucx from NVLink. Default: "
        "as NVML says.",
        _switch,
        flag=True,
    )
    rmm_pool_size: int | float | None = _memory(
        None,
        "Device memory of the RMM pool at the start, such as 100GiB or 0.8. The pool grows. 0: no "
        "pool. Default: half of the worker's device.",
        parse_device_memory,
    )
    rmm_async: bool = _memory(
        False, "Use RMM's asynchronous allocator instead of the pool. Needs tcp.", flag=True
    )
    rmm_allocator_external_lib_list: tuple[str, ...] = _memory(
        ("cupy",),
        "Libraries that allocate through RMM: cupy, torch, numba, or none. A pool needs cupy.",
        _libraries,
        metavar="LIST",
    )
    device_memory_limit: int | float | None = _memory(
        None,
        "Spill to host memory above this much device memory, such as 100GiB or 0.8. 0: never. "
        "Default: 0.8.",
        parse_device_memory,
    )
    local_directory: str | None = _memory(
        None,
        "Node-local folder for spilled data and scratch. Each node expands variables in it. "
        "Default: temporary-directory of Dask's configuration, else $TMPDIR.",
        metavar="FOLDER",
    )
    name: str | None = _worker(
        None, "Prefix of the workers' names. Default: the host's name.", metavar="PREFIX"
    )
    resources: dict[str, float] | None = _worker(
        None,
        'Abstract resources of each worker, such as "MEM=10e9", beside GPU=1 or CPU=1, which it '
        "has by itself.",
        parse_resources,
    )
    preload: tuple[str, ...] = _worker(
        (),
        "Module or file that each worker loads at its start. May be repeated.",
        _strings,
        multiple=True,
        metavar="MODULE",
    )
    preload_nanny: tuple[str, ...] = _worker(
        (),
        "Module or file that each nanny loads at its start. May be repeated.",
        _strings,
        multiple=True,
        metavar="MODULE",
    )
    lifetime: float | None = _worker(
        None, "Close each worker after this time, such as 50min.", parse_seconds
    )
    lifetime_stagger: float | None = _worker(
        None, "Spread the lifetimes by up to this time.", parse_seconds
    )
    lifetime_restart: bool = _worker(
        False, "Start a new worker when a lifetime is over.", flag=True
    )
    death_timeout: float | None = _worker(
        60.0, "A worker ends when it finds no scheduler for this time.", parse_seconds
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = spec.metadata["parse"](getattr(self, spec.name), option_name(spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """Like the constructor, but errors name keywords instead of options."""
        try:
            return cls(**given)
        except UsageError as error:
            option, colon, rest = str(error).partition(":")
            name = option.removeprefix("--").replace("-", "_")
            if not colon or name not in given:
                raise
            raise UsageError(f"{name}:{rest}") from None

    def configured(self) -> Self:
        """Return the spec with Dask's configuration where the command line had nothing."""
        ports = None if self.port_range == UNREAD else self.port_range
        return dataclasses.replace(self, port_range=ports)

    def all_resources(self, *, on_gpu: bool) -> dict[str, float]:
        """Return the resources of a worker: one of its kind of device, and those asked for."""
        return {"GPU" if on_gpu else "CPU": 1.0, **(self.resources or {})}

    def to_argv(self) -> list[str]:
        """Return the options that give this spec again, for `from_argv`."""
        return to_argv(self)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> WorkerSpec:
        """Read what `to_argv` wrote."""
        command = make_command("worker", "", options(cls))
        return cls(**read(command, argv, lambda error: str(error.format_message())))


@dataclass(frozen=True)
class RunSpec(WorkerSpec):
    """Run: a `WorkerSpec` and what the runner needs beside it."""

    scheduler_file: str | None = _start(
        None,
        "Write the cluster's address to this file, for hpcdask.connect(FILE) elsewhere.",
        metavar="FILE",
    )
    dashboard_address: str | None = _network(
        None,
        "Where the dashboard listens, such as :8787. Default: port 8787, or a free one. In a job "
        "on several nodes, or with --scheduler-file, --interface or no program, on all addresses; "
        "else on 127.0.0.1.",
        metavar="ADDRESS",
    )
    tls: bool = _network(
        True, "Encrypt and authenticate all tcp connections. Default: yes.", flag=True
    )
    groups: tuple[str, ...] = _worker(
        (),
        'Ranks of each node that compute on a GPU, and on the CPU, in this order, such as "gpu:4 '
        'cpu:2". auto: each as it sees a GPU or none. Default: all the same.',
        parse_groups,
    )
    oversubscribe: bool = _worker(False, "Allow more ranks on a node than it has GPUs.", flag=True)
    timeout: float = _start(
        300.0, "Give up when the cluster is not complete after this time.", parse_deadline
    )
    workers_min: int | None = _start(
        None,
        "Start the program with this many workers, and go on while as many are left. "
        "Default: all; the loss of a rank ends the run.",
        _count(1),
    )
