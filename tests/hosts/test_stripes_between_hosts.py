"""Four ranks on two hosts send stripes to a server on a third, and one sender the same; every
digest is checked.
"""

from __future__ import annotations

import pytest

from bench.support.hosts.network_namespaces import host_network, why_not
from bench.support.hosts.striped_ends import limit_links, measure_stripes, shapes_of

pytestmark = pytest.mark.skipif(
    bool(why_not()), reason=why_not() or "there can be network namespaces"
)


def test_both_ways_bring_the_same_bytes() -> None:
    with host_network(3) as network:
        limit_links(network, [1000, 1000, 2000])
        found = measure_stripes(network, layers=1, pairs=1, bucket_mib=1.0)
    assert len(found["pairs"]) == 1
    assert found["size_bytes"] == sum(4 * tensor.numel() for tensor in shapes_of(1).values())
