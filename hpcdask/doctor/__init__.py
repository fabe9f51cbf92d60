"""``hpcdask doctor``: a check, before anything runs, that Dask will be as fast as the hardware.

Facts are gathered first, each group in a process of its own that has a deadline: a driver or a
file system that hangs is then a finding, too. What the facts mean is decided afterwards, by
functions without an effect.
"""
