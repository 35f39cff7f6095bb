"""What `collectives.torch_private` relies on is still in torch."""

import inspect

import torch
import torch.distributed._symmetric_memory as symm_mem

from collectives.torch_private import tensor_at


def test_a_tensor_on_memory_of_another():
    owner = torch.arange(10.0)
    view = tensor_at(owner.data_ptr() + 8, 3, torch.float32, owner.device)
    assert view.tolist() == [2, 3, 4]
    assert view.storage_offset() == 0
    version = owner._version
    view.fill_(7)
    assert owner.tolist() == [0, 1, 7, 7, 7, 5, 6, 7, 8, 9]
    assert owner._version == version  # counted by itself


def test_symmetric_memory_is_allocated_and_shared_as_we_do_it():
    assert list(inspect.signature(symm_mem.rendezvous).parameters) == ["tensor", "group"]
    assert callable(symm_mem.empty)
