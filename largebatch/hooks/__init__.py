"""The hooks that watch a run. `build` calls them in this order:

    Guards                  guards.py         a run that is given up goes no further into the other hooks
    Ema                     ema.py            the checkpoint includes the average, and Log writes its accuracy down
    Checkpoint              checkpointing.py  StopEarly plans with the time that a save takes
    StopEarly               stop_early.py     ends the run at a signal or before the job's time is over
    Profile                 profile.py        begins a step after the other hooks, so that it records none of them
    Log                     log.py            does not count the time of the hooks before it as training time

Log hands its rows to the sinks (sinks.py): a progress bar, CSV files (tables.py), TensorBoard, a picture (curves.py).
"""

from largebatch.hooks.checkpointing import Checkpoint
from largebatch.hooks.ema import Ema, check_half_life
from largebatch.hooks.guards import Guards
from largebatch.hooks.log import Log
from largebatch.hooks.profile import Profile
from largebatch.hooks.sinks import Csv, Curves, Progress, Sink, TensorBoard
from largebatch.hooks.stop_early import Signals, StopEarly, end_time

__all__ = [
    "Checkpoint",
    "Csv",
    "Curves",
    "Ema",
    "Guards",
    "Log",
    "Profile",
    "Progress",
    "Signals",
    "Sink",
    "StopEarly",
    "TensorBoard",
    "check_half_life",
    "end_time",
]
