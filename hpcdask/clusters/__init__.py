"""Clusters whose workers are jobs of a queueing system."""
