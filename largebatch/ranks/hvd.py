"""Horovod's module for torch, imported when it is first used: one process can train without it."""

from typing import Any


class _Horovod:
    def __getattr__(self, name: str) -> Any:
        import horovod.torch

        return getattr(horovod.torch, name)


hvd: Any = _Horovod()
