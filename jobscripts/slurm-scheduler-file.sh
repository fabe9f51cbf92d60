#!/bin/bash
# A cluster that stays up for a notebook or programs elsewhere, until the time is over.
#
#     sbatch slurm-scheduler-file.sh cluster.json
#
# When the file is there, a program that sees the same folder connects with
#
#     client = hpcdask.connect("cluster.json")
#
# and client.shutdown() or scancel ends the cluster.
#
# Adapt the lines below to the site. A directive with two ## is off. --ntasks-per-node is the number
# of GPUs per node; some sites take --gpus-per-node=4 instead of --gres=gpu:4.
##SBATCH --partition=gpu
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
##SBATCH --mem=0
#SBATCH --time=01:00:00
set -e

# module load cuda; source ~/venv/bin/activate

# sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# -K: when one rank is lost, the others end as well
exec srun -K python -m hpcdask.run ${HPCDASK_OPTIONS:-} --scheduler-file "${1:?name a file}"
