"""What lies where in DDP's buckets, without processes."""

from __future__ import annotations

import pytest

from ddp_hooks import _C


@pytest.mark.parametrize(("within", "count"), [(0, 0), (1, 1), (40, 1), (41, 2), (120, 2), (121, 3), (1 << 40, 4)])
def test_buckets_with_fewer_bytes_before_them(within: int, count: int) -> None:
    buckets = [_C.BucketLayout([_C.ParameterSlice(i, 0, 10 * (i + 1), 1)], 4) for i in range(4)]
    assert _C.LayoutOfBuckets(buckets, 4).buckets_within(within) == count
