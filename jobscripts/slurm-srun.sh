#!/bin/bash
# A program on GPUs of several nodes: one Dask worker per GPU, started by srun.
#
#     sbatch slurm-srun.sh script.py [args]
#
# Without a program it measures the nodes. Adapt the lines below to the site; a directive with two ##
# is off. --ntasks-per-node is the number of GPUs per node; some sites take --gpus-per-node=4 instead
# of --gres=gpu:4.
##SBATCH --partition=gpu
##SBATCH --account=abc
#SBATCH --job-name=dask
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --cpus-per-task=8
##SBATCH --mem=0
#SBATCH --time=01:00:00
# A minute or two before the time is over the program gets SIGTERM, and 25 s to write what it has.
#SBATCH --signal=TERM@60
set -e

# module load cuda; source ~/venv/bin/activate

[ $# -gt 0 ] || set -- -m hpcdask.bench array
# sbatch's --cpus-per-task does not reach srun by itself in SLURM 22.05 to 23.02
export SRUN_CPUS_PER_TASK=${SLURM_CPUS_PER_TASK:-1}
# -K: when one rank is lost, the others end as well
exec srun -K python -m hpcdask.run ${HPCDASK_OPTIONS:-} "$@"
