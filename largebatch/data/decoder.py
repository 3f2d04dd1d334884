"""DALI's decoder of single images, to find those that Pillow can read and DALI cannot."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from nvidia.dali import Pipeline, fn, types

# An EXIF orientation is ignored, as in timm; the sizes in the index assume that, too. Fancy upsampling is the default
# of libjpeg, and so of PIL.
AS_PIL: dict[str, Any] = {
    "output_type": types.DALIImageType.RGB,
    "adjust_orientation": False,
    "jpeg_fancy_upsampling": True,
}
_own = threading.local()  # the decoder of each thread


def decoder_fault(data: bytes) -> str:
    """Return why DALI cannot decode an encoded image on a CPU, or ""."""
    if not hasattr(_own, "decoder"):
        _own.decoder = _Decoder()
    try:
        _own.decoder.decode(data)
    except RuntimeError:  # its words name no cause
        del _own.decoder  # after an error a pipeline is of no more use
        return "Pillow reads it, but DALI, which decodes in training, cannot: it is damaged, or its end is missing"
    return ""


class _Decoder:
    def __init__(self) -> None:
        self._next = np.zeros(0, dtype=np.uint8)
        self._pipe = Pipeline(batch_size=1, num_threads=1, device_id=None, prefetch_queue_depth=1, exec_dynamic=True)
        with self._pipe:
            encoded = fn.external_source(lambda: [self._next], batch=True)
            self._pipe.set_outputs(fn.decoders.image(encoded, device="cpu", **AS_PIL))
        self._pipe.build()

    def decode(self, data: bytes) -> None:
        """Raise RuntimeError if the image cannot be decoded."""
        self._next = np.frombuffer(data, dtype=np.uint8)
        self._pipe.run()
