from parallel.tide.room import Needs, too_little


def test_too_little_memory_names_sizes_and_keys():
    text = too_little(Needs([2**31, 2**31], [2**30], 2**29), free=3 * 2**30, rank=5)
    assert "needs 5.50 GiB" in text
    assert "rank 5 has 3.00 GiB" in text
    assert "2 slots of 2.00 GiB" in text
    for key in ("parallel.prefetch", "collectives.chunk", "collectives=stock"):
        assert key in text
