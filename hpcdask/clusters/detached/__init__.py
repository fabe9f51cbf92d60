"""Clusters whose scheduler and control of jobs run in a process of their own."""
