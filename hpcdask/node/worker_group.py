"""Starts, watches and closes the workers of a node."""

from __future__ import annotations

#: Seconds a worker gets to close once the run is over.
CLOSE_DEADLINE_S = 2.0
