"""What goes from process to process is the same on the other side."""

from __future__ import annotations

import json

import pytest

from hpcdask.bootstrap import orders
from hpcdask.comm.fabric import Fabric, Interface, Port
from hpcdask.comm.ucx_config import UcxInstall
from hpcdask.gpu.devices import Gpu
from hpcdask.gpu.memory_plan import MemoryPlan
from hpcdask.node.gpu_probe import ProbeResult
from hpcdask.node.placement import Inventory, WorkerPlacement
from hpcdask.runner import protocol
from hpcdask.runner.protocol import RankReport

GPU = Gpu("GPU-1", "H100", 80, (0, 1))
FABRIC = Fabric(
    interfaces=(Interface("ib0", "10.0.0.1", "infiniband", 400_000),),
    infiniband=(Port("mlx5_0:1", "InfiniBand", "ACTIVE", 400_000, True),),
    nvlink=(("GPU-1", "GPU-2"),),
    ucx=UcxInstall("0.45", "1.21", "system", ("cuda", "ib")),
)
SEEN = Inventory(3, "node", 1, (GPU,), (0, 1), 99, None)
ON_GPU = WorkerPlacement("a", GPU, (0,), 1, 0, device_memory=MemoryPlan(libraries=("cupy",)))


@pytest.mark.parametrize(
    "record",
    [
        ProbeResult((GPU,), FABRIC),
        RankReport(3, "node", 7, inventory=SEEN, fabric=FABRIC),
        RankReport(3, "node", 7, "no GPU"),
    ],
)
def test_a_record(record):
    assert type(record).from_json(json.loads(json.dumps(record.to_json()))) == record


@pytest.mark.parametrize(
    "message",
    [
        protocol.StartWorkers("tls://a:1", [ON_GPU, WorkerPlacement("b", None, (), 1, 0)]),
        protocol.WorkerFailed(1, None, "no GPU"),
        protocol.StartScheduler("a", None, "tls", {"tls_ca_file": "text"}, ":0", "/tmp", None),
        protocol.Silence(),
    ],
)
def test_a_message(message):
    assert orders.read(json.loads(json.dumps(message.to_json()))) == message
