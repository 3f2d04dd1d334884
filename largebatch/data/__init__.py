"""Input: from files to normalised tensors on the device.

The functions of order, randaugment, pixels and token_labels are pure, so every rank and every resume agree.
"""
