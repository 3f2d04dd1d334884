"""Tests with `device` run on the CPU, and on a GPU if there is one; those with `gpu` on a GPU alone."""

import pytest
import torch


@pytest.fixture
def gpu() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("runs on a GPU: there is none")
    return torch.device("cuda")


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    return request.getfixturevalue("gpu") if request.param == "cuda" else torch.device("cpu")
