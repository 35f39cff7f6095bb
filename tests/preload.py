"""Imported once by the fork server of `tests.ranks`, so that ranks start fast."""

from importlib import import_module

from trainer.startup import importing

with importing():  # what is frozen here is not copied when a rank collects garbage
    for name in (
        "recipes.hybrid",
        "recipes.lelora.classify",
        "recipes.lelora.sft",
        "recipes.pretrain",
        "recipes.sft",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.run",
        "trainer.cli",
        "trainer.loop",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
    ):
        import_module(name)
