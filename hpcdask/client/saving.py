"""save() and load(): collections as Zarr arrays and Parquet files.

The workers write and read, so the folder is on a file system that they share with the client.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hpcdask.errors import MissingExtra, UsageError

from .saved_folder import NewSave, read_note


@dataclass(frozen=True)
class Saving:
    """A save that has begun: `work` is a Dask collection to compute, which writes.

    Then its result goes to `finish`. Where `work` fails, `discard` removes what was written.
    """

    work: Any
    finish: Callable[[Any], None]
    discard: Callable[[], None]


def _needs(package: str, extra: str, what: str) -> None:
    try:
        importlib.import_module(package)
    except ImportError:
        raise MissingExtra(package, extra, what) from None


def _kind(collection: Any) -> Literal["array", "dataframe"]:
    """What it is. Raises UsageError if it cannot be saved."""
    import dask.array as da

    name = type(collection).__name__
    if isinstance(collection, da.Array):
        return "array"
    if type(collection).__module__.startswith("dask.dataframe"):
        if name == "DataFrame":
            return "dataframe"
        raise UsageError(f"save() takes no dask {name}: make it a DataFrame, with .to_frame() say")
    raise UsageError(
        f"save() takes dask arrays and dask DataFrames, and no {name}: write a Bag with "
        f"to_textfiles() or make it a DataFrame, and Delayed objects an array (da.from_delayed)"
    )


def parts(kind: str, what: str) -> Any:
    """The module that writes and reads a kind. Raises MissingExtra."""
    if kind == "array":
        _needs("zarr", "zarr", what)
        from . import saved_array

        return saved_array
    _needs("pyarrow", "dataframe", what)
    _needs("pandas", "dataframe", what)
    from . import saved_frame

    return saved_frame


def check(collection: Any) -> str:
    """The kind of a collection. Raises UsageError if it cannot be saved, whatever the folder."""
    kind = _kind(collection)
    parts(kind, f"save() of a dask {kind}").check(collection)
    return kind


def without_device(collection: Any) -> Any:
    """The same keys, and nothing that needs a GPU where it is unpickled."""
    if _kind(collection) != "array":
        return collection
    from . import saved_array

    return saved_array.without_device(collection)


def begin(
    collection: Any,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    compress: bool = False,
) -> Saving:
    """Check all, make the folder beside `folder`, and return what writes into it."""
    kind = check(collection)
    module = parts(kind, "save()")
    new = NewSave(_absolute(folder), overwrite=overwrite)
    try:
        work, content = module.write(collection, new.data, compress)
    except BaseException:
        new.discard()
        raise

    def finish(result: Any) -> None:
        try:
            new.finish(kind, content(result))
        finally:
            new.discard()

    return Saving(work, finish, new.discard)


def _absolute(folder: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(os.path.expanduser(folder)))


def save(
    collection: Any,
    folder: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    compress: bool = False,
) -> None:
    """Save a dask array or a dask DataFrame, which `load` brings back, in another cluster say.

    Arrays are written with Zarr, DataFrames as Parquet; ``FOLDER/data-…`` can be read without
    hpcdask. The workers write, each its own chunks. The folder appears when all is written: a
    reader finds all of it or, after whatever end, what was there before.

    Parameters
    ----------
    collection
        A dask array with NumPy or CuPy chunks, of numbers, booleans or times; or a dask DataFrame
        of pandas. CuPy chunks are written as NumPy arrays. Zarr's chunks are all of one size: an
        array with others is rechunked for the writing, each axis to its largest chunk. `load`
        restores its chunks.
    folder
        It is made, in a folder that client and workers see under the same name.
    overwrite
        Replace an earlier save in `folder`, once the new one is complete. What was loaded from the
        earlier one and not computed yet fails from then on.
    compress
        Compress with zstd, which suits data that repeat. A chunk has less than 2 GiB then.

    Raises
    ------
    UsageError
        Before anything is written: another collection, unknown chunk sizes, a type that Zarr or
        Parquet does not have, a folder that is there or cannot be made.
    MissingExtra
        zarr (``hpcdask[zarr]``) or pyarrow (``hpcdask[dataframe]``) is not installed.
    HpcdaskError
        Workers do not see the folder, or a chunk is not what the collection says.
    """
    _refuse_asynchronous()
    saving = begin(collection, folder, overwrite=overwrite, compress=compress)
    try:
        result = saving.work.compute()
    except BaseException:
        saving.discard()
        raise
    saving.finish(result)


def _refuse_asynchronous() -> None:
    from distributed import default_client

    try:
        client = default_client()
    except ValueError:
        return
    if client.asynchronous:
        raise UsageError(
            "save() waits until all is written: it needs a client that is not asynchronous"
        )


def load(folder: str | os.PathLike[str], *, device: Literal["cuda", "cpu"] | None = None) -> Any:
    """Load what `save` has saved; it is read when it is computed.

    Parameters
    ----------
    folder
        That of `save`, which the workers see under the same name.
    device
        For arrays: ``"cuda"`` makes CuPy chunks, ``"cpu"`` NumPy chunks. Default: as they were.

    Returns
    -------
    dask.array.Array or dask.dataframe.DataFrame
        With the chunks, or the divisions and categories, that it had. The type of CuPy chunks
        shows when they are computed: to build it needs no GPU.

    Raises
    ------
    UsageError
        `folder` holds no finished save.
    MissingExtra
        zarr or pyarrow is not installed.
    HpcdaskError
        From workers: they do not see the folder, it was replaced, or it lacks a part.
    """
    if device not in (None, "cuda", "cpu"):
        raise UsageError(f'device={device!r}: "cuda" or "cpu"')
    path = _absolute(folder)
    note = read_note(path)
    if note.kind not in ("array", "dataframe"):
        raise UsageError(f"{path} holds a {note.kind}, which this hpcdask cannot load")
    module = parts(note.kind, f"load() of a dask {note.kind}")
    return module.read(path / note.data, note.content, device)
