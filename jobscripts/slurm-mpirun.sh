#!/bin/bash
# A program on all GPUs of one node: one Dask worker per GPU, started by mpirun.
#
#     sbatch slurm-mpirun.sh script.py [args]
#
# Without a program it measures the node. Adapt the lines below to the site; a directive with two ##
# is off. --ntasks is the number of GPUs; some sites take --gpus-per-node=4 instead of --gres=gpu:4.
##SBATCH --partition=gpu
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --nodes=1
#SBATCH --ntasks=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
##SBATCH --mem=0
#SBATCH --time=01:00:00
set -e

# module load cuda openmpi; source ~/venv/bin/activate

[ $# -gt 0 ] || set -- -m hpcdask.bench svd
exec mpirun -n "$SLURM_NTASKS" python -m hpcdask.run ${HPCDASK_OPTIONS:-} "$@"
