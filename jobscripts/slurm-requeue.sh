#!/bin/bash
# A program that may be preempted: SLURM puts the job back into the queue, and it starts again.
#
#     sbatch slurm-requeue.sh script.py [args]
#
# At preemption the program gets SIGTERM, and the site's grace time (at most 25 s) to write what it
# has. In its next life SLURM_RESTART_COUNT is 1 or more: the program then reads what it wrote.
# Adapt the lines below to the site; a directive with two ## is off. The partition or --qos is
# one that may be preempted.
##SBATCH --partition=preemptible
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --requeue
#SBATCH --open-mode=append
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
exec srun -K python -m hpcdask.run ${HPCDASK_OPTIONS:-} "${@:?name a program}"
