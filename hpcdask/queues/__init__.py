"""Clusters whose workers are jobs of a queueing system.

`hpcdask.queues.base.Queue` is the door to one queueing system; a module per system implements it.
"""
