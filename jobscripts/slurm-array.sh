#!/bin/bash
# The same program many times, each time with a cluster of its own: parameters, folds, seeds.
#
#     sbatch slurm-array.sh script.py [args]
#
# The program reads which one it is from the variable SLURM_ARRAY_TASK_ID. Each element has all GPUs of
# its job, on one node. Adapt the lines below to the site; a directive with two ## is off. %2: two of
# them at a time.
##SBATCH --partition=gpu
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --array=0-3%2
#SBATCH --nodes=1
#SBATCH --ntasks=1
#SBATCH --gres=gpu:2
#SBATCH --cpus-per-task=16
##SBATCH --mem=0
#SBATCH --time=01:00:00
set -e

# module load cuda; source ~/venv/bin/activate

# without srun: one rank, which starts a worker for each GPU of the job
exec python -m hpcdask.run ${HPCDASK_OPTIONS:-} "${@:?name a program}"
