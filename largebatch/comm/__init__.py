"""The ranks of a run: who started them, where they sit, what they exchange. Only this folder imports Horovod."""

from largebatch.comm.communicator import Communicator, Stopped, StoppedEarly, session

__all__ = ["Communicator", "Stopped", "StoppedEarly", "session"]
