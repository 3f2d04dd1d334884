"""Who is behind, by numbers alone; that a rank that hangs is named is in tests/mpi/test_watchdog.py."""

import pytest
import torch

from largebatch.ranks.record import KEPT, TOLD, Record
from largebatch.ranks.single import Single
from largebatch.ranks.watchdog import Watchdog


def record_of(count: int) -> Record:
    watchdog = Watchdog(0, 0, lambda mark: None)
    record = Record(watchdog)
    for number in range(count):
        watchdog.progress(f"step {number // 3}")
        record.begin(f"bucket {number % 3}", 1000)
    return record


HOSTS = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    "begun, sentence",
    [
        ([8, 8, 8, 8], "no rank is behind: the newest collective of each is 8, bucket 1 of step 2."),
        (
            [8, 7, 8, 5],
            "rank 3 on b is behind, after collective 5, bucket 1 of step 1, and not yet in 6, bucket 2 of step 1; the "
            "others have come to 8, bucket 1 of step 2.",
        ),
        (
            [9, 8, 9, 8],  # of a collective that this rank has not begun it knows the number alone
            "rank 1 on a, rank 3 on b are behind, after collective 8, bucket 1 of step 2, and not yet in 9; the others "
            "have come to 9.",
        ),
    ],
)
def test_the_ranks_that_have_begun_the_fewest_collectives_are_named(begun, sentence):
    assert record_of(8).compare(dict(enumerate(begun)), HOSTS) == sentence


def test_only_the_ranks_with_the_same_part_of_a_model_are_compared_and_few_are_listed():
    assert record_of(8).compare({1: 8, 3: 7}, HOSTS).startswith("rank 3 on b is behind, after collective 7, ")
    many = dict.fromkeys(range(TOLD + 3), 7) | {99: 8}
    assert f"rank {TOLD - 1} on c and 3 more are behind" in record_of(8).compare(many, ["c"] * 100)


def test_the_newest_collectives_are_listed_with_bytes_and_age():
    record = record_of(3 * KEPT)
    record.begin("names", 0)
    lines = record.lines().splitlines()
    assert len(lines) == TOLD and lines[-1].startswith(f"    {3 * KEPT + 1}, names of step {KEPT - 1}: an object, 0.")
    assert lines[-2].startswith(f"    {3 * KEPT}, bucket 2 of step {KEPT - 1}: 1,000 bytes, ") and "s ago" in lines[-2]


def test_every_collective_of_the_thread_that_started_the_ranks_is_recorded_whoever_implements_it():
    comm = Single()
    comm.progress("step 1")
    comm.allreduce(torch.zeros(3), name="sum")
    comm.broadcast_object("x", name="text")
    comm.broadcast_tensors({"a": torch.zeros(2), "b": torch.zeros(1, dtype=torch.int64)}, name="tensors")
    with comm.together("work"):
        pass
    comm.record.thread += 1  # the calls now are those of another thread
    comm.barrier(name="elsewhere")
    told = [line.strip().rpartition(",")[0] for line in comm.record.lines().splitlines()]
    assert told == [
        "1, cores: an object",
        "2, sum of step 1: 12 bytes",
        "3, text of step 1: an object",
        "4, tensors of step 1: 16 bytes",
        "5, together/work of work: an object",
    ]
