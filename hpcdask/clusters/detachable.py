"""Parts of a cluster of jobs that a process of its own needs to hold it."""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Self, cast

from hpcdask.jobs.folder import ClusterFolder, new_name

from .configuration import configured, log_directory, refuse_schedulers
from .scaling import Scaling


class Detachable(Scaling):
    """The part of a cluster that knows of detached ones; `id` is the name of its folder."""

    queue_name: ClassVar[str]
    _base: str | None
    _logs: str | None
    _folder: ClusterFolder | None = None
    #: Whether the scheduler will be started on a node, and not here.
    _goes_to_node: ClassVar[bool] = False

    def __new__(cls, n_workers: int = 0, *, detached: bool = False, **keywords: Any) -> Self:
        """A cluster of this process, or what is attached to a detached one."""
        refuse_schedulers(keywords)
        if not detached:
            return super().__new__(cls)
        from .detached.attached import make

        # it has the same methods
        return cast(Self, make(cast(Any, cls), {"n_workers": n_workers, **keywords}))

    @functools.cached_property
    def id(self) -> str:
        """The cluster's name in the queue and on disk."""
        return new_name(self.name)

    def _read_folders(self, base: str | None, given: dict[str, Any], config_name: str) -> None:
        """Where the cluster's folder is to be, and its logs."""
        self._base = base or configured("shared_temp_directory", {}, config_name)
        self._logs = log_directory(given, config_name)

    def take_folder(self, folder: ClusterFolder) -> None:
        """Live in this folder, which was made for the cluster, and under its name."""
        self._folder, self.id = folder, folder.name

    def _make_folder(self) -> ClusterFolder:
        if self._folder is None:
            self._folder = ClusterFolder.create(self.id, self.queue_name, base=self._base)
        return self._folder
