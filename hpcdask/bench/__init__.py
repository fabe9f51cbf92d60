"""Measuring what a cluster delivers: the workloads, the limits of the hardware, the report."""
