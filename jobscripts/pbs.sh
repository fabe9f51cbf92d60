#!/bin/bash
# A program on GPUs of several nodes with PBS: one Dask worker per GPU, started by mpirun.
#
#     qsub -v PROGRAM="script.py args" pbs.sh
#
# Without a program it measures the nodes. Adapt the lines below to the site; a directive with two ##
# is off. mpiprocs is the number of GPUs per node, and -n at the end that of all. Torque has
# -l nodes=2:ppn=32:gpus=4 in place of select.
##PBS -q gpu
##PBS -A abc
#PBS -N dask
#PBS -l select=2:ncpus=32:mpiprocs=4:ngpus=4
#PBS -l walltime=01:00:00
#PBS -j oe
set -e
cd "${PBS_O_WORKDIR:-.}"

# PBS does not pass your environment on: module load cuda openmpi; source ~/venv/bin/activate

exec mpirun -n 8 python -m hpcdask.run ${HPCDASK_OPTIONS:-} ${PROGRAM:--m hpcdask.bench array}
