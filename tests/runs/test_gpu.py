"""The same promises on GPUs: `pytest -m gpu`. Tests that need two are skipped with one."""

import signal

import pytest
import torch

from models.attention import document_mask, packed_attention
from tests.runs.helpers import SMALL, finish, metrics, reached, run, start, wait_for, weights

GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(GPUS == 0, reason="no GPU")]
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
BF16 = ["parallel=fsdp_bf16"]
HYBRID = ["+recipe=hybrid_1f3s", "model.num_layers=4", "model.expert_size=32",
          "model.num_heads=4", "model.num_kv_heads=2", "model.head_dim=32", "model.block=8",
          "model.top_k=2"]  # fmt: skip


def losses(run_dir):
    return [row["loss"] for row in metrics(run_dir)]


@pytest.mark.parametrize(("H", "K", "window"), [(4, 4, None), (8, 2, None), (4, 1, 5)])
def test_flash_attention_agrees_with_the_mask(H, K, window):
    torch.manual_seed(0)
    B, S, D = 2, 64, 32
    q = torch.randn(B, H, S, D, device="cuda", requires_grad=True)
    k, v = (torch.randn(B, K, S, D, device="cuda", requires_grad=True) for _ in range(2))
    cu = torch.tensor([0, 10, 64, 65, 100, 128], dtype=torch.int32, device="cuda")
    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    out, _ = packed_attention(
        torch.nn.Module(), *half, None, scaling=0.2, cu_seq_lens_q=cu, max_length_q=54,
        sliding_window=window,
    )  # fmt: skip
    mask = document_mask(cu, B, S)
    if window:
        mask = mask & ~torch.ones(S, S, dtype=torch.bool, device="cuda").tril(-window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=0.2, enable_gqa=True
    ).transpose(1, 2)
    grad = torch.randn_like(expected)
    out.backward(grad.bfloat16())
    expected.backward(grad)

    def relative(a, b):
        return ((a.float() - b).norm() / b.norm()).item()

    assert relative(out, expected) < 1e-2
    for x, y in zip(half, (q, k, v), strict=True):
        assert relative(x.grad, y.grad) < 1e-2


def test_bf16_on_one_gpu_learns(tmp_path):
    code, output = run(
        *SMALL, *BF16, "launch.nproc=1", "trainer.steps=60", "optim.lr=3e-3", "optim.warmup=5",
        "run.dir=r", cwd=tmp_path,
    )  # fmt: skip
    assert code == 0, output
    assert losses(tmp_path / "r")[-1] < 4.0
    assert metrics(tmp_path / "r")[-1]["mfu"] is not None


@two_gpus
@pytest.mark.parametrize(
    "changes",
    [
        ["launch.nproc=2"],
        ["launch.nproc=2", "trainer.micro_batch_size=1", "collectives.smallest=0"],
        ["launch.nproc=2", "parallel.replicate=2", "parallel.activation_checkpointing=selective"],
    ],
)
def test_two_gpus_equal_one(changes, tmp_path):
    for name, extra in (("one", ["launch.nproc=1"]), ("r", changes)):
        code, output = run(*SMALL, *extra, "trainer.steps=20", f"run.dir={name}", cwd=tmp_path)
        assert code == 0, output
    assert losses(tmp_path / "r") == pytest.approx(losses(tmp_path / "one"), abs=1e-4)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=two_gpus)])
def test_a_resumed_run_is_the_same_bit_for_bit(nproc, tmp_path):
    common = [*SMALL, *BF16, f"launch.nproc={nproc}", "trainer.deterministic=true",
              "optim.schedule=constant", "trainer.resume=auto"]  # fmt: skip
    for name, ends in (("whole", [10]), ("parts", [4, 10])):
        for steps in ends:
            code, output = run(*common, f"run.dir={name}", f"trainer.steps={steps}", cwd=tmp_path)
            assert code == 0, output
    expected, _ = weights(tmp_path / "whole", 10)
    got, _ = weights(tmp_path / "parts", 10)
    assert all(torch.equal(got[key], expected[key]) for key in expected)


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=two_gpus)])
def test_a_signal_stops_and_saves(nproc, tmp_path):
    process = start(
        *SMALL, *BF16, f"launch.nproc={nproc}", "trainer.steps=100000", "run.dir=r", cwd=tmp_path
    )
    wait_for(lambda: reached(tmp_path / "r", 3))
    process.send_signal(signal.SIGTERM)
    code, output = finish(process, timeout=60)
    assert code == 75, output
    assert "resume with" in output


@two_gpus
def test_a_killed_rank_ends_the_job_within_seconds(tmp_path):
    import os
    import time

    from tests.processes import ranks_of

    process = start(*SMALL, *BF16, "trainer.steps=100000", "run.dir=r", cwd=tmp_path)
    wait_for(lambda: reached(tmp_path / "r", 3))
    begin = time.monotonic()
    os.kill(ranks_of(process.pid)[1], signal.SIGKILL)
    code, output = finish(process, timeout=60)
    assert code == 1, output
    assert "rank 1 was killed by SIGKILL" in output
    assert time.monotonic() - begin < 45


@pytest.mark.parametrize("recipe", [[], HYBRID], ids=["llama", "hybrid"])
def test_compiled_blocks_train_the_same(recipe, tmp_path):
    for name, extra in (("a", []), ("b", ["parallel.compile=true"])):
        code, output = run(
            *SMALL, *BF16, *recipe, *extra, "launch.nproc=1", "trainer.steps=6",
            f"run.dir={name}", cwd=tmp_path,
        )  # fmt: skip
        assert code == 0, output
    assert losses(tmp_path / "b") == pytest.approx(losses(tmp_path / "a"), abs=2e-2)


@two_gpus
def test_two_gpus_that_divide_experts_agree_with_two_that_do_not(tmp_path):
    found = []
    for experts in (1, 2):
        code, output = run(
            *SMALL, *BF16, *HYBRID, "parallel.activation_checkpointing=block", "launch.nproc=2",
            f"parallel.experts={experts}", "trainer.steps=10", f"run.dir={experts}", cwd=tmp_path,
        )  # fmt: skip
        assert code == 0, output
        found.append(losses(tmp_path / str(experts)))
    assert found[1] == pytest.approx(found[0], abs=2e-2)


@two_gpus
@pytest.mark.parametrize(
    "model",
    [[], ["model.type=mistral", "+model.config.sliding_window=9", "parallel.sequence.sliding_window=halo"]],
)  # fmt: skip
def test_two_gpus_that_share_sequences_agree_with_one(model, tmp_path):
    found = []
    for size in (1, 2):
        code, output = run(
            *SMALL, *BF16, *model, f"launch.nproc={size}", f"parallel.sequence.size={size}",
            "model.attention=packed", "trainer.steps=10", f"run.dir={size}", cwd=tmp_path,
        )  # fmt: skip
        assert code == 0, output
        found.append(losses(tmp_path / str(size)))
    assert found[1] == pytest.approx(found[0], abs=2e-2)


QUIET = ("trainer.workers=0", "logging.wandb.mode=disabled", "logging.every=1", "checkpoint.every=0",
         "trainer.eval_every=0", "optim.warmup=0", "optim.schedule=constant")  # fmt: skip
LARGE = {
    "llama70b": [*SMALL, "model.hidden_size=256", "model.intermediate_size=512", "model.head_dim=64",
                 "model.vocab_size=257"],
    "qwen3_30b_a3b": ["model.num_layers=2", "model.hidden_size=256", "model.num_heads=4",
                      "model.num_kv_heads=2", "model.head_dim=64", "model.vocab_size=257",
                      "model.config.moe_intermediate_size=128", "model.config.num_experts=8",
                      "model.config.num_experts_per_tok=2", "data.sequence_length=128"],
    "wan22": ["model.num_layers=2", "model.num_heads=4", "model.head_dim=64", "model.text_size=64",
              "model.intermediate_size=512", "data.frames=2", "data.height=16", "data.width=16",
              "data.max_words=16", "data.samples=8", "data.holdout=0"],
}  # fmt: skip
"""The large recipes, cut down to sizes that kernels of GPUs take."""


@two_gpus
@pytest.mark.parametrize("name", LARGE)
def test_large_recipes_learn_the_same_on_two_gpus_as_on_one(name, tmp_path):
    """In bf16 on TIDE, all groups of it, with recomputation; learns what it has seen."""
    if name == "wan22":
        pytest.importorskip("diffusers")
    cut = (f"+recipe={name}_fsdp_tide", *LARGE[name], *QUIET, "trainer.batch_size=8",
           "trainer.micro_batch_size=2", "collectives.smallest=0", "optim.lr=3e-3",
           "trainer.steps=30")  # fmt: skip
    for ranks in (1, 2):
        code, output = run(*cut, f"launch.nproc={ranks}", f"run.dir={ranks}", cwd=tmp_path)
        assert code == 0, output
    one, two = (losses(tmp_path / str(ranks)) for ranks in (1, 2))
    assert two[:10] == pytest.approx(one[:10], rel=2e-2)
    assert two[-1] < 0.95 * two[0]
