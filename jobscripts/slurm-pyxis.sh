#!/bin/bash
# A program in a container of enroot, where the site has SLURM's plugin Pyxis.
#
#     sbatch slurm-pyxis.sh image.sqsh script.py [args]
#
# The image is a file of enroot import, or a name such as nvcr.io#nvidia/pytorch:25.10-py3, and has
# hpcdask in it. Adapt the lines below to the site; a directive with two ## is off. Some sites take
# --gpus-per-node=4 instead of --gres=gpu:4.
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

image=${1:?name an image}
shift
[ $# -gt 0 ] || set -- -m hpcdask.bench array
# sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# The ranks of several nodes meet through a file in your home folder
exec srun -K --container-image="$image" --container-mount-home \
    --container-mounts="$PWD:$PWD" --container-workdir="$PWD" \
    python -m hpcdask.run ${HPCDASK_OPTIONS:-} "$@"
