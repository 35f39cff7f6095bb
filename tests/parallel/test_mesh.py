import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.mesh import (
    ParallelConfig,
    SequenceConfig,
    averaging_ranks,
    build_mesh,
    data_parallel_size,
    fsdp_mesh,
    mesh_shape,
    weight_shards,
)
from tests.ranks import run_ranks

sizes = st.integers(1, 6)


@given(sizes, sizes, sizes)
def test_every_shape_that_multiplies_up_is_accepted_and_ordered(replicate, shard, sequence):
    config = ParallelConfig(
        replicate=replicate, shard=shard, sequence=SequenceConfig(size=sequence)
    )
    world_size = replicate * shard * sequence
    shape = mesh_shape(config, world_size)
    assert list(shape) == [a for a in ("replicate", "shard", "sequence") if a in shape]
    product = 1
    for size in shape.values():
        product *= size
    assert product == world_size
    assert data_parallel_size(shape) == replicate * shard
    assert weight_shards(shape) == shard * sequence
    assert averaging_ranks(shape) == replicate * shard * sequence
    config.shard = None
    assert mesh_shape(config, world_size) == shape


def test_shard_takes_what_the_others_leave():
    assert mesh_shape(ParallelConfig(replicate=2), 8) == {"replicate": 2, "shard": 4}
    assert mesh_shape(ParallelConfig(), 1) == {"shard": 1}


@pytest.mark.parametrize(
    ("config", "world_size", "words"),
    [
        (ParallelConfig(shard=3), 4, ["parallel.shard=3", "needs 3 ranks", "there are 4"]),
        (ParallelConfig(replicate=3), 4, ["4 ranks", "parallel.replicate=3", "launch.nproc"]),
        (
            ParallelConfig(sequence=SequenceConfig(size=3)),
            8,
            ["8 ranks cannot be split by parallel.sequence.size=3:", "to a multiple of 3"],
        ),
    ],
)
def test_a_shape_that_does_not_fit_says_what_to_set(config, world_size, words):
    with pytest.raises(ValueError, match=r".") as error:
        mesh_shape(config, world_size)
    assert all(word in str(error.value) for word in words), error.value


def test_values_are_checked_where_they_are_given():
    with pytest.raises(ValueError, match=r"parallel.param_dtype=bf16 .* set parallel.param_dtype="):
        ParallelConfig(param_dtype="bf16")
    with pytest.raises(ValueError, match=r"parallel.replicate=0 is too small"):
        ParallelConfig(replicate=0)
    with pytest.raises(ValueError, match=r"sliding_window=halos is not one of exchange, halo"):
        SequenceConfig(sliding_window="halos")


def test_resharding_to_a_part_of_the_ranks_needs_a_divisor():
    assert mesh_shape(ParallelConfig(reshard_after_forward=2), 4) == {"shard": 4}
    with pytest.raises(ValueError, match="=3 does not divide the 4 ranks"):
        mesh_shape(ParallelConfig(reshard_after_forward=3), 4)
    with pytest.raises(ValueError, match=r"parallel.reshard_after_forward=1"):
        ParallelConfig(reshard_after_forward=1)
    with pytest.raises(ValueError, match="and parallel.experts=2: .* to true or false"):
        ParallelConfig(reshard_after_forward=2, experts=2)


def check_meshes():
    mesh = build_mesh({"replicate": 2, "shard": 1, "sequence": 2}, "cpu")
    weights = fsdp_mesh(mesh)
    return weights.mesh_dim_names, weights.mesh.tolist(), mesh.get_local_rank("sequence")


def test_ranks_that_share_sequences_share_weights():
    results = run_ranks(4, check_meshes)
    assert [rank for *_, rank in results] == [0, 1, 0, 1]
    assert all(found[:2] == (("replicate", "shard"), [[0, 1], [2, 3]]) for found in results)
