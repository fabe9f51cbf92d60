#!/bin/bash
# A cluster that stays up for programs elsewhere, until it is cancelled or the time is over.
#
#     sbatch slurm-scheduler-file.sh ~/cluster.json
#
# Then, where that folder is shared: client = hpcdask.connect("~/cluster.json")
#SBATCH --job-name=dask
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
#SBATCH --time=01:00:00
set -e

# module load cuda; source ~/venv/bin/activate

export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
exec srun -K python -m hpcdask.run ${HPCDASK_OPTIONS:-} --scheduler-file "${1:?name a file}"
