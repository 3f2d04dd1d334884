"""Ranks that are told to leave do so at the same point, wherever each of them is."""

import threading
import time


def test_all_leave_at_the_same_point(comm):
    """The last rank is the slowest, and asks. The others are ahead and have passed other numbers of points."""
    asks = threading.Event()
    points, passed = comm.stop_points(lambda: [False, asks.is_set()]), 1
    while not points.leave():
        passed += 1
        if comm.rank == comm.size - 1 and passed == 10:
            asks.set()
        time.sleep(0.001 * (comm.rank + 1))
    assert set(comm.allgather_object(passed, name="passed")) == {passed} and passed >= 10
    assert points.counts == [0, 1]
    points.close()


def test_nobody_asks_after_the_end(comm):
    """Ranks come to the end at different times, and then may begin anew."""
    for _ in range(2):
        points = comm.stop_points(lambda: [False])
        assert not any(points.leave() for _ in range(3))
        if comm.rank == 0:
            time.sleep(0.5)
        points.close()
        points.close()


def test_a_request_behind_the_last_point_stops_nobody(comm):
    points = comm.stop_points(lambda: [comm.rank == 0])
    points.close()
    assert points.counts == [1]
