"""The kernels of decoding beside the modules and tensors that they stand for."""

import os
import subprocess
import sys
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from models.slide import decode, launches
from models.slide.build import build
from models.slide.config import SlideConfig
from models.slide.history import pad_left
from models.slide.trie import build_trie
from tests.models.slide.small import HISTORIES, small_ids

SIZES = (40, 7, 33)
"""More and fewer codes than are worked out together."""


def a_model(kind, device, codes="heads", tied=True, seed=0):
    torch.manual_seed(seed)
    config = SlideConfig(
        hidden_size=64, num_layers=2, num_heads=2, max_history=5, dropout=0.0, list_length=6,
        codes=codes, tied=tied,
    )  # fmt: skip
    model = build(config, SIZES)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.to(device, kind).eval()


KERNELS = ("attend", "begin", "finish", "choose")
"""What `launches` may allow."""
SMALL = launches.Tiles(users=2, rows=16, warps=4, codes=16, narrow=16, fetched=1)
"""Programs that do not see all of a row at a time."""


@contextmanager
def kernels(*used, tiles=None):
    """Have these used and no others, whatever the device."""
    with pytest.MonkeyPatch.context() as patch:
        for name in KERNELS:
            if name not in used:
                patch.setattr(launches, name, lambda *given: False)
            elif name == "begin":
                patch.setattr(launches, name, lambda x_BWD, *given: x_BWD.shape[1] == 1)
            else:
                patch.setattr(launches, name, lambda *given: True)
        if tiles is not None:
            patch.setattr(launches, "tiles", lambda rows: tiles)
        yield


def asked(device):
    """More users than a program has, some of whom may not be given some items."""
    histories = [[*h, user % 60] for user, h in enumerate(HISTORIES * 5)]
    exclude = [[user % 9, 3 * user % 60] for user in range(len(histories))]
    return pad_left(histories, 5).to(device), pad_left(exclude, 3).to(device)


def same_lists(found, expected, kind):
    """Equal in fp32; in bf16 a sum in another order turns some choices between likely codes."""
    same_BK = (found.items_BK == expected.items_BK).cumprod(1).bool()
    assert same_BK.all() if kind == torch.float32 else same_BK[:, 0].float().mean() > 0.8
    tolerance = 1e-5 if kind == torch.float32 else 0.05
    torch.testing.assert_close(
        found.scores_BK[same_BK], expected.scores_BK[same_BK], rtol=tolerance, atol=tolerance
    )


def kinds(device):
    """In bf16 on GPUs only: the interpreter rounds towards zero."""
    return [torch.float32, torch.bfloat16] if device == "cuda" else [torch.float32]


def compare_items(device):
    """Lists of 6."""
    items_BH, exclude_BU = asked(device)
    for kind in kinds(device):
        for tied, distinct, tiles in [(True, False, SMALL), (False, True, None)]:
            trie = build_trie(small_ids(60, SIZES, distinct), torch.device(device))
            model = a_model(kind, device, tied=tied, seed=int(distinct))
            lists = []
            for used in (["choose"], []):
                with kernels(*used, tiles=tiles):
                    lists.append(decode.greedy_list([model], trie, items_BH, 6, exclude_BU))
            for row, out in zip(lists[0].items_BK.tolist(), exclude_BU.tolist(), strict=True):
                assert min(row) >= 0
                assert len(set(row)) == len(row)
                assert not set(row) & set(out)
            same_lists(*lists, kind)


def compare_layers(device):
    """Lists and beams of either kind of model."""
    users = 20 if device == "cuda" else 6  # the interpreter takes its time
    items_BH, exclude_BU = (given[:users] for given in asked(device))
    trie = build_trie(small_ids(60, SIZES), torch.device(device))
    ways = {
        "list": lambda m: decode.greedy_list([m], trie, items_BH, 3, exclude_BU),
        "beams": lambda m: decode.beam_search([m], trie, items_BH, 20, exclude_BU),
        "few beams": lambda m: decode.beam_search([m], trie, items_BH, 5, exclude_BU),
    }
    for kind in kinds(device):
        for codes, how, *used in [
            ("steps", "list", "attend"), ("steps", "beams", "attend"), ("steps", "few beams", "finish"),
            ("steps", "list", "begin"), ("heads", "list", "begin", "finish"),
        ]:  # fmt: skip
            model, lists = a_model(kind, device, codes), []
            for some in (used, []):
                with kernels(*some, tiles=SMALL if "finish" in used else None):
                    lists.append(ways[how](model))
            same_lists(*lists, kind)


@pytest.mark.slow
@pytest.mark.parametrize("compared", ["compare_items", "compare_layers"])
def test_kernels_find_the_same_in_the_interpreter(compared):
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-c", f"from tests.models.slide.test_kernels import *; {compared}('cpu')"],
        env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("compared", [compare_items, compare_layers])
def test_kernels_find_the_same_on_the_gpu(compared):
    compared("cuda")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_norms_have_the_epsilon_of_the_kernels(device):
    """In bf16 as well, whose own is 65,536 times as large."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    x = torch.full((1, 64), 0.001, dtype=torch.bfloat16, device=device)
    expected = x[0, 0].float() / (x[0, 0].float() ** 2 + launches.EPS).sqrt()
    for normal in (torch.nn.RMSNorm(64).to(x), lambda x: torch.nn.functional.rms_norm(x, (64,))):
        assert normal(x)[0, 0].item() == pytest.approx(expected.item(), rel=0.01)


def compiled(kernel, pointers, constants, warps):
    """For an H100 or H200, of which none is needed."""
    triton = pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kinds = {
        name: f"*{pointers.get(name, 'bf16')}" if name.endswith("_ptr")
        else "constexpr" if name in constants else "fp32" if name in ("eps", "root") else "i32"
        for name in kernel.arg_names
    }  # fmt: skip
    source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return made.asm["cubin"]


@pytest.mark.slow
def test_kernels_compile_for_hopper():
    """What only the compiler refuses, and the interpreter lets pass."""
    pytest.importorskip("triton")
    from models.slide import attend_triton, item_triton, layer_triton

    tables = {"child_ptr": "i32", "items_ptr": "i32", "leaf_items_ptr": "i64", "score_ptr": "fp32",
              "used_ptr": "i64", "used_codes_ptr": "i64", "sums_ptr": "fp32", "best_ptr": "i64",
              "code_ptr": "i64", "state_ptr": "i64", "total_ptr": "fp32"}  # fmt: skip
    masks, offsets = {"valid_ptr": "i1"}, (1, 257, 513)
    tiles, D, E, L = launches.tiles(64), 256, 64, 3
    early = {"EARLY": True}
    own = {"E": E, "PLACES": 32, "OWN": 16}
    product = {"D": D, "F": 4 * D, "M": tiles.rows, "K": 64, **early}
    head = {"D": D, "M": tiles.rows, "LEVEL": 2, **early}
    for kernel, pointers, constants, warps in [
        (attend_triton._attend, masks, {**own, "M": attend_triton.BEAMS}, 4),
        (layer_triton._attend, masks, {**own, "D": D, "M": tiles.users, "K": 128, **early}, tiles.warps),
        (layer_triton._widen, {}, {**product, "N": 64}, tiles.warps),
        (layer_triton._narrow, {}, {**product, "N": tiles.narrow}, tiles.warps),
        (item_triton._inner, tables, {**head, "OFFSETS": offsets, "TILES": 8, "N": 32}, tiles.warps),
        (item_triton._logits, tables,
         {**head, "L": L, "N": tiles.codes, "n": 64, "USED": item_triton.USED}, tiles.warps),
        (item_triton._finish, tables,
         {"OFFSETS": offsets, "L": L, "D": D, "TILES": 8, "USED": 32, **early}, 1),
    ]:  # fmt: skip
        assert compiled(kernel, pointers, constants, warps)


def test_they_are_left_where_they_cannot_be_used():
    def row(*shape, device="cuda", dtype=torch.float32):
        with FakeTensorMode():  # needs no GPU
            return torch.empty(shape, device=device, dtype=dtype)

    with torch.no_grad():
        for allowed in (launches.finish, launches.choose, lambda x: launches.attend(x, 32)):
            shape = (50, 64) if allowed is launches.choose else (8, 1, 64)
            assert allowed(row(*shape))
            assert not allowed(row(*shape, device="cpu"))
            assert not allowed(row(*shape, dtype=torch.float64))
            with torch.enable_grad():
                assert not allowed(row(*shape))
        assert not launches.finish(row(8, 1, 96))
        assert not launches.finish(row(launches.MOST_ROWS, 2, 64))
        assert launches.begin(row(8, 1, 64), 32, 60)
        assert not launches.begin(row(8, 2, 64), 32, 60)
        assert not launches.begin(row(8, 1, 64), 32, 4 * launches.KEYS)
