"""save and load: what comes back, what is refused, and what a killed save leaves."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import dask
import dask.array as da
import dask.bag as db
import numpy as np
import pytest
from distributed import Client, LocalCluster

import hpcdask
from hpcdask.client import saved_array, saving
from hpcdask.client.saved_folder import NOTE
from hpcdask.errors import HpcdaskError, MissingExtra, UsageError
from launching import needs, wait_for

zarr_installed = needs("zarr")
frames_installed = needs("pyarrow")

DTYPES = [*"?bBhHiIlLefdFD", ">f8", ">i2", "M8[ns]", "M8[D]", "m8[s]"]


def round_trip(x: da.Array, folder: Path, **options) -> da.Array:
    hpcdask.save(x, folder, **options)
    loaded = hpcdask.load(folder)
    assert loaded.chunks == x.chunks
    assert loaded.dtype == x.dtype
    assert loaded.shape == x.shape
    np.testing.assert_array_equal(loaded.compute(), x.compute())
    assert os.listdir(folder.parent) == [folder.name]
    return loaded


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "results" / "x"


@pytest.fixture(autouse=True)
def _parent(folder: Path) -> None:
    folder.parent.mkdir()


@zarr_installed
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_dtypes(folder: Path, dtype: str):
    numbers = np.arange(35).reshape(5, 7) % 3
    round_trip(da.from_array(numbers.astype(dtype), chunks=(2, 4)), folder)


@zarr_installed
@pytest.mark.parametrize(
    ("shape", "chunks"),
    [
        ((), ()),
        ((0,), (5,)),
        ((3, 0), (2, 1)),
        ((10,), ((3, 5, 2),)),
        ((10, 6), ((1, 9), (4, 1, 1))),
        ((7, 5), ((7,), (5,))),
        ((4,), ((2, 0, 2),)),
    ],
)
def test_all_shapes(folder: Path, shape: tuple[int, ...], chunks: tuple):
    x = da.from_array(np.arange(np.prod(shape, dtype=int)).reshape(shape), chunks=chunks)
    round_trip(x, folder)


@zarr_installed
def test_compressed_zeros_are_written_too(folder: Path):
    round_trip(da.zeros((8, 8), chunks=4), folder, compress=True)
    (data,) = folder.glob("data-*")
    assert len(list(data.glob("c/*/*"))) == 4


@zarr_installed
def test_workers_write_and_read(folder: Path):
    two = LocalCluster(n_workers=2, threads_per_worker=1, dashboard_address=":0")
    with two as cluster, Client(cluster):
        x = da.random.random((60, 40), chunks=((7, 30, 23), (40,))).persist()
        round_trip(x, folder)


@zarr_installed
def test_the_note_and_other_readers(folder: Path):
    import zarr

    hpcdask.save(da.arange(10, chunks=3), folder)
    note = json.loads((folder / NOTE).read_text())
    assert (note["format"], note["hpcdask"], note["kind"]) == (1, hpcdask.__version__, "array")
    assert note["content"] == {
        "shape": [10],
        "dtype": "<i8",
        "chunk": [3],
        "chunks": [[3, 3, 3, 1]],
        "cupy": False,
    }
    assert zarr.open_array(str(folder / note["data"]), mode="r")[:].tolist() == list(range(10))


@zarr_installed
def test_overwrite(folder: Path):
    hpcdask.save(da.zeros(10, chunks=5), folder)
    with pytest.raises(UsageError, match=r"x is there: overwrite=True replaces it"):
        hpcdask.save(da.ones(10), folder)
    old = hpcdask.load(folder)
    hpcdask.save(old + 1, folder, overwrite=True)  # made of what it replaces
    assert hpcdask.load(folder).compute().tolist() == [1.0] * 10
    with pytest.raises(HpcdaskError, match="it was replaced or removed"):
        old.compute()
    assert len(list(folder.iterdir())) == 2


@zarr_installed
def test_a_lost_chunk_is_not_zeros(folder: Path):
    hpcdask.save(da.ones(10, chunks=5), folder)
    loaded = hpcdask.load(folder)
    (chunk,) = folder.glob("data-*/c/1")
    chunk.unlink()
    with pytest.raises(HpcdaskError, match=r"chunk \(1,\) of .* is missing: the save is damaged"):
        loaded.compute()


@zarr_installed
def test_what_fails_leaves_nothing(folder: Path):
    def fail(block: np.ndarray) -> np.ndarray:
        raise ArithmeticError("no")

    hpcdask.save(da.zeros(4), folder)
    with pytest.raises(ArithmeticError):
        hpcdask.save(da.ones(4).map_blocks(fail, dtype=float), folder, overwrite=True)
    assert hpcdask.load(folder).sum().compute() == 0
    assert os.listdir(folder.parent) == ["x"]


@zarr_installed
def test_chunks_that_are_not_what_the_array_says(folder: Path):
    x = da.ones(4, chunks=2)
    for wrong, says in (
        (x.map_blocks(lambda b: b.astype("f4"), meta=np.empty(0)), r"\(2,\) float32"),
        (x.map_blocks(lambda b: b[:1], meta=np.empty(0)), r"\(1,\) float64"),
        (x.map_blocks(lambda b: np.ma.array(b), meta=np.empty(0)), "MaskedArray"),
    ):
        with pytest.raises(HpcdaskError, match=f"chunk .* is .*{says}.* the array says"):
            hpcdask.save(wrong, folder)
    assert os.listdir(folder.parent) == []


KILLED = """
import sys, time
import dask.array as da, hpcdask

def wait(block, block_id):
    if block_id == (3,):
        print("half", flush=True)
        time.sleep(1000)
    return block

hpcdask.save(da.ones(8, chunks=2).map_blocks(wait, dtype=float), sys.argv[1], overwrite=True)
"""


@zarr_installed
def test_a_killed_save(folder: Path):
    """The old one still loads, and the next save removes what was left."""
    hpcdask.save(da.zeros(8, chunks=2), folder)
    command = [sys.executable, "-c", KILLED, folder]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "half\n"
        wait_for(lambda: [*folder.parent.glob(".x.saving-*/new/data-*/c/*")], 30, "some chunks")
        assert hpcdask.load(folder).sum().compute() == 0
        hpcdask.save(da.full(8, 2.0), folder, overwrite=True)  # beside one that lives
        assert len(os.listdir(folder.parent)) == 2
    finally:
        process.kill()
        process.communicate()
    assert hpcdask.load(folder).sum().compute() == 16
    shutil.rmtree(folder)
    with pytest.raises(UsageError, match=r"does not exist; .*\.x\.saving-\w+ was never finished"):
        hpcdask.load(folder)
    hpcdask.save(da.ones(8), folder)
    assert os.listdir(folder.parent) == ["x"]


def test_what_is_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    x = da.ones(4)
    with pytest.raises(UsageError, match="arrays and dask DataFrames, and no Bag: write a Bag"):
        hpcdask.save(db.from_sequence([1, 2]), folder)
    with pytest.raises(UsageError, match=r"no Delayed.*from_delayed"):
        hpcdask.save(dask.delayed(1), folder)
    monkeypatch.setitem(sys.modules, "zarr", None)
    with pytest.raises(MissingExtra, match=r'save\(\).*array needs zarr.*"hpcdask\[zarr\]"'):
        hpcdask.save(x, folder)
    assert os.listdir(folder.parent) == []


@zarr_installed
def test_what_is_refused_of_arrays(folder: Path, tmp_path: Path):
    x = da.ones(4)
    with pytest.raises(UsageError, match=r"unknown: call x\.compute_chunk_sizes\(\) first"):
        hpcdask.save(x[x > 0], folder)
    for dtype in ("i4,f8", "U3", "S3", "O", "V4", np.longdouble):
        with pytest.raises(UsageError, match="has no place in Zarr's format"):
            hpcdask.save(da.from_array(np.zeros(3, dtype), chunks=3), folder)
    with pytest.raises(UsageError, match="MaskedArray"):
        hpcdask.save(da.ma.masked_greater(x, 2), folder)
    with pytest.raises(UsageError, match=r"there is no folder .*nowhere: make it first"):
        hpcdask.save(x, tmp_path / "nowhere" / "x")
    folder.mkdir()
    with pytest.raises(UsageError, match="is there and no save of hpcdask's"):
        hpcdask.save(x, folder, overwrite=True)
    with pytest.raises(UsageError, match=r"is no save of hpcdask's: it has no hpcdask\.json"):
        hpcdask.load(folder)
    (folder / NOTE).write_text('{"format": 99}')
    with pytest.raises(UsageError, match=r"cannot be read: format 99, and this hpcdask reads 1"):
        hpcdask.load(folder)
    with pytest.raises(UsageError, match="format 99"):
        hpcdask.save(x, folder, overwrite=True)
    with pytest.raises(UsageError, match='"cuda" or "cpu"'):
        hpcdask.load(folder, device="gpu")
    tmp_path.chmod(0o777)
    with pytest.raises(UsageError, match="any user may rename what lies in"):
        hpcdask.save(x, folder.parent / "y")
    tmp_path.chmod(0o700)
    huge = da.zeros(1 << 28, chunks=-1)
    with pytest.raises(UsageError, match="less than 2 GiB"):
        hpcdask.save(huge, folder.parent / "y", compress=True)
    assert os.listdir(folder.parent) == ["x"]


@zarr_installed
def test_no_write_permission(folder: Path):
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    folder.parent.chmod(0o500)
    with pytest.raises(UsageError, match="you may not write in"):
        hpcdask.save(da.ones(4), folder)
    folder.parent.chmod(0o700)


@zarr_installed
def test_an_asynchronous_client(folder: Path):
    async def session() -> None:
        async with (
            LocalCluster(
                n_workers=1, processes=False, asynchronous=True, dashboard_address=":0"
            ) as cluster,
            Client(cluster, asynchronous=True),
        ):
            with pytest.raises(UsageError, match="a client that is not asynchronous"):
                hpcdask.save(da.ones(4), folder)

    import asyncio

    asyncio.run(session())


@zarr_installed
def test_another_file_system(folder: Path):
    """A worker that does not see the folder makes none."""
    import zarr

    elsewhere = folder.parent / "elsewhere"
    array = zarr.create_array(str(elsewhere), shape=(2,), chunks=(2,), dtype="f8")
    shutil.rmtree(elsewhere)
    with pytest.raises(HpcdaskError, match="a file system that not all workers share"):
        saved_array._write_block(np.ones(2), path=str(elsewhere), array=array, block_id=(0,))
    assert not elsewhere.exists()


@zarr_installed
def test_a_block_that_is_written_while_the_save_is_given_up(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    begun = saving.begin(da.ones(4), folder)
    seen = saved_array._see

    def see_and_give_up(path: str) -> None:
        seen(path)
        begun.discard()

    monkeypatch.setattr(saved_array, "_see", see_and_give_up)
    with pytest.raises(HpcdaskError, match="replaced or removed"):
        begun.work.compute(scheduler="synchronous")
    assert os.listdir(folder.parent) == []


@zarr_installed
def test_cupy_arrays_without_a_gpu(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """They are written as NumPy arrays, and a worker that has no CuPy says so."""

    class Stored:
        def __init__(self, array: np.ndarray) -> None:
            self.get = lambda: array

    Stored.__module__ = "cupy"
    hpcdask.save(da.arange(7, chunks=3).map_blocks(Stored, meta=np.empty(0, int)), folder)
    assert json.loads((folder / NOTE).read_text())["content"]["cupy"]
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(HpcdaskError, match=r'no CuPy array can be made on .*device="cpu"'):
        hpcdask.load(folder).compute()
    assert hpcdask.load(folder, device="cpu").compute().tolist() == list(range(7))


def frame():
    import pandas as pd

    n = 20
    letters = pd.Categorical(["u", "v"] * 10, categories=["w", "v", "u"], ordered=True)
    return pd.DataFrame(
        {
            "number": np.arange(n),
            "text": [f"x{i}" for i in range(n)],
            "category": letters,
            "of_int": pd.Categorical([5, 5] * 10, categories=[9, 5]),
            "of_time": pd.Categorical(pd.to_datetime(["2020-01-01", "2021-01-01"] * 10)),
            "time": pd.date_range("2020-01-01", periods=n, tz="UTC"),
            "nullable": pd.array([1, None] * 10, dtype="Int32"),
        },
        index=pd.Index(np.arange(n) * 2, name="key"),
    )


@frames_installed
@pytest.mark.parametrize("index", ["numbers", "none", "times", "categories"])
def test_data_frames(folder: Path, index: str):
    import pandas as pd
    from dask import dataframe as dd

    local = frame()
    if index in ("times", "categories"):
        local = local.set_index(local["time" if index == "times" else "category"].rename("i"))
    x = dd.from_pandas(local, npartitions=3, sort=index != "categories")
    if index == "none":
        x = x.clear_divisions()
    hpcdask.save(x, folder, compress=index == "times")
    loaded = hpcdask.load(folder)
    assert loaded.npartitions == x.npartitions
    assert loaded.divisions == x.divisions
    pd.testing.assert_frame_equal(loaded._meta, x._meta)
    pd.testing.assert_frame_equal(loaded.compute(), x.compute())
    pd.testing.assert_frame_equal(loaded[["number"]].compute(), x[["number"]].compute())
    assert len(loaded.category.cat.categories) == 3
    files = sorted(path.name for path in folder.glob("data-*/*.parquet"))
    assert files == [f"part-{n}.parquet" for n in range(3)]
    assert os.listdir(folder.parent) == ["x"]


@frames_installed
def test_unknown_categories_and_empty_partitions(folder: Path):
    from dask import dataframe as dd

    x = dd.from_pandas(frame(), npartitions=3).astype({"text": "category"})
    x = x[x.number > 8]
    hpcdask.save(x, folder)
    loaded = hpcdask.load(folder)
    assert not loaded.text.cat.known
    assert loaded.text.compute().tolist() == x.text.compute().tolist()
    assert loaded.map_partitions(len).compute().tolist() == [0, 5, 6]


@frames_installed
def test_overwriting_data_frames(folder: Path):
    from dask import dataframe as dd

    x = dd.from_pandas(frame(), npartitions=2)
    hpcdask.save(x, folder)
    old = hpcdask.load(folder)
    hpcdask.save(old[["number"]] + 1, folder, overwrite=True)
    assert hpcdask.load(folder).number.sum().compute() == 210
    with pytest.raises(HpcdaskError, match="replaced or damaged"):
        old.compute()


@frames_installed
def test_what_is_refused_of_data_frames(folder: Path, monkeypatch: pytest.MonkeyPatch):
    from dask import dataframe as dd

    x = dd.from_pandas(frame(), npartitions=2)
    with pytest.raises(UsageError, match=r"no dask Series: .*\.to_frame\(\)"):
        hpcdask.save(x.number, folder)
    with pytest.raises(UsageError, match=r"columns \[1\] are not named by strings"):
        hpcdask.save(x.rename(columns={"number": 1}), folder)
    hpcdask.save(x, folder)
    with pytest.raises(UsageError, match="is for arrays"):
        hpcdask.load(folder, device="cuda")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r'needs pyarrow.*"hpcdask\[dataframe\]"'):
        hpcdask.load(folder)
