"""``hpcdask submit``: one batch job for a whole allocation, in which the runner is started."""
