"""DataFrames of `save` and `load`: a Parquet file for each partition, by pandas.

Parquet keeps neither all categories nor divisions: they are in files of their own.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcdask.errors import HpcdaskError, UsageError
from hpcdask.upstream.dask import meta_of

if TYPE_CHECKING:
    import dask.dataframe as dd

#: Readers of Parquet leave out what begins so.
HIDDEN = "_hpcdask"
META, DIVISIONS = "meta", "divisions"


@dataclass(frozen=True)
class Categories:
    """A column of categories, or the index where `column` is None; `file` has them if known."""

    column: str | None
    ordered: bool
    file: str | None


@dataclass(frozen=True)
class FrameRecord:
    """A DataFrame: the rows of each partition, its types, whether divisions are known."""

    rows: tuple[int, ...]
    dtypes: dict[str, str]
    divisions: bool
    categories: tuple[Categories, ...]


def check(x: dd.DataFrame) -> None:
    """Raise UsageError if Parquet cannot have it."""
    import pandas as pd

    if not isinstance(meta_of(x), pd.DataFrame):
        raise UsageError(f"save(): {type(meta_of(x))} as partitions: x.to_backend('pandas') first")
    odd = [name for name in x.columns if not isinstance(name, str)]
    if odd or x.columns.has_duplicates:
        what = f"columns {odd} are not named by strings" if odd else "columns share a name"
        raise UsageError(f"save(): {what}, as Parquet needs: rename them")


def write(
    x: dd.DataFrame, data: Path, compress: bool
) -> tuple[Any, Callable[[Any], dict[str, Any]]]:
    """What writes a DataFrame, and what makes a record of its result."""
    import pandas as pd

    hidden = data / HIDDEN
    hidden.mkdir()
    meta_of(x).to_parquet(hidden / META, engine="pyarrow")
    if x.known_divisions:
        _write_values(list(x.divisions), hidden / DIVISIONS)
    categories = tuple(_find_categories(x, hidden))
    written = x.map_partitions(
        _write_part,
        folder=str(data),
        compression="zstd" if compress else None,
        count=x.npartitions,
        meta=pd.Series([], dtype="int64"),
    )

    def content(rows: Any) -> dict[str, Any]:
        missing = [path for path in _files(data, x.npartitions) if not os.path.exists(path)]
        if missing:
            raise HpcdaskError(f"{missing[0]} is not there: not all workers share its file system")
        return asdict(
            FrameRecord(
                tuple(map(int, rows)),
                {name: str(dtype) for name, dtype in x.dtypes.items()},
                bool(x.known_divisions),
                categories,
            )
        )

    return written, content


def _find_categories(x: dd.DataFrame, hidden: Path) -> Any:
    import pandas as pd
    from dask.dataframe.utils import has_known_categories

    meta = meta_of(x)
    of = {**{name: meta[name] for name in x.columns}, None: meta.index}
    for number, (column, values) in enumerate(of.items()):
        if isinstance(values.dtype, pd.CategoricalDtype):
            file = f"categories-{number}" if has_known_categories(values) else None
            if file:
                _write_values(values.dtype.categories, hidden / file)
            yield Categories(column, bool(values.dtype.ordered), file)


def _write_values(values: Any, path: Path) -> None:
    import pandas as pd

    pd.DataFrame({"values": values}).to_parquet(path, engine="pyarrow")


def _read_values(path: Path) -> Any:
    import pandas as pd

    return pd.read_parquet(path, engine="pyarrow")["values"].rename(None)


def _files(data: Path, count: int) -> list[str]:
    width = len(str(count))
    return [str(data / f"part-{number:0{width}}.parquet") for number in range(count)]


def _write_part(
    part: Any, *, folder: str, compression: str | None, count: int, partition_info: Any = None
) -> Any:
    """Write one partition; the number of its rows."""
    import pandas as pd

    if not os.path.isdir(folder):
        raise HpcdaskError(
            f"{folder} is not there on {socket.gethostname()}: it was removed, or is on a file "
            f"system that not all workers share"
        )
    path = _files(Path(folder), count)[partition_info["number"]]
    part.to_parquet(path, engine="pyarrow", compression=compression)
    return pd.Series([len(part)], dtype="int64")


def read(data: Path, content: dict[str, Any], device: object) -> dd.DataFrame:
    """The DataFrame of a record."""
    import dask.dataframe as dd
    from dask.dataframe.utils import clear_known_categories

    if device == "cuda":
        raise UsageError("load(device=...) is for arrays: DataFrames are of pandas")
    content = {**content, "categories": tuple(Categories(**one) for one in content["categories"])}
    record = FrameRecord(**content)
    hidden = data / HIDDEN
    dtypes = {one.column: _dtype(one, hidden) for one in record.categories}
    unknown = [one.column for one in record.categories if one.file is None]
    meta = clear_known_categories(
        _read_part(str(hidden / META), dtypes=dtypes),
        cols=[name for name in unknown if name is not None],
        index=None in unknown,
    )
    loaded: dd.DataFrame = dd.from_map(
        _read_part,
        _files(data, len(record.rows)),
        dtypes=dtypes,
        meta=meta,
        divisions=tuple(_read_values(hidden / DIVISIONS)) if record.divisions else None,
    )
    return loaded


def _dtype(one: Categories, hidden: Path) -> Any:
    import pandas as pd

    known = None if one.file is None else _read_values(hidden / one.file)
    return pd.CategoricalDtype(known, one.ordered)


def _read_part(path: str, columns: Any = None, *, dtypes: dict[str | None, Any]) -> Any:
    import pandas as pd

    try:
        frame = pd.read_parquet(path, engine="pyarrow", columns=columns)
    except FileNotFoundError:
        raise HpcdaskError(
            f"{path} is not there on {socket.gethostname()}: the save was replaced or damaged, or "
            f"is on a file system that not all workers share"
        ) from None
    if None in dtypes:
        frame.index = frame.index.astype(dtypes[None])
    return frame.astype({name: t for name, t in dtypes.items() if name in frame.columns})
