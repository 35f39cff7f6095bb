"""One training run, on torch's collectives, on TIDE, or on sums in TIDE's order that torch moves."""

import os
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from collectives.config import CollectivesConfig
from collectives.symmetric.fabric import connect
from collectives.topology import make_topology
from models.causal_lm import (
    CausalLMConfig,
    build_causal_lm,
    init_weights,
    next_token_loss,
    transformers_config,
)
from parallel.fsdp import parallelize, set_last_micro_batch
from parallel.mesh import ParallelConfig, build_mesh, mesh_shape
from parallel.tide import pool, use_tide
from parallel.weights import materialize
from tests.collectives import slow

DEVICE = os.environ.get("SPRINGTIDE_TEST_DEVICE", "cpu")


def device():
    return torch.device("cuda", torch.cuda.current_device()) if DEVICE == "cuda" else torch.device("cpu")  # fmt: skip


@dataclass
class Case:
    """What is trained, and how."""

    model: str = "language"
    """language: our own model and `parallelize`; toy: see `Toy`."""
    sizes: dict = field(default_factory=dict)
    parallel: dict = field(default_factory=dict)
    tide: dict = field(default_factory=dict)
    node_size: int = 8
    steps: int = 5
    """By then `train` has been everywhere that it goes; `test_stress.py` goes on for longer."""
    accumulation: int = 1
    evaluate: bool = False
    frozen: bool = False
    skip: bool = False
    """toy: leave a block out in every other step."""
    unused: bool = False
    """toy: a parameter that no rank uses."""
    reshard: bool | int = True
    placement: int = 0
    """toy: the dimension that matrices are cut along."""
    tensor_parallel: int = 1
    slow: bool = False
    """Transports take their time."""
    factor: float | None = None
    """Divide gradients by this instead of the number of ranks."""


class OrderedReduceScatter:
    """For FSDP2's public `set_custom_reduce_scatter`: torch packs and moves, sums follow TIDE's order."""

    def __init__(self, node_size, factor):
        self.node_size, self.factor = node_size, factor

    def allocate(self, size, *, dtype, device):
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        size = group.size()
        everyone = [torch.empty_like(input_tensor) for _ in range(size)]
        dist.all_gather(everyone, input_tensor, group=group)
        ranks = dist.get_process_group_ranks(group)
        topology = make_topology(ranks, group.rank(), self.node_size)
        mine = [whole.chunk(size)[topology.rank].float() for whole in everyone]
        shares = []
        for node in range(topology.num_nodes):
            share = mine[topology.member(node, 0)].clone()
            for local in range(1, topology.node_size):
                share += mine[topology.member(node, local)]
            shares.append(share)
        total = shares[topology.node]
        for step in range(1, topology.num_nodes):
            total += shares[(topology.node - step) % topology.num_nodes]
        output_tensor.copy_(total / (self.factor or (1 if op == dist.ReduceOp.SUM else size)))


class Block(nn.Module):
    """A matrix, a vector, a vector of one element, and maybe a parameter that nobody uses."""

    def __init__(self, width, inner, unused):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=False)
        self.scale = nn.Parameter(torch.ones(1))
        if unused:
            self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x):
        return x + self.scale * self.down(torch.tanh(self.up(x)))


class Toy(nn.Module):
    """A few blocks; shapes that divide by nothing in particular."""

    def __init__(self, layers=4, width=12, inner=8, unused=False):
        super().__init__()
        self.first = nn.Linear(8, width)
        self.blocks = nn.ModuleList(Block(width, inner, unused) for _ in range(layers))
        self.last = nn.Linear(width, 3)

    def forward(self, x, leave_out=None):
        x = self.first(x)
        for number, block in enumerate(self.blocks):
            if number != leave_out:
                x = block(x)
        return self.last(x)


def build_toy(case):
    torch.manual_seed(1)
    model = Toy(unused=case.unused, **case.sizes).to(device())
    size = dist.get_world_size() // case.tensor_parallel
    shape = (size, case.tensor_parallel)
    mesh = init_device_mesh(DEVICE, shape, mesh_dim_names=("shard", "tensor"))
    if case.tensor_parallel > 1:
        for block in model.blocks:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(block, mesh["tensor"], plan)
    dtypes = {
        key: getattr(torch, case.parallel[key]) if key in case.parallel else None
        for key in ("param_dtype", "reduce_dtype")
    }
    options = {"mesh": mesh["shard"], "mp_policy": MixedPrecisionPolicy(**dtypes)}
    if case.placement:
        options["shard_placement_fn"] = lambda p: Shard(case.placement if p.ndim > 1 else 0)
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=case.reshard, **options)
    return fully_shard(model, **options)


def build_language(case):
    sizes = {
        "num_layers": 4, "hidden_size": 12, "intermediate_size": 26, "tie_embeddings": True,
    } | case.sizes  # fmt: skip
    config = CausalLMConfig(num_heads=2, num_kv_heads=1, head_dim=6, attention="sdpa", **sizes)
    model = build_causal_lm(config, transformers_config(config, 37))
    if case.frozen:
        model.model.layers[1].requires_grad_(False)
        model.model.layers[2].mlp.up_proj.weight.requires_grad_(False)
    settings = ParallelConfig(**case.parallel)
    shape = mesh_shape(settings, dist.get_world_size())
    parallelize(model, build_mesh(shape, DEVICE), settings)
    materialize(model, device(), partial(init_weights, model), seed=1)
    return model


def build(case, collectives):
    """The model of a case; on `tide`, every group of it must run there."""
    model = {"language": build_language, "toy": build_toy}[case.model](case)
    if case.factor:
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(case.factor)
    if collectives == "ordered":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(OrderedReduceScatter(case.node_size, case.factor))
    if collectives == "tide":
        chunk = 100 if case.node_size == 8 else 1000  # the network is slow
        transport = os.environ.get("SPRINGTIDE_TEST_TRANSPORT", "auto")
        options = {
            "transport": transport,
            "chunk": chunk,
            "timeout": 30,
            "poison": True,
            "smallest": 0,
        } | case.tide
        pool.connect = slow.connect if case.slow else connect
        tide = use_tide(model, CollectivesConfig(name="tide", **options), case.node_size)
        assert tide.stayed == {}
        model.tide = tide
    return model


def batch(case, generator):
    if case.model == "toy":
        return torch.randn(4, 8, generator=generator).to(device())
    return torch.randint(37, (2, 9), generator=generator).to(device())


def loss_of(case, model, data, step):
    if case.model == "toy":
        leave_out = 2 if case.skip and step % 2 else None
        return model(data, leave_out).float().square().mean()
    return next_token_loss(model(input_ids=data).logits[:, :-1], data[:, 1:]) / 16


def train(case, collectives):
    """Losses, gradient norms and final weights of AdamW steps, everything of the case switched on."""
    model = build(case, collectives)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    generator = torch.Generator().manual_seed(5 + dist.get_rank() // case.tensor_parallel)
    figures = []
    for step in range(case.steps):
        for number in range(1, case.accumulation + 1):
            data = batch(case, generator)
            every = bool(case.parallel.get("reduce_every_micro_batch"))
            set_last_micro_batch(model, number == case.accumulation, every=every)
            loss = loss_of(case, model, data, step)
            loss.backward()
            figures.append(loss.item())
        figures.append(clip(model))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        if case.evaluate and step % 3 == 0:
            with torch.inference_mode() if step % 2 else torch.no_grad():
                figures.append(loss_of(case, model, data, step).item())
            if step == 3:  # a checkpoint in the middle
                state = {n: whole(p).clone() for n, p in model.state_dict().items()}
                figures += [t.float().sum().item() for t in state.values()]
    weights = {name: whole(p).detach().cpu().numpy() for name, p in model.named_parameters()}
    if collectives == "tide":
        for fabric in [pool.fabric for pool in model.tide.pools]:
            fabric.local.flush()
            if fabric.network is not None:
                fabric.network.flush()
    dist.barrier()
    return figures, weights


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def clip(model):
    """Gradients clipped to a small norm, so that the norm matters; the norm."""
    kinds = {}
    for p in model.parameters():
        if p.grad is not None:
            kinds.setdefault(p.grad.device_mesh, []).append(p)  # norms of one mesh can be added
    norms = [torch.nn.utils.get_total_norm([p.grad for p in ps]).full_tensor() for ps in kinds.values()]  # fmt: skip
    norm = torch.stack(norms).norm()
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(min(0.5 / norm.item(), 1))
    return norm.item()


@contextmanager
def replaced(owner, name, value):
    """`owner.name` is `value` inside: a protection taken away."""
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def both(case, reference):
    """The reference and TIDE in the same processes; what each rank saw must be equal, bit for bit."""
    expected, weights = train(case, reference)
    got, state = train(case, "tide")
    assert got == expected
    for name in weights:
        assert (state[name] == weights[name]).all(), name
    return got, state


def each(cases, reference):
    """`both` for one case after the other; a failure names its case."""
    found = {}
    for name, case in cases.items():
        try:
            found[name] = both(case, reference)
        except Exception as error:
            raise AssertionError(f"case {name!r} fails") from error
    return found
