"""Imported once by the fork server of `tests.ranks`, so that ranks start fast."""

from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from trainer.startup import importing

OURS = [
    point for point in entry_points(group="springtide.tasks") if point.value.startswith("recipes.")
]

with importing():  # what is frozen here is not copied when a rank collects garbage
    for name in (
        *(point.module for point in OURS),
        "parallel.tide.seam",
        "parallel.tide.suitable",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.run",
        "trainer.cli",
        "trainer.dry_run.dry_run",
        "trainer.loop",
        "transformers.models.bert.modeling_bert",
        "transformers.models.llama.modeling_llama",
        "transformers.models.qwen3_moe.modeling_qwen3_moe",
        *(["torchrec.distributed.sharding.rw_sequence_sharding"] if find_spec("torchrec") else []),
        *(["diffusers.models.transformers.transformer_wan"] if find_spec("diffusers") else []),
    ):
        import_module(name)
    # A thousand regular expressions, made once in a process.
    import_module("transformers.conversion_mapping").get_checkpoint_conversion_mapping("llama")
