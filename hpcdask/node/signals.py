"""First signal ends the run, the second at once."""

from __future__ import annotations

import signal

#: Signals that mean something to the program only.
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


#: A launcher and a terminal may both send the first signal.
SAME_SIGNAL_S = 0.3


ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
