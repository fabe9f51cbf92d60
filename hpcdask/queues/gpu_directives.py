"""How many GPUs a directive that the user wrote asks for, in each queueing system's words.

A directive is a line of options without its prefix (``#SBATCH`` and so on). Only the option that
requests GPUs is read: ``--cpus-per-gpu=8`` and ``-p gpus`` request none.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from hpcdask.queues.base import Queue

#: Of the words of a gres list: ``gpu``, ``gpu:2``, ``gpu:a100:2``, ``gpu=2``.
SLURM_GRES = re.compile(r"(?:gres[/:])?gpu(?:[:=].*)?", re.I)
SLURM_GPUS = ("--gpus", "--gpus-per-node", "--gpus-per-task", "--gpus-per-socket", "-G")
#: PBS Professional's ``ngpus=2``, Torque's ``gpus=2``, Moab's ``gres=gpu:2`` and ``GRES:gpus@2``.
PBS_GPUS = re.compile(r"(?:^|[:,+=])n?gpus?=(\d+)|\bgres[=:](?:\S*%)?gpus?\b[:@]?(\d*)", re.I)
LSF_NUMBER = re.compile(r"(?:^|:)\s*num=(\d+)", re.I)
#: LSF's older form: ``-R "rusage[ngpus_excl_p=2]"``.
LSF_USAGE = re.compile(r"\brusage\s*\[[^]]*?\bngpus\w*=(\d+)", re.I)
#: Complexes of Grid Engine are named by the sites.
SGE_GPUS = re.compile(r"(?:^|,)(?:n?gpus?|cuda)=(\d+)(?![\d.])", re.I)
#: Behind ``gpu=`` a number, or ALL or BEST.
OAR_GPUS = re.compile(r"(?:^|[/}+])gpu=(\d*)", re.I)
HTCONDOR_GPUS = re.compile(r"\s*(?:\+|MY\.)?request_?gpus\s*=\s*(\d*)", re.I)


def requested_gpus(queue: Queue, directive: str) -> int | None:
    """GPUs that a directive requests, or None if it is about something else.

    A queue with no words of its own, such as this machine, is given those of any system.
    """
    readers = [READERS[queue.title]] if queue.title in READERS else READERS.values()
    counts = (read(directive) for read in readers)
    return next((count for count in counts if count is not None), None)


def is_per_node(directive: str) -> bool:
    """Whether a directive of SLURM, which alone has jobs of several nodes here, counts for each."""
    return bool(_gres(directive)) or any(_values(directive, "--gpus-per-node"))


def _gres(directive: str) -> list[str]:
    """The GPUs of SLURM's ``--gres``, which may list other things too."""
    items = (item for value in _values(directive, "--gres") for item in value.split(","))
    return list(filter(SLURM_GRES.fullmatch, items))


def _slurm(directive: str) -> int | None:
    """``--gres=gpu:a100:2,nvme:500``, ``--gpus-per-node a100:4``, ``-G2``; types are optional."""
    if found := _gres(directive):
        return sum(map(_last_number, found))
    for value in _values(directive, *SLURM_GPUS):
        return sum(map(_last_number, value.split(",")))
    return None


def _last_number(item: str) -> int:
    """The count behind a type; a type alone is one GPU."""
    last = re.split("[:=]", item)[-1]
    return int(last) if last.isdecimal() else 1


def _pbs(directive: str) -> int | None:
    return _first(PBS_GPUS, _values(directive, "-l", "-L", "-W"))


def _lsf(directive: str) -> int | None:
    """``-gpu "num=2:gmodel=A100"``; ``-gpu -`` is one GPU."""
    for value in _values(directive, "-gpu"):
        return _first(LSF_NUMBER, iter([value])) or 1
    return _first(LSF_USAGE, _values(directive, "-R"))


def _sge(directive: str) -> int | None:
    return _first(SGE_GPUS, _values(directive, "-l"))


def _oar(directive: str) -> int | None:
    return _first(OAR_GPUS, _values(directive, "-l", "--resource"))


def _htcondor(directive: str) -> int | None:
    found = HTCONDOR_GPUS.match(directive)
    return int(found[1] or 1) if found else None


READERS = {
    "SLURM": _slurm,
    "PBS": _pbs,
    "Moab": _pbs,
    "LSF": _lsf,
    "Grid Engine": _sge,
    "OAR": _oar,
    "HTCondor": _htcondor,
}


def _first(pattern: re.Pattern[str], values: Iterator[str]) -> int | None:
    """The number in the first value that matches; one where it has none."""
    found = next(filter(None, map(pattern.search, values)), None)
    return int(next(filter(None, found.groups()), 1)) if found else None


def _values(directive: str, *options: str) -> Iterator[str]:
    """What follows options: ``--name=VALUE``, ``--name VALUE``, ``-l VALUE`` or ``-lVALUE``."""
    words = _words(directive)
    for word, following in zip(words, [*words[1:], ""], strict=False):
        for option in options:
            joined = f"{option}=" if option.startswith("--") else option
            if word == option:
                yield following
            elif word.startswith(joined) and (joined != option or len(option) == 2):
                yield word.removeprefix(joined)


def _words(directive: str) -> list[str]:
    try:
        return shlex.split(directive)
    except ValueError:  # an apostrophe in a comment
        return directive.split()
