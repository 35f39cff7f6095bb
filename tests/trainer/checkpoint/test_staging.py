import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.ranks import run_ranks
from trainer.checkpoint.staging import ALIGN, CHUNK, Staging, place, sizes_of
from trainer.checkpoint.state import tensors_of

on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
DEVICES = ["cpu", pytest.param("cuda", marks=on_gpu)]


@given(st.lists(st.integers(0, 2 * CHUNK), max_size=40), st.randoms())
def test_tensors_do_not_overlap_and_their_order_changes_no_chunk(sizes, random):
    places, chunks = place(sizes)
    for chunk, bound in enumerate(chunks):
        spans = sorted(
            (offset, offset + size)
            for size, (where, offset) in zip(sizes, places, strict=True)
            if where == chunk
        )
        assert all(end <= begin for (_, end), (begin, _) in zip(spans, spans[1:], strict=False))
        assert all(begin % ALIGN == 0 and end <= bound for begin, end in spans)
        assert bound <= CHUNK or len(spans) == 1
    shuffled = sizes.copy()
    random.shuffle(shuffled)
    assert place(shuffled)[1] == chunks


def copy_and_train_on(device):
    """Copies of a model with a buffer that its forward pass changes, and with moments."""
    mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 7), torch.nn.BatchNorm1d(7)).to(device)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.randn(4, 9, device=device)

    def train():
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    train()
    staging = Staging(torch.device(device))
    staging.reserve(sizes_of(model, optimizer))
    reserved = [chunk.data_ptr() for chunk in staging._chunks]
    for _ in range(2):
        state = tensors_of(model, optimizer, torch.device(device), with_rng=False)
        expected = flat(state)
        copied = staging.copy(state, model, optimizer)
        train()
        staging.wait()
        got = flat(copied)
        assert all(value.device.type == "cpu" for value in got.values())
        for name, value in expected.items():
            torch.testing.assert_close(got[name], value, rtol=0, atol=0)
        changed = flat(tensors_of(model, optimizer, torch.device(device), with_rng=False))
        assert not torch.equal(changed["model.1.running_mean"], expected["model.1.running_mean"])
    assert [chunk.data_ptr() for chunk in staging._chunks] == reserved


def flat(state, before=""):
    """Local values by path, copied."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= flat(value, f"{before}{key}.")
        else:
            local = value.to_local() if hasattr(value, "to_local") else value
            found[f"{before}{key}"] = local.detach().cpu().clone()
    return found


@pytest.mark.parametrize("device", DEVICES)
def test_a_copy_is_of_the_moment_of_the_call(device, monkeypatch):
    """Though updates and forward passes go on, and with memory that is taken once."""
    monkeypatch.setenv("SPRINGTIDE_TEST_DEVICE", device)
    run_ranks(2 if device == "cpu" else 1, copy_and_train_on, device)
