"""The exceptions that all ranks of a run raise together."""

import os


class Stopped(Exception):
    """Raised on every rank when one of them cannot go on; the message names the causes."""

    exit_code = 2


class StoppedEarly(Stopped):
    """Raised on every rank when a run was told to end before it is complete; the run can be resumed."""

    exit_code = os.EX_TEMPFAIL  # 75
