"""The page: what is on it, what is not, and that it needs nothing but itself."""

from __future__ import annotations

import copy
import json
import logging
import re
from html.parser import HTMLParser

import pytest

import browser
from hpcdask.bench import charts, report
from hpcdask.errors import UsageError

NASTY = "<img src=x onerror=alert(1)> </script> 'q' \"r\" &amp;"


def record(workload="array", form="tuned", median=1.0, **more):
    """What the bench writes."""
    return {
        "workload": workload,
        "form": form,
        "label": f"{workload}, {form}",
        "shape": [500_000, 500_000],
        "dtype": "float64",
        "bytes": 2 * 10**12,
        "seconds": [0.9 * median, median, 1.2 * median],
        "seconds_median": median,
        "seconds_min": 0.9 * median,
        "seconds_max": 1.2 * median,
        "GB/s": 2000 / median,
        "dask_tasks": 5861,
        "devices": {"NVIDIA H200": 8},
        "workers": 8,
        "threads": 8,
        "hosts": ["n0"],
        "protocols": ["tls"],
        "result": {},
        "checks": [{"name": "mean", "value": 11.0, "expected": 11.0, "tolerance": 0.1, "ok": True}],
        "versions": {"dask": "2026.7.1", "cupy": None},
        "date": "2026-11-22T10:11:12+00:00",
        **more,
    }


def limit(seconds, fraction, by="memory"):
    """A limit as in a record."""
    return {"seconds": seconds, "by": by, "fraction": fraction, "parts": {by: seconds}}


def exchange(names=("gpu1-0", "gpu1-1")):
    pairs = range(len(names))
    return record(
        "exchange",
        "stock",
        0.05,
        result={
            "names": list(names),
            "GB/s": [[None if i == j else 190.0 - i for j in pairs] for i in pairs],
            "transport": [[None if i == j else "ucx" for j in pairs] for i in pairs],
            "slow": [{"text": "gpu1-1 to gpu1-0: slow"}],
            "all_reduce": {"missing": "no NCCL"},
        },
    )


GPUS = {
    "gpu_hours": 0.012,
    "utilisation": 87.3,
    "peak_memory": 2**34,
    "energy_kwh": None,
    "nvlink_bytes": None,
    "problems": ["idle: n1 GPU <1>"],
}
STARTUP = {
    key: value
    for key, value in record("startup", "hpcdask", 1.6).items()
    if key not in ("label", "bytes", "shape", "dtype", "GB/s", "dask_tasks")
} | {"phases": [{"name": "imports", "seconds": 0.5}, {"name": "CUDA context", "seconds": 1.1}]}
LIMITS = record() | {"workload": "limits", "rates": {"memory": 3.1e13, "matrix_float64": 4.2e11}}
ALL = [
    LIMITS,
    record(limit=limit(0.6, 0.6, "random")),
    record("svd", limit=limit(0.2, 0.2), gpus=GPUS),
    exchange(),
    STARTUP,
]


class Page(HTMLParser):
    """Tags with their attributes, and all text outside scripts and styles."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self._inside = [], "", ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside not in ("script", "style"):
            self.text += data


@pytest.fixture(scope="module")
def whole():
    return report.html(ALL)


def test_it_loads_nothing(whole):
    for tag, attributes in Page(whole).tags:
        assert tag not in ("link", "iframe", "object", "base", "img")
        assert not {"src", "srcset", "data", "href"} & set(attributes)
    assert len(whole) < 2_000_000


def test_everything_is_told(whole):
    text = Page(whole).text
    for what in (
        "hpcdask bench: 8 x NVIDIA H200",
        "8 workers, 8 threads on n0 over tcp with TLS",
        "measured 2026-11-22 10:11:12 UTC",
        "dask 2026.7.1",
        "1 of 2 workloads reaches half of what this hardware allows, or more. Nearest is array,",
        "svd, tuned: idle: n1 GPU <1>",
        "svd, tuned runs at 20 % of memory speed",
        "31.0 TB/s",
        "420.0 GFLOP/s",
        "500,000 x 500,000 float64",
        "900.00 ms to 1.20 s",
        "60 % of generator speed",
        "5,861",
        "gpu1-1 to gpu1-0: slow",
        "all-reduce left out: no NCCL",
        "87 %",
        "16.00 GiB",
    ):
        assert what in text
    assert text.index("gpu1-1 to gpu1-0: slow") < text.index("svd, tuned runs at")
    for what in ("cupy", "wrong", "None", "over NVLink"):
        assert what not in text
    assert "CUDA context" in whole


@pytest.mark.parametrize(
    ("records", "sections"),
    [
        ([record()], ["Times"]),
        ([exchange()], ["What to look at", "Times", "Exchange between workers"]),
        ([STARTUP], ["Times", "Where the time goes"]),
        ([record(gpus={**GPUS, "problems": []})], ["Times", "GPUs during the workloads"]),
        ([LIMITS], ["What the hardware allows"]),
    ],
)
def test_sections_without_data_are_left_out(records, sections):
    assert re.findall(r"<h2>(.*?)</h2>", report.html(records)) == sections


def test_a_single_workload_near_its_limit_has_nothing_to_look_at():
    page = Page(report.html([record("svd", limit=limit(0.9, 0.9, "link"))])).text
    assert "svd, tuned runs at 90 % of exchange speed." in page
    assert "No check failed, and nothing stands out." in page


def test_failed_checks_stand_out():
    check = {"name": "first value", "value": 3.0, "expected": 4.0, "tolerance": 0.5, "ok": False}
    page = report.html([record(), record("svd", checks=[check])])
    assert "<b>svd, tuned</b>: first value is 3.0, expected 4.0 within 0.5" in page
    assert "wrong: median, range" in page


@pytest.mark.parametrize("n_workers", [2, 64])
def test_the_heat_map_has_a_cell_for_each_pair(n_workers):
    names = [f"w{i}" for i in range(n_workers)]
    plot = charts.heat_map(exchange(names)["result"])
    cells = plot.renderers[0].data_source.data
    assert len(cells["rate"]) == n_workers * (n_workers - 1)
    assert (cells["sends"][0], cells["receives"][0], cells["over"][0]) == ("w0", "w1", "ucx")
    assert any(cells["text"]) == (n_workers == 2)


def test_everything_is_escaped(whole):
    nasty = copy.deepcopy(ALL)
    nasty[0].update(devices={NASTY: 1}, hosts=[NASTY], versions={NASTY: NASTY}, date=NASTY)
    nasty[1]["checks"] = [
        {"name": NASTY, "value": NASTY, "expected": NASTY, "tolerance": NASTY, "ok": False}
    ]
    nasty[2].update(label=NASTY, dtype=NASTY)
    nasty[3]["result"].update(names=[NASTY, "b"], slow=[{"text": NASTY}])
    nasty[4]["phases"][0]["name"] = NASTY
    page = report.html(nasty)
    assert not any(tag == "img" for tag, _ in Page(page).tags)
    assert page.count("</script>") == whole.count("</script>")
    assert Page(page).text.count("onerror=alert") > 10


def test_write(tmp_path):
    path = tmp_path / "x.html"
    report.write([record()], path)
    assert path.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(UsageError, match=r"no/x.html cannot be written: No such file"):
        report.write([record()], tmp_path / "no" / "x.html")
    with pytest.raises(UsageError, match="no workload has finished"):
        report.html([])


def test_bokeh_has_no_complaints(caplog):
    with caplog.at_level(logging.WARNING):
        report.html(ALL)
    assert not caplog.records


WATCH = """<script>
const errors = [];
addEventListener('error', e => errors.push(e.message));
console.error = (...all) => errors.push(all.join(' '));
addEventListener('load', () => setTimeout(() => {
  const told = document.createElement('pre');
  told.id = 'told';
  told.textContent = JSON.stringify({
    errors,
    roots: Bokeh.documents.flatMap(d => d.roots()).length,
    idle: Bokeh.documents.every(d => d.is_idle),
    loaded: performance.getEntriesByType('resource').map(e => e.name),
  });
  document.body.append(told);
}, 500));
</script>"""


def test_a_browser_draws_it_without_errors(tmp_path, whole):
    page = tmp_path / "x.html"
    page.write_text(whole.replace("<head>", f"<head>{WATCH}"))
    text = browser.run(tmp_path, "--virtual-time-budget=3000", "--dump-dom", page.as_uri())
    told = json.loads(re.search(r'<pre id="told">(.*?)</pre>', text, re.DOTALL)[1])
    assert told == {"errors": [], "roots": 3, "idle": True, "loaded": []}
