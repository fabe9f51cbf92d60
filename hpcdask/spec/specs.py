"""WorkerSpec: everything a worker needs, parsed and checked once.

Every launcher turns its options into a `WorkerSpec`, and every process that it starts
gets it back from argv. The command line is made from the fields' metadata, so that an option
exists in one place.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_type_hints

from hpcdask.errors import UsageError

from .argv import make_command, option_name, options, read, to_argv
from .parsing import (
    _choice,
    _count,
    _libraries,
    _parse_memory_limit,
    _plain,
    _strings,
    _switch,
    parse_deadline,
    parse_device_memory,
    parse_resources,
    parse_seconds,
)
from .signatures import Keyword, describe

Device = Literal["auto", "cuda", "cpu"]
Protocol = Literal["auto", "tcp", "ucx"]
Layout = Literal["shared", "dedicated"]


def _field(default: Any, text: str, parse: Callable[[Any, str], Any] = _plain, **more: Any) -> Any:
    return field(default=default, metadata={"help": text, "parse": parse, **more})


def _documented(cls: Any) -> Any:
    """Add the fields to the docstring, in the words that the command line has for them."""
    cls.__doc__ = describe(cls.__doc__, keywords_of(cls))
    return cls


def keywords_of(spec: type) -> list[Keyword]:
    """The fields of a spec as keywords, which take what the fields' parsers do."""
    fields = get_type_hints(spec)
    found = []
    for item in dataclasses.fields(spec):
        parse = item.metadata["parse"]
        accepted = get_type_hints(parse)[next(iter(inspect.signature(parse).parameters))]
        takes = fields[item.name] if accepted is Any else accepted
        found.append(Keyword(item.name, takes, item.metadata["help"], item.default))
    return found


@_documented
@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is: its device, its memory, its threads, its network.

    Every field is also an option of ``python -m hpcdask.run`` (``memory_limit`` is
    ``--memory-limit``). Values may be given as text; they are parsed here, once.

    Parameters
    ----------
    **fields
        Each has a text, which the command line shows, too.

    Raises
    ------
    UsageError
        A value is not understood; the message names the accepted forms.
    """

    device: Device = _field(
        "auto",
        "What workers compute on. auto: GPUs where there are any.",
        _choice("auto", "cuda", "cpu"),
    )
    protocol: Protocol = _field(
        "auto",
        "How workers exchange data: tcp (TLS), or ucx (NVLink, InfiniBand). auto: ucx where GPUs "
        "have NVLink or InfiniBand between them, else tcp.",
        _choice("auto", "tcp", "ucx"),
    )
    interface: str | None = _field(
        None,
        "Network interface to listen on, such as ib0; auto: the fastest that all nodes have. "
        "Default: the one with the default route.",
    )
    nthreads: int | None = _field(
        None,
        "Threads per worker. Default: 1 with a GPU, else the cores shared among the workers.",
        _count(1),
    )
    memory_limit: int | None = _field(
        None,
        "Host memory per worker, such as 64GiB. Default: what the job may use on the node, "
        "shared among its workers.",
        _parse_memory_limit,
    )
    enable_nvlink: bool | None = _field(
        None, "Have ucx use NVLink, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_infiniband: bool | None = _field(
        None, "Have ucx use InfiniBand, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_rdmacm: bool | None = _field(
        None, "Have ucx connect by RDMA, or not. Default: as UCX chooses.", _switch, flag=True
    )
    enable_tcp_over_ucx: bool | None = _field(
        None, "Have ucx use tcp beside the others, or not. Default: yes.", _switch, flag=True
    )
    rmm_pool_size: int | float | None = _field(
        None,
        "Device memory to set aside at start as an RMM pool that grows, such as 100GiB or 0.8; "
        "0 for no pool. Default: half of the worker's device.",
        parse_device_memory,
    )
    rmm_async: bool = _field(
        False, "Use RMM's asynchronous allocator instead of the pool (with tcp only).", flag=True
    )
    rmm_allocator_external_lib_list: tuple[str, ...] = _field(
        ("cupy",),
        "Libraries that allocate through RMM: cupy (which a pool wants), torch, numba; or none.",
        _libraries,
        metavar="LIST",
    )
    device_memory_limit: int | float | None = _field(
        None,
        "Spill to host memory above this much device memory, such as 100GiB or 0.8; 0 for never. "
        "Default: 0.8.",
        parse_device_memory,
    )
    local_directory: str | None = _field(
        None,
        "Node-local folder for spilled data and scratch; variables in it are the node's. "
        "Default: temporary-directory of Dask's configuration, else $TMPDIR.",
    )
    name: str | None = _field(None, "Prefix of the workers' names. Default: the host's name.")
    resources: dict[str, float] | None = _field(
        None, 'Abstract resources of each worker, such as "GPU=1 MEM=10e9".', parse_resources
    )
    preload: tuple[str, ...] = _field(
        (),
        "Module or file that each worker loads at start (may be repeated).",
        _strings,
        multiple=True,
    )
    preload_nanny: tuple[str, ...] = _field(
        (),
        "Module or file that each nanny loads at start (may be repeated).",
        _strings,
        multiple=True,
    )
    lifetime: float | None = _field(
        None, "Close each worker after this time, such as 50min.", parse_seconds
    )
    lifetime_stagger: float | None = _field(
        None, "Spread the lifetimes by up to this time.", parse_seconds
    )
    lifetime_restart: bool = _field(
        False, "Start a worker again when its lifetime is over.", flag=True
    )
    death_timeout: float | None = _field(
        60.0, "A worker that finds no scheduler for this long ends.", parse_seconds
    )

    def __post_init__(self) -> None:
        for spec in dataclasses.fields(self):
            value = spec.metadata["parse"](getattr(self, spec.name), option_name(spec.name))
            object.__setattr__(self, spec.name, value)

    @classmethod
    def from_keywords(cls, given: Mapping[str, Any]) -> Self:
        """As the class itself, whose errors name options, for who writes keywords."""
        try:
            return cls(**given)
        except UsageError as error:
            option, colon, rest = str(error).partition(":")
            name = option.removeprefix("--").replace("-", "_")
            if not colon or name not in given:
                raise
            raise UsageError(f"{name}:{rest}") from None

    def to_argv(self) -> list[str]:
        """The options that give this spec again, as an argv list.

        `from_argv` is the way back.
        """
        return to_argv(self)

    @classmethod
    def from_argv(cls, argv: Sequence[str]) -> WorkerSpec:
        """Read what `to_argv` wrote."""
        command = make_command("worker", "", options(cls))
        return cls(**read(command, argv, lambda error: str(error.format_message())))


@_documented
@dataclass(frozen=True)
class RunSpec(WorkerSpec):
    """A `WorkerSpec` and what the runner needs beside it.

    Parameters
    ----------
    **fields
        As those of `WorkerSpec`.
    """

    layout: Layout = _field(
        "shared",
        "shared: every rank has a worker, rank 0's node also the scheduler and the "
        "program. dedicated: rank 0 is the scheduler, rank 1 the program, as in dask-mpi.",
        _choice("shared", "dedicated"),
    )
    scheduler_file: str | None = _field(
        None, "File to write the cluster's address to, for hpcdask.connect(FILE) elsewhere."
    )
    dashboard_address: str | None = _field(
        None,
        "Where the dashboard listens, such as :8787. Default: port 8787, or any free one; in a job "
        "everywhere, elsewhere on 127.0.0.1.",
    )
    tls: bool = _field(True, "Encrypt and authenticate all tcp connections.", flag=True)
    oversubscribe: bool = _field(
        False, "Allow more ranks on a node than it has devices.", flag=True
    )
    timeout: float = _field(
        300.0, "Give up when the cluster is not complete after this time.", parse_deadline
    )
    workers_min: int | None = _field(
        None,
        "Start the program when this many workers are there, and go on while they are. "
        "Default: all, and the loss of a rank ends the run.",
        _count(1),
    )

    @property
    def program_rank(self) -> int:
        """The rank whose node runs the program."""
        return 1 if self.layout == "dedicated" else 0

    @property
    def first_worker_rank(self) -> int:
        """Ranks before this one have no worker."""
        return 2 if self.layout == "dedicated" else 0
