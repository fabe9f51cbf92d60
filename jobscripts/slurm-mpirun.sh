#!/bin/bash
# A program on all GPUs of one node: one Dask worker per GPU, started by mpirun.
#
#     sbatch slurm-mpirun.sh
#
# Change the partition, the account, the numbers and the last line.
#SBATCH --job-name=dask
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -e

# module load cuda openmpi; source ~/venv/bin/activate

exec mpirun -n "$SLURM_NTASKS" ${MPIRUN_OPTIONS:-} python -m hpcdask.run ${HPCDASK_OPTIONS:-} \
    -m hpcdask.workloads.svd ${1:+--size "$1"}
