import torch

from recipes.lelora.shards import rest
from tests.models.lelora.toys import ALL_KINDS, Single


def test_rows_without_a_gate_of_an_older_checkpoint_are_made_zero():
    """Before, momentum moved them on, behind a gate of 0."""
    for kind in ALL_KINDS:
        single = Single(kind)
        single.switch([0, 1, 2])
        single.train(3)
        single.switch([1])
        idle_R = single.adapter.gate_R == 0
        update = single.update().detach()
        tensors = [getattr(single.adapter, name) for name in single.adapter.trained]
        with torch.no_grad():
            for name, parameter in zip(single.adapter.trained, tensors, strict=True):
                axis = name.rpartition("_")[2].index("R")
                for tensor in (parameter, *single.optimizer.state[parameter].values()):
                    if tensor.ndim:
                        tensor.movedim(axis, 0)[idle_R] = 0.5
        rest(single.adapter, single.optimizer)
        assert torch.equal(single.update(), update), kind
        single.train(1)
        for name, parameter in zip(single.adapter.trained, tensors, strict=True):
            axis = name.rpartition("_")[2].index("R")
            assert (parameter.movedim(axis, 0)[idle_R] == 0).all(), kind
