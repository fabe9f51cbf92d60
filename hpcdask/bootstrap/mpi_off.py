"""What the fork server of a process pool imports first, in programs and Dask tasks of a run.

From Python 3.14 on pools start their processes from a new Python, which knows nothing of what was
set in the program. A variable of the environment would know it, but so would the ranks of an
``mpiexec`` or an ``sbatch`` that the program calls.
"""

from .ranks import leave_mpi_alone

leave_mpi_alone()
