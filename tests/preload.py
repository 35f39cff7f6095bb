"""Imported once by the fork server of `tests.ranks`, so that ranks start fast."""

from importlib import import_module
from importlib.util import find_spec

from trainer.startup import importing

with importing():  # what is frozen here is not copied when a rank collects garbage
    for name in (
        "recipes.hybrid",
        "recipes.lelora.classify",
        "recipes.lelora.sft",
        "recipes.pretrain",
        "recipes.sft",
        "recipes.wan.task",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "trainer.cli",
        "trainer.loop",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        *(["diffusers.models.transformers.transformer_wan"] if find_spec("diffusers") else []),
    ):
        import_module(name)
