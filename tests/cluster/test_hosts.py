"""The hosts themselves work as the other tests of this folder expect."""

import time

import pytest


def test_hosts_reach_each_other_by_name_without_any_option(hosts):
    assert hosts.run("h1", ["ssh", "h3", "hostname"], timeout_s=30) == (0, "h3\n")


def test_a_cut_cable_is_a_black_hole_and_can_be_put_back(hosts):
    hosts.cut("h2")
    code, output = hosts.run("h1", ["ssh", "-o", "ConnectTimeout=1", "h2", "true"], timeout_s=30)
    assert code == 255 and "refused" not in output, output
    hosts.join("h2")
    assert hosts.run("h1", ["ssh", "h2", "true"], timeout_s=30)[0] == 0


def test_a_killed_host_takes_its_processes_along_and_boots_again(hosts):
    job = hosts.start("h1", ["ssh", "h2", "echo started; sleep 1000"])
    job.wait_for_line("started", 30)
    hosts.kill("h2")
    assert job.wait(10)[0] == 255
    hosts.mend()
    assert hosts.run("h3", ["ssh", "h2", "pgrep", "-c", "sleep"], timeout_s=30) == (1, "0\n")


def test_a_command_over_its_limit_is_killed_on_every_host(hosts):
    begin = time.monotonic()
    with pytest.raises(AssertionError, match="not done after 1 s"):
        hosts.run("h1", ["ssh", "h2", "sleep 1000"], timeout_s=1)
    assert not any(hosts.processes(name) for name in hosts.names)
    assert time.monotonic() - begin < 10


def test_a_limited_link_carries_no_more_than_its_rate(hosts):
    """4 MB at 16 Mbit/s need 2 s, less the first 256 KB."""
    hosts.limit("h2", "16mbit")
    begin = time.monotonic()
    copy = "head -c 4000000 /dev/zero | ssh h2 wc -c"
    assert hosts.run("h1", ["sh", "-c", copy], timeout_s=30) == (0, "4000000\n")
    assert time.monotonic() - begin > 1.5
