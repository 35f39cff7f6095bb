import torch.distributed as dist

from collectives.host import all_sum, broadcast, start_sum
from tests.ranks import run_ranks


def check_sums():
    rank = dist.get_rank()
    first, second = start_sum([rank, 1.0]), start_sum([2.0**40 + rank])
    assert first.wait() == [3.0, 3.0]
    assert second.wait() == [3 * 2.0**40 + 3]  # exact: sums are in fp64
    assert all_sum([float(rank == 2)]) == [1.0]
    return broadcast({"from": rank})


def test_sums_and_broadcast_agree_on_every_rank():
    assert run_ranks(3, check_sums) == [{"from": 0}] * 3


def test_without_a_process_group_a_sum_is_the_value_itself():
    assert all_sum([1.5, 2]) == [1.5, 2.0]
    assert broadcast("x") == "x"
