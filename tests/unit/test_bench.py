"""What the measuring commands accept, report and refuse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import dask
import pytest
from distributed import Client, LocalCluster
from threadpoolctl import threadpool_limits

from hpcdask.bench import cluster as bench_cluster
from hpcdask.bench import command, timing
from hpcdask.bench.measurements import run_array
from hpcdask.bench.records import Case, record
from hpcdask.errors import UsageError
from hpcdask.workloads import WorkloadError
from hpcdask.workloads import array as array_workload

GPU = {
    "host": "n1",
    "gpu": True,
    "cuda": True,
    "why": "",
    "name": "H200",
    "memory": 1,
    "cupy": "14",
}
BROKEN = {"host": "n2", "gpu": True, "cuda": False, "why": 'CuPy is missing: pip install "x"'}
BARE = {"host": "n3", "gpu": False, "cuda": False, "why": "no device"}


@pytest.fixture(scope="module")
def client():
    with (
        threadpool_limits(1),  # as in a worker; the threads of two would wait for one another
        LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=False,
            dashboard_address=":0",
            memory_limit="1GiB",
        ) as local,
        Client(local) as client,
        dask.config.set({"scheduler-address": local.scheduler_address}),
    ):
        yield client


# --- choosing the device --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "wanted", "chosen"),
    [
        ([GPU, GPU], "auto", "cuda"),
        ([GPU, GPU], "cuda", "cuda"),
        ([GPU, BROKEN], "cpu", "cpu"),
        ([BARE, BARE], "auto", "cpu"),
    ],
)
def test_device(found, wanted, chosen):
    assert bench_cluster.choose_device({f"w{i}": f for i, f in enumerate(found)}, wanted) == chosen


@pytest.mark.parametrize(
    ("found", "wanted", "message"),
    [
        ([GPU, BARE], "auto", r"1 of 2 workers have no CUDA device: w1 on n3"),
        ([BARE, BARE], "cuda", r"2 of 2 workers have no CUDA device: w0 on n3.*, w1 on n3"),
        ([GPU, BROKEN], "auto", r"w1 on n2 sees a GPU but cannot use it: CuPy is missing: pip"),
        ([BROKEN, BROKEN], "auto", "sees a GPU"),
    ],
)
def test_device_errors(found, wanted, message):
    with pytest.raises(UsageError, match=message):
        bench_cluster.choose_device({f"w{i}": f for i, f in enumerate(found)}, wanted)


def test_a_worker_whose_gpu_has_no_cupy_is_an_error(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(UsageError, match=r'pip install "hpcdask\[cuda13\]"'):
        bench_cluster.choose_device({"w0": bench_cluster.probe()}, "auto")


def test_a_worker_that_hides_its_gpus_has_none(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not bench_cluster.probe()["gpu"]


# --- measuring ------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["tuned", "stock"])
@pytest.mark.parametrize(
    ("workload", "size", "options", "shape"),
    [
        ("array", "8MB", [], [1000, 1000]),
        ("svd", "5MB", ["--k", "4"], [50_000, 100]),
    ],
)
def test_command_reports_one_json_line(
    client, tmp_path, capsys, workload, form, size, options, shape
):
    file = tmp_path / "lines.json"
    argv = [
        *("--size", size, "--form", form, "--device", "cpu", "--repeats", "2", *options),
        *("--json", str(file)),
    ]
    assert command.main([workload, *argv]) == 0
    assert command.main([workload, *argv]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in out.splitlines()]
    assert [json.loads(line) for line in file.read_text().splitlines()] == lines
    line = lines[0]
    assert (line["workload"], line["form"], line["shape"]) == (workload, form, shape)
    assert len(line["seconds"]) == 2
    assert line["seconds_min"] <= line["seconds_median"] <= line["seconds_max"]
    assert line["devices"] == {"cpu": 2}
    assert line["workers"] == 2
    assert line["dask_tasks"] > 1
    assert line["bytes"] == shape[0] * shape[1] * {"float64": 8, "uint8": 1}[line["dtype"]]
    assert all(check["ok"] for check in line["checks"])
    assert {"python", "dask", "distributed", "numpy", "cupy"} <= set(line["versions"])
    assert "on 2 x cpu (NumPy" in err
    assert "GB/s" in err
    assert "Traceback" not in err


def test_chunk_size_bounds_the_chunks(client, capsys):
    assert command.main(["array", "--size", "8MB", "--device", "cpu", "--chunk-size", "100kB"]) == 0
    chunks = json.loads(capsys.readouterr().out)["chunks"]
    assert chunks == {"count": 84, "largest": [12, 1000]}


def test_a_wrong_result_is_exit_code_1(client, capsys, monkeypatch):
    monkeypatch.setattr(array_workload, "LOC", 9.0)
    monkeypatch.setattr(command, "run_array", lambda cluster, *_, **__: _wrong(cluster))
    assert command.main(["array", "--size", "8MB", "--device", "cpu"]) == 1
    assert "check failed: mean is 11.0, expected 10.0 within" in capsys.readouterr().err


def _wrong(cluster):
    checks = array_workload.check(11.0 * 250_000, 250_000, (1000, 1000))
    case = Case("array", "tuned", (1000, 1000), "float64", 1, (1000, 1000))
    return record(case, cluster, [1.0], 1, {}, checks)


def test_progress_follows_the_scheduler(client, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(timing, "PROGRESS_INTERVAL_S", 0.01)
    cluster = bench_cluster.inspect(client, "cpu")
    assert run_array(cluster, 8_000_000, repeats=1)["checks"][0]["ok"]


# --- refusing -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workload", "argv", "message"),
    [
        ("array", ["--size", "2XX"], "'2XX' is not a size: a number of bytes with a unit"),
        ("array", ["--size", "-5GB"], "is not a size"),
        ("array", ["--size", "31"], "too small: the least is 32 B"),
        ("array", ["--size", "1MB", "--chunk-size", "0"], "'--chunk-size': '0' is not a size"),
        ("array", ["--size", "1MB", "--scheduler-file", "/none.json"], "/none.json does not exist"),
        ("array", ["--size", "1MB", "--repeats", "0"], "--repeats"),
        ("array", ["--form", "best"], "--form"),
        ("array", ["--frob"], "--frob"),
        ("svd", ["--size", "100"], "too small"),
        ("svd", ["--size", "5MB", "--k", "101"], "k=101 is out of range"),
        ("svd", ["--size", "5MB", "--k", "0"], "k=0 is out of range"),
        ("svd", ["--size", "5MB", "--k", "101", "--form", "stock"], "k=101 is out of range"),
        ("svd", ["--size", "90GB"], "does not fit 2 x cpu"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(client, capsys, workload, argv, message):
    assert command.main([workload, *argv, "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert not out
    last = err.splitlines()[-1]
    assert last.startswith("hpcdask: error: ")
    assert message in last
    assert len(err.splitlines()) == 1


def test_an_error_of_a_worker_is_one_line(client, capsys, monkeypatch):
    def refuse(*_, **__):
        raise WorkloadError("a CUDA worker needs CuPy")

    monkeypatch.setattr(command, "run_array", refuse)
    assert command.main(["array", "--size", "8MB", "--device", "cpu"]) == 2
    assert capsys.readouterr().err == "hpcdask: error: a CUDA worker needs CuPy\n"


@pytest.mark.parametrize(("argv", "runner"), [([], []), (["--device", "cpu"], ["--device", "cpu"])])
def test_without_a_cluster_it_becomes_the_program_of_a_runner(argv, runner, monkeypatch):
    started = []
    monkeypatch.setattr(os, "execv", lambda *command: started.append(command) or sys.exit(7))
    monkeypatch.delitem(dask.config.config, "scheduler-address", raising=False)
    assert command.main(["array", "--size", "1MB", *argv]) == 7
    again = ["array", "--size", "1MB", *argv]
    whole = [sys.executable, "-m", "hpcdask.run", *runner, "-m", "hpcdask.bench", *again]
    assert started == [(sys.executable, whole)]


def test_hpcdask_bench_on_this_machine(tmp_path):
    """Alone: a cluster of its own around it; one JSON line, nothing else on stdout."""
    root = Path(command.__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "hpcdask.bench", "array", "--size", "8MB", "--device", "cpu"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert list(json.loads(done.stdout)["devices"]) == ["cpu"]
    assert "ready" in done.stderr
