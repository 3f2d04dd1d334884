"""Every file of ranks/ under a real launcher, many checks per launch."""

import pytest
from launch import check_on_ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_gradients(ranks):
    check_on_ranks("test_gradients.py", ranks=ranks)


@pytest.mark.parametrize("ranks, launcher", [(1, "mpirun"), (2, "mpirun"), (3, "mpirun"), (2, "horovodrun --gloo")])
def test_traps(ranks, launcher):
    check_on_ranks("test_traps.py", ranks=ranks, launcher=launcher)


@pytest.mark.parametrize("ranks, launcher", [(1, "mpirun"), (2, "mpirun"), (3, "mpirun"), (2, "horovodrun --gloo")])
def test_levers(ranks, launcher):
    check_on_ranks("test_levers.py", ranks=ranks, launcher=launcher)


@pytest.mark.parametrize("ranks, launcher", [(1, "python"), (3, "mpirun"), (2, "horovodrun --gloo")])
def test_freezing(ranks, launcher):
    check_on_ranks("test_freezing.py", ranks=ranks, launcher=launcher)


def test_validation():
    check_on_ranks("test_validation.py", ranks=3)


def test_compile():
    check_on_ranks("test_compile.py", ranks=2)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_data(ranks):
    check_on_ranks("test_data.py", ranks=ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_batch_norm(ranks):
    check_on_ranks("test_batch_norm.py", ranks=ranks)


@pytest.mark.parametrize("ranks, launcher", [(2, "mpirun"), (3, "horovodrun --gloo")])
def test_zero(ranks, launcher):
    check_on_ranks("test_zero.py", ranks=ranks, launcher=launcher)
