"""Cuts, layouts, blocks and pieces, against torch's own chunking."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.tide.layout import ALIGNMENT, Block, Cut, cut, make_layout, pieces

DTYPES = [torch.float32, torch.bfloat16]


@st.composite
def shapes(draw):
    """A shape, the dimension it is cut along, and a number of ranks that it allows."""
    shape = draw(st.lists(st.integers(0, 6), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    world_size = draw(st.integers(1, 4))
    if dim:
        shape[dim] *= world_size
    return shape, dim, world_size


def parts_of(whole, dim, world_size):
    """Each rank's part as FSDP2 has it: chunks of ceil(size / world_size), the last ones shorter."""
    step = -(-whole.shape[dim] // world_size)
    return [
        whole.narrow(dim, min(r * step, whole.shape[dim]), max(min(step, whole.shape[dim] - r * step), 0))
        for r in range(world_size)
    ]  # fmt: skip


@given(st.lists(shapes(), min_size=1, max_size=5), st.integers(1, 20), st.data())
def test_pieces_are_each_ranks_part_in_order(tensors, chunk, data):
    world_size = data.draw(st.integers(1, 4))
    cuts, wholes = [], []
    for shape, dim, _ in tensors:
        shape = list(shape)
        if dim:
            shape[dim] = shape[dim] // max(world_size, 1) * world_size
        wholes.append((torch.arange(torch.Size(shape).numel()).view(shape), dim))
        cuts.append(cut(shape, dim, world_size))
    total = sum(c.shard_numel for c in cuts)
    for rank in range(world_size):
        stream = torch.full((total,), -1)
        for begin in range(0, total, chunk):
            end = min(begin + chunk, total)
            for piece in pieces(cuts, world_size, rank, begin, end):
                assert begin <= piece.target
                assert piece.target + piece.numel <= end
                at = slice(piece.target, piece.target + piece.numel)
                assert (stream[at] == -1).all()
                stream[at] = piece.of(wholes[piece.tensor][0].reshape(-1)).reshape(-1)
        start = 0
        for (whole, dim), c in zip(wholes, cuts, strict=True):
            mine = parts_of(whole, dim, world_size)[rank].reshape(-1)
            assert c.held(rank) == len(mine)
            assert torch.equal(stream[start : start + len(mine)], mine)
            assert (stream[start + len(mine) : start + c.shard_numel] == -1).all()
            start += c.shard_numel


class Plain:
    """A region of one rank."""

    def __init__(self, nbytes):
        self.bytes = torch.zeros(nbytes, dtype=torch.uint8)

    def tensor(self, rank, offset, numel, dtype):
        return self.bytes[offset : offset + numel * dtype.itemsize].view(dtype)


@given(
    st.lists(st.tuples(shapes(), st.sampled_from(DTYPES)), min_size=1, max_size=5),
    st.integers(1, 64),
)
def test_blocks_of_all_ranks_make_up_the_tensors(tensors, nbytes):
    """Also when each block is written in parts of a few bytes."""
    world_size = tensors[0][0][2]
    tensors = [t for t in tensors if t[0][2] == world_size]
    cuts = [(cut(shape, dim, world_size), dtype) for (shape, dim, _), dtype in tensors]
    layout = make_layout(world_size, cuts)
    assert all(offset % ALIGNMENT == 0 for offset in layout.offsets)
    for write in (lambda b: [b], lambda b: b.split(nbytes)):
        region = Plain(layout.nbytes)
        region.tensor(0, 0, layout.nbytes // 4, torch.float32).fill_(-1)
        wholes = [torch.randn(shape).to(dtype) for (shape, _, _), dtype in tensors]
        for rank in range(world_size):
            blocks = layout.blocks(rank)
            for whole, block, ((_, dim, _), _) in zip(wholes, blocks, tensors, strict=True):
                part = parts_of(whole, dim, world_size)[rank]
                part = part.reshape(block.rows, part.numel() // max(block.rows, 1))
                part = torch.nn.functional.pad(part, (0, block.width - part.shape[1]))
                source = Plain(block.rows * block.width * block.dtype.itemsize)
                flat = source.tensor(0, 0, part.numel(), block.dtype)
                flat.copy_(part.reshape(-1))
                done = 0
                for b in write(block):
                    n = b.rows * b.width
                    b.view(region, 0).copy_(flat[done : done + n].view(b.rows, b.width))
                    done += n
                assert done == part.numel()
        for whole, got in zip(wholes, layout.tensors(region, 0), strict=True):
            assert torch.equal(got[: whole.numel()], whole.reshape(-1))


def test_blocks_are_split_into_whole_rows_or_parts_of_one():
    block = Block(0, 5, 4, 8, torch.float32)
    assert [(b.offset, b.rows) for b in block.split(40)] == [(0, 2), (64, 2), (128, 1)]
    row = Block(256, 1, 10, 20, torch.bfloat16)
    assert [(b.offset, b.width) for b in row.split(8)] == [(256, 4), (264, 4), (272, 2)]


def test_only_the_first_dimension_may_be_cut_unevenly():
    assert cut((5, 3), 0, 2) == Cut(1, 9, 15)
    with pytest.raises(ValueError, match=r"dimension 1 of \(5, 3\) cannot be cut evenly by 2"):
        cut((5, 3), 1, 2)
