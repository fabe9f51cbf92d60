"""Ranks on GPUs and on the CPU in one run: what is accepted, and who gets what."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from click.testing import CliRunner

from hpcdask.bootstrap.ranks import Rank
from hpcdask.cli import main
from hpcdask.comm.fabric import Fabric
from hpcdask.comm.transport import Choice
from hpcdask.comm.ucx_config import UcxInstall
from hpcdask.errors import DeviceError, HpcdaskError, UsageError
from hpcdask.gpu.devices import Gpu
from hpcdask.node.placement import Inventory
from hpcdask.runner import plan
from hpcdask.runner.agent import check_request
from hpcdask.runner.options import RunRequest
from hpcdask.runner.plan import make_plan
from hpcdask.spec.specs import RunSpec

GIB = 1 << 30
FIRST = Rank(0, 6, 0, 6, "n1", "srun", "launch")


def views(*seen: tuple[str, list[int]], cores: int = 12) -> dict[int, Inventory]:
    """One view per rank: its host, and the numbers of the GPUs it sees."""
    local: Counter[str] = Counter()
    found = {}
    for rank, (host, numbers) in enumerate(seen):
        gpus = tuple(Gpu(f"GPU-{host}-{i}", "H100", 80 << 30) for i in numbers)
        all_cores = tuple(range(cores))
        found[rank] = Inventory(rank, host, local[host], gpus, all_cores, 60 * GIB)
        local[host] += 1
    return found


def placed(seen: dict[int, Inventory], groups: str, **more) -> list[str]:
    """By rank, the number of each worker's GPU, or its threads on the CPU."""
    rank = more.pop("rank", FIRST)
    found = make_plan(RunSpec(groups=groups, **more), rank, seen, job="7.r0").placements
    words = [
        " ".join(one.gpu.uuid[-1] if one.gpu else f"{one.nthreads} threads" for one in group)
        for _, group in sorted(found.items())
    ]
    limits = {one.memory_limit for group in found.values() for one in group}
    assert sum(len(group) for group in found.values()) * max(limits) <= 120 * GIB
    return words


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("gpu:4 cpu:2", ("gpu:4", "cpu:2")),
        ("cpu:2,gpu:4", ("cpu:2", "gpu:4")),
        ({"gpu": 4, "cpu": 2}, ("gpu:4", "cpu:2")),
        ("cpu:16", ("cpu:16",)),
        ("auto", ("auto",)),
        ("", ()),
        (None, ()),
    ],
)
def test_forms(given, expected):
    spec = RunSpec(groups=given)
    assert spec.groups == expected
    assert len(spec.kinds()) == {(): 0, ("auto",): 0, ("cpu:16",): 16}.get(expected, 6)


@pytest.mark.parametrize(
    "given", ["gpu", "gpu:0", "gpu:four", "gpu:2 gpu:2", "auto cpu:1", "tpu:4", {"gpu": -1}]
)
def test_bad_forms_name_the_accepted_ones(given):
    with pytest.raises(UsageError, match=r'--groups: .* Accepted: "gpu:4 cpu:2", auto'):
        RunSpec(groups=given)


def test_ranks_of_a_node_in_the_order_that_is_given():
    """A GPU each; the others share the threads that are left."""
    seen = views(*[("n1", [0, 1, 2, 3])] * 6)
    cpu = "4 threads"  # of (12 - 4) / 2
    assert placed(seen, "gpu:4 cpu:2") == ["0", "1", "2", "3", cpu, cpu]
    assert placed(seen, "cpu:2 gpu:4") == [cpu, cpu, "0", "1", "2", "3"]
    assert placed(seen, "gpu:4 cpu:2", nthreads=2)[-1] == "2 threads"
    assert placed(seen, "cpu:6") == ["2 threads"] * 6


def test_each_node_has_the_same_groups():
    seen = views(*[(host, [0]) for host in ("n1", "n2") for _ in range(2)])
    assert placed(seen, "gpu:1 cpu:1") == ["0", "11 threads"] * 2
    seen = views(("n1", [0]), ("n2", [0]), ("n1", [0]), ("n2", [0]))  # a cyclic distribution
    assert placed(seen, "gpu:1 cpu:1") == ["0", "0", "11 threads", "11 threads"]


def test_started_by_hand_numbers_are_of_workers():
    alone = Rank(0, 1, 0, 1, "n1", "none", "launch")
    seen = views(("n1", [0, 1]))
    assert placed(seen, "gpu:2 cpu:1", rank=alone) == ["0 1 10 threads"]
    assert placed(seen, "cpu:1 gpu:1", rank=alone) == ["11 threads 0"]
    assert placed(views(("n1", [])), "cpu:1", rank=alone) == ["12 threads"]
    with pytest.raises(DeviceError, match="n1 has 3 workers for GPUs but only 2 distinct"):
        placed(seen, "gpu:3", rank=alone)
    assert placed(seen, "gpu:3", rank=alone, oversubscribe=True) == ["0 1 0"]


def test_auto_is_what_each_rank_sees():
    seen = views(("n1", [0, 1]), ("n1", [0, 1]), ("n2", []), ("n2", []))
    assert placed(seen, "auto") == ["0", "1", "6 threads", "6 threads"]
    with pytest.raises(DeviceError, match="none of the ranks sees a GPU"):
        placed(views(("n1", []), ("n1", [])), "auto")
    with pytest.raises(DeviceError, match="3 workers for GPUs but only 2 distinct GPUs"):
        placed(views(*[("n1", [0, 1])] * 3), "auto")
    with pytest.raises(DeviceError, match="rank 2 does not see a GPU on n2"):
        placed(seen, "")  # without the option, a mix is no fallback to the CPU


@pytest.mark.parametrize(
    ("seen", "groups", "expected"),
    [
        ([("n1", [0, 1])] * 3, "gpu:2 cpu:2", "is for 4 ranks .* n1 has 3 .2 GPUs, 12 cores.*: st"),
        ([("n1", [0])] * 2 + [("n2", [0])], "gpu:1 cpu:1", "n2 has 1 .1 GPU, 12 cores.*: start 2"),
        (
            [("n1", [0, 1])] * 4,
            "gpu:3 cpu:1",
            "n1 has 3 workers .* only 2 distinct GPUs: start",
        ),
        ([("n1", [])] * 2, "gpu:1 cpu:1", "wants 1 GPU on n1, and rank 0 sees none. This job"),
        ([("n1", [0]), ("n1", [])], "gpu:2", "wants 2 GPUs on n1, and rank 1 sees none"),
    ],
)
def test_what_does_not_fit_is_told_by_node(seen, groups, expected):
    with pytest.raises(HpcdaskError, match=expected):
        placed(views(*seen), groups)


def test_workers_on_the_cpu_take_tcp_beside_ucx(monkeypatch):
    """Among each other, those on GPUs have what they would have without groups."""
    gpus = ("GPU-n1-0", "GPU-n1-1")
    fabric = Fabric(gpus=gpus, nvlink=(gpus,), ucx=UcxInstall(distributed_ucxx="1"))
    monkeypatch.setattr(
        plan, "choose", lambda spec, nodes: chosen.append(nodes) or real("ucx", "NVLink")
    )
    real, chosen = Choice, []
    seen = views(*[("n1", [0, 1])] * 3)
    seen = {index: replace(one, fabric=fabric) for index, one in seen.items()}
    made = make_plan(RunSpec(groups="gpu:2 cpu:1"), FIRST, seen, job=None)
    assert [one.protocol for group in made.placements.values() for one in group] == [
        *("ucx", "ucx", "tcp")
    ]
    assert [len(node.gpus) for node in chosen[0]] == [1, 1]
    line = made.describe(RunSpec(), 3)
    assert line.startswith("3 workers on 1 node (2 x H100, 1 x CPU), ucx between workers")


def test_the_device_is_said_once():
    with pytest.raises(UsageError, match="--device cpu that all compute on the same: leave one"):
        check_request(RunRequest(RunSpec(groups="gpu:1 cpu:1", device="cpu")))


def test_submit_says_where_groups_go(tmp_path):
    script = tmp_path / "x.py"
    script.touch()

    def submit(*words: str) -> str:
        dry = ["submit", "--dry-run", "--system", "slurm", "--gpus-per-node", "4"]
        done = CliRunner().invoke(main, [*dry, *words, str(script)])
        return done.output + str(done.exception or "")

    assert '--run "--groups …"' in submit("--groups", "gpu:4 cpu:2")
    refused = submit("--run", "--groups 'gpu:4 cpu:2'")
    assert "is for 6 ranks per node, and hpcdask submit starts 4" in refused
    assert "--ntasks-per-node=6" in refused
    assert "--groups 'gpu:3 cpu:1'" in submit("--run", "--groups 'gpu:3 cpu:1'")
    assert "--groups auto" in submit("--run", "--groups auto")
