"""Each campaign of faults at its gate size; those that consist of other tests run as these."""

import pytest

from tests.reliability.campaign import Campaign, Size, Trial, carry_out
from tests.reliability.campaigns import CAMPAIGNS, is_flat, names_slow_rank
from tests.reliability.faults import explains
from tests.reliability.injector import PHASES, Fault

OWN = ("R1", "R2", "R3", "R5", "R6", "R7", "R8", "R13", "R16", "R17")

pytestmark = pytest.mark.cluster  # a tier of its own: such runs mostly wait


@pytest.mark.parametrize("campaign", [one for one in CAMPAIGNS if one.name in OWN], ids=lambda one: one.name)
def test_the_promise_is_kept(campaign, tmp_path):
    verdict = carry_out(campaign, Size(tmp_path, full=False), print)
    assert str(verdict).startswith(f"{campaign.name:3}  PASS"), verdict


def test_a_broken_promise_ends_a_campaign_which_goes_on_later(tmp_path):
    tried = []

    def trials(size: Size):
        for name in ("a", "b", "c"):
            yield Trial(name, lambda name=name: tried.append(name) or ("lost" if name == "b" and size.full else ""))

    campaign = Campaign("R0", "nothing is lost", trials)
    verdict = carry_out(campaign, Size(tmp_path, full=True), lambda said: None)
    said = str(verdict)
    assert said.startswith("R0   FAIL  nothing is lost: 1 of 2 kept, ") and said.endswith("\n      b: lost")
    verdict = carry_out(campaign, Size(tmp_path, full=False), lambda said: None)
    assert tried == ["a", "b", "b", "c"] and str(verdict).startswith("R0   PASS  nothing is lost: 3 of 3 kept, ")


def test_memory_and_descriptors_that_grow_fail_the_soak():
    flat = {"steps": 2000, "threads": [9, 9], "descriptors": [40, 40], "files": [8, 8], "megabytes": [500, 542]}
    assert is_flat(flat) == ""
    assert is_flat(flat | {"descriptors": [40, 41]}).startswith("descriptors grew")
    assert is_flat(flat | {"megabytes": [500, 543]}).startswith("megabytes grew")


def test_a_slow_rank_that_is_named_late_or_beside_another_one_fails_the_campaign():
    found = {"rounds": [[3, "loading", 12], [0, "loading", 20]], "told": 2, "right": 2, "wrong": []}
    assert names_slow_rank(found) == "" and names_slow_rank({"rounds": [], "told": 0, "right": 0, "wrong": []}) == ""
    assert names_slow_rank(found | {"rounds": [[3, "loading", 12], [0, "loading", 21]]}).startswith("late [[0, ")
    assert names_slow_rank(found | {"told": 3, "wrong": ["rank 1 on a"]}).startswith("late [], wrong ['rank 1 on a']")


def test_a_report_that_names_another_rank_than_the_one_that_hangs_fails_the_campaign():
    fault, waited = Fault.read("1 forward 3 hang"), "waited 4 s for the others"
    assert explains(fault, waited) and explains(fault, f"largebatch: rank 1 on a is behind, after\n{waited}")
    assert not explains(fault, f"largebatch: rank 2 on a is behind, after\n{waited}")
    assert not explains(fault, f"largebatch: rank 1 on a, rank 2 on a are behind, after\n{waited}")


def test_a_fault_is_written_as_it_is_read():
    for phase in PHASES:
        fault = Fault(1, phase, int(phase not in ("start", "data", "end")), "SIGKILL")
        assert Fault.read(str(fault)) == fault
    assert Fault.read("all forward 3 hang").rank is None
