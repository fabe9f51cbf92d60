#!/bin/bash
# A program that asks for its GPUs itself, one job for each, where whole nodes are hard to get.
#
#     sbatch slurm-job-per-gpu.sh
#
# This job needs no GPU: it holds the program and the scheduler. The jobs of the workers come, go and
# are replaced while it runs. Put your own work in place of the last three lines of the program. Adapt
# the lines below, and the keywords, to the site; a directive with two ## is off. The nodes must be
# allowed to call sbatch.
##SBATCH --partition=cpu
##SBATCH --account=abc
#SBATCH --job-name=dask-program
#SBATCH --ntasks=1
#SBATCH --cpus-per-task=4
##SBATCH --mem=16G
#SBATCH --time=02:00:00
set -e

# module load cuda; source ~/venv/bin/activate

exec python - <<'END'
from hpcdask import SLURMCUDACluster

# of each job: add queue= (the partition) and account= where the site wants them
job = dict(cores=8, memory="64GiB", walltime="01:00:00")
with SLURMCUDACluster(**job) as cluster, cluster.get_client() as client:
    cluster.adapt(minimum=1, maximum=8)
    futures = client.map(lambda n: n**2, range(1000))
    total = client.submit(sum, futures).result()
    print("the sum is", total)
END
