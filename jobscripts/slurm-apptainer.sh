#!/bin/bash
# A program in an Apptainer image: srun outside, one container per rank.
#
#     sbatch slurm-apptainer.sh image.sif script.py [args]
#
# The image has Python, hpcdask and the CUDA libraries; the driver comes from the host (--nv). Adapt
# the lines below to the site; a directive with two ## is off. Some sites take --gpus-per-node=4
# instead of --gres=gpu:4. With an older Singularity, the command is singularity.
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

# module load apptainer

image=${1:?name an image}
shift
[ $# -gt 0 ] || set -- -m hpcdask.bench array
# sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# Your home and the current folder are there by default; others need --bind /scratch
exec srun -K apptainer exec --nv "$image" python -m hpcdask.run ${HPCDASK_OPTIONS:-} "$@"
