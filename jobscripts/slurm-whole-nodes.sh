#!/bin/bash
# A program on all GPUs and cores of whole nodes, however many those are.
#
#     sbatch slurm-whole-nodes.sh script.py [args]
#
# Without a program it measures the nodes. Adapt the lines below to the site; a directive with two ##
# is off. Some sites take --gpus-per-node=4 instead of --gres=gpu:4; on some, --exclusive brings the
# GPUs without either.
##SBATCH --partition=gpu
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --nodes=2
#SBATCH --exclusive
#SBATCH --gres=gpu:4
#SBATCH --mem=0
#SBATCH --time=01:00:00
set -e

# module load cuda; source ~/venv/bin/activate

[ $# -gt 0 ] || set -- -m hpcdask.bench array
gpus=${SLURM_GPUS_ON_NODE:?SLURM gave this job no GPU: see --gres}
exec srun -K -n $((SLURM_JOB_NUM_NODES * gpus)) --ntasks-per-node="$gpus" \
    --cpus-per-task=$((SLURM_CPUS_ON_NODE / gpus)) python -m hpcdask.run ${HPCDASK_OPTIONS:-} "$@"
