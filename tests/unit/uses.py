"""Right and wrong uses of the public names, for type checkers; nobody runs it.

A line is right unless its comment has words of what mypy says of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import assert_type

from distributed import Client, Security

import hpcdask
from hpcdask import SLURMCUDACluster
from hpcdask.client.connect import connect

with SLURMCUDACluster(4, cores=8, memory="64GiB", walltime="02:00:00", queue="gpu") as cluster:
    assert_type(cluster, SLURMCUDACluster)
    cluster.scale(jobs=2)
    cluster.scael(2)  # wrong: "SLURMCUDACluster" has no attribute "scael"


async def use() -> None:
    async with SLURMCUDACluster(asynchronous=True) as cluster:
        assert_type(cluster, SLURMCUDACluster)


SLURMCUDACluster(gpu_request="gres", job_cpu=4, memory=2**36, nodes_per_job=2, protocol="tls://")
SLURMCUDACluster(poll_interval=timedelta(seconds=5), security=False, silence_logs=False)
SLURMCUDACluster(security=Security(), memory_limit="32GiB", rmm_pool_size=0.8, lifetime="50min")
SLURMCUDACluster(job_extra_directives=["--qos=x"], preload=["a"], resources={"GPU": 1}, nanny=True)
SLURMCUDACluster(walltme="1")  # wrong: Unexpected keyword argument "walltme"
SLURMCUDACluster(walltime=7200)  # wrong: Argument "walltime" to "SLURMCUDACluster"
SLURMCUDACluster(job_script_prologue="module load x")  # wrong: Argument "job_script_prologue"
SLURMCUDACluster(device="gpu")  # wrong: Argument "device" to "SLURMCUDACluster"
SLURMCUDACluster(protocol="ucxx")  # wrong: Argument "protocol" to "SLURMCUDACluster"
SLURMCUDACluster(gpu_request="gpu")  # wrong: Argument "gpu_request" to "SLURMCUDACluster"
SLURMCUDACluster(nanny=False)  # wrong: Argument "nanny" to "SLURMCUDACluster"
SLURMCUDACluster(memory=["1GiB"])  # wrong: Argument "memory" to "SLURMCUDACluster"
hpcdask.PBSCUDACluster(account="a", resource_spec="select=1")
hpcdask.PBSCUDACluster(gpu_request="gres")  # wrong: Unexpected keyword argument "gpu_request"
hpcdask.MoabCUDACluster(account="a", walltime="1:00:00")
hpcdask.LSFCUDACluster(project="a", lsf_units="mb", ncpus=2, mem=10**9)
hpcdask.LSFCUDACluster(account="a")  # wrong: Unexpected keyword argument "account"
hpcdask.SGECUDACluster(project="a", resource_spec="h_vmem=1G")
hpcdask.SGECUDACluster(ncpus=2)  # wrong: Unexpected keyword argument "ncpus"
hpcdask.OARCUDACluster(memory_per_core_property_name="memcore")
hpcdask.OARCUDACluster(disk="1GB")  # wrong: Unexpected keyword argument "disk"
hpcdask.HTCondorCUDACluster(disk="1GB", job_extra_directives={"+Group": "a"})
hpcdask.HTCondorCUDACluster(walltime="1:00")  # wrong: Unexpected keyword argument "walltime"
hpcdask.HTCondorCUDACluster(job_extra_directives=["a"])  # wrong: Argument "job_extra_directives"
hpcdask.LocalCUDAJobCluster(2, device="cpu", name="mine").adapt(maximum=4)
hpcdask.LocalCUDAJobCluster("2")  # wrong: Argument 1 to "LocalCUDAJobCluster"

with hpcdask.Runner(memory_limit="1GiB", timeout="5min", workers_min=2) as runner:
    runner.close()
    runner.stop()  # wrong: "Runner" has no attribute "stop"
hpcdask.Runner(time_out=3)  # wrong: Unexpected keyword argument "time_out"
hpcdask.Runner(device="gpu")  # wrong: Argument "device" to "Runner"
hpcdask.Runner(oversubscribe="yes")  # wrong: Argument "oversubscribe" to "Runner"
hpcdask.initialize(nanny=None, interface=None, worker_options={"resources": {"GPU": 1}}, exit=False)
hpcdask.initialize(nanny=False)  # wrong: Argument "nanny" to "initialize"
hpcdask.initialize(memory="1GB")  # wrong: Unexpected keyword argument "memory"

assert_type(hpcdask.connect("cluster.json", timeout=3, set_as_default=False), Client)
assert_type(connect(), Client)
hpcdask.connect(3)  # wrong: Argument 1 to "connect"
hpcdask.LocalCUDACluster()  # wrong: Module has no attribute "LocalCUDACluster"
