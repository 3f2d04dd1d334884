"""At which address the ranks of torch.distributed find each other; tests/cluster/test_training.py tries it on hosts."""

import pytest

from largebatch.launch.gloo_address import own_address
from largebatch.parallel.rendezvous import address_here


def test_the_own_name_unless_a_card_is_named():
    environment: dict[str, str] = {}
    assert address_here(environment) == own_address() and not environment


@pytest.mark.parametrize("variables", [{"HOROVOD_GLOO_IFACE": "lo"}, {"GLOO_SOCKET_IFNAME": "lo,eth9"}])
def test_a_card_by_its_name(variables):
    """The one that Horovod was told of goes for torch, too; torch's own variable comes first."""
    environment = {"HOROVOD_GLOO_IFACE": "eth9"} | variables
    assert address_here(environment) == "127.0.0.1"
    assert environment["GLOO_SOCKET_IFNAME"] == variables.get("GLOO_SOCKET_IFNAME", "lo")


def test_a_card_that_is_not_there():
    with pytest.raises(ValueError, match="is eth9, and .* has no network card eth9 with an IPv4 address: .* lo"):
        address_here({"HOROVOD_GLOO_IFACE": "eth9"})
