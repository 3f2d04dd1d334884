"""The hooks that watch a run. `assembly` lets them run in this order, for these reasons:

    Guards          guards.py          counts skipped steps; if it stops the run, no other hook runs
    Divergence      divergence.py      stops a run whose loss diverges, or goes back to an older checkpoint
    Average         ema.py             averages the weights; Checkpoint saves them, Log writes their accuracy
    RecomputeCheck  recompute.py       compares the ranks' gradients of one micro-batch, before a step
    ReplicaCheck    replicas.py        compares the ranks' weights before Checkpoint saves them
    Checkpoint      checkpointing.py   saves; StopEarly needs to know how long a save takes
    StopEarly       stop_early.py      ends the run at a signal, or before the time of the job is over
    SlowRank        slow_rank.py       names a rank that is slower than the others; Log writes its number
    NoiseScale      noise_scale.py     measures a step before Log writes its row; noise_ramp.py doubles the batch by it
    Profile         profile.py         starts to record after the hooks above, so the trace shows only steps
    Log             log.py             starts its clock last, so that no hook counts as training time
    Mirroring       mirroring.py       copies checkpoints, and at the end the complete files of the others

Guards asks origin.py for the images of a skipped step. Log hands its rows to sinks.py, tensorboard.py,
weights_and_biases.py and mlflow.py.
"""

from largebatch.hooks.checkpointing import Checkpoint
from largebatch.hooks.divergence import Divergence
from largebatch.hooks.ema import Average, Ema, ScheduleFree, check_half_life
from largebatch.hooks.guards import Guards
from largebatch.hooks.log import Log
from largebatch.hooks.mirroring import Mirroring
from largebatch.hooks.mlflow import MLflow
from largebatch.hooks.noise_ramp import follow_noise
from largebatch.hooks.noise_scale import NoiseScale
from largebatch.hooks.profile import Profile
from largebatch.hooks.recompute import RecomputeCheck
from largebatch.hooks.replicas import ReplicaCheck
from largebatch.hooks.sinks import Csv, Curves, Progress, Sink, Tracker
from largebatch.hooks.slow_rank import SlowRank
from largebatch.hooks.stop_early import StopEarly, end_time
from largebatch.hooks.tensorboard import TensorBoard
from largebatch.hooks.weights_and_biases import WeightsAndBiases

__all__ = [
    "Average", "Checkpoint", "Csv", "Curves", "Divergence", "Ema", "Guards", "Log", "MLflow", "Mirroring", "NoiseScale",
    "Profile", "Progress", "RecomputeCheck", "ReplicaCheck", "ScheduleFree", "Sink", "SlowRank", "StopEarly",
    "TensorBoard", "Tracker", "WeightsAndBiases", "check_half_life", "end_time", "follow_noise",
]  # fmt: skip
