"""Clusters whose workers are jobs of a queueing system.

`hpcdask.queues.base.Queue` is a queueing system; a module per system implements it.
"""
