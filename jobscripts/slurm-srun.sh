#!/bin/bash
# A program on GPUs of several nodes: one Dask worker per GPU, started by srun.
#
#     sbatch slurm-srun.sh
#
# Change the partition, the account, the numbers and the last line.
#SBATCH --job-name=dask
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
# One minute before the walltime the program gets SIGTERM, and time to write what it has.
#SBATCH --signal=TERM@60
set -e

# module load cuda; source ~/venv/bin/activate

# sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
# -K: when one rank is lost, the others end as well
exec srun -K python -m hpcdask.run ${HPCDASK_OPTIONS:-} -m hpcdask.workloads.array ${1:+--size "$1"}
