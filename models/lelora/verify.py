"""`python -m models.lelora.verify BASE ADAPTER`: does an adapter do anything, once it is loaded?

A reader that does not find a tensor's name gives the base model's output, without an error. So the
folder is loaded by `peft` on the base model, every tensor is looked for in what was loaded, and the
outputs with and without the adapter are compared. Exit code 1 if something is wrong.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from models.lelora.peft_folder import PREFIX

TOKENS = 16


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m models.lelora.verify", description=__doc__)
    parser.add_argument("base", type=Path, help="folder of the base model")
    parser.add_argument("adapter", type=Path, help="folder of the adapter")
    options = parser.parse_args(arguments)
    try:
        print(f"{options.adapter}: {verify(options.base, options.adapter)}")
    except (OSError, ValueError) as error:
        print(f"error: {options.adapter}: {error}", file=sys.stderr)
        return 1
    return 0


@torch.no_grad()
def verify(base: Path, adapter: Path) -> str:
    """Load both and compare; says by how much outputs differ. Raises `ValueError`."""
    try:
        from peft import PeftConfig, PeftModel
    except ImportError as error:
        raise ValueError("peft is missing: pip install 'springtide[lelora]'") from error
    config = PeftConfig.from_pretrained(str(adapter))
    stored = load_file(adapter / "adapter_model.safetensors")
    model: Any = PeftModel.from_pretrained(_load(base, config, stored), str(adapter)).eval()
    _check_loaded(stored, dict(model.state_dict()))
    generator = torch.Generator().manual_seed(0)
    vocabulary = model.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, TOKENS), generator=generator)
    changed = model(input_ids=ids).logits.float()
    with model.disable_adapter():
        plain = model(input_ids=ids).logits.float()
    difference = float((changed - plain).abs().max())
    if not difference > 0:
        raise ValueError("the adapter changes nothing: outputs are those of the base model")
    return f"{len(stored)} tensors loaded, logits change by up to {difference:.3g}"


def _load(base: Path, config: Any, stored: dict[str, Tensor]) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    if config.task_type != "SEQ_CLS":
        return AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    heads = [t for n, t in stored.items() if ".lora_" not in n and n.endswith(".weight")]
    labels = heads[-1].shape[0] if heads else 2
    return AutoModelForSequenceClassification.from_pretrained(
        base, dtype=torch.float32, num_labels=labels
    )


def _check_loaded(stored: dict[str, Tensor], loaded: dict[str, Tensor]) -> None:
    """Raise `ValueError` for a stored tensor that the loaded model does not have."""
    plain = {
        name.replace(".default", "").replace(".modules_to_save", ""): tensor
        for name, tensor in loaded.items()
    }
    absent = [
        n
        for n, t in stored.items()
        if n not in plain or not torch.equal(plain[n].float(), t.float())
    ]
    if absent:
        raise ValueError(
            f"{len(absent)} of {len(stored)} tensors were not loaded, such as {absent[0]}: its name "
            f"must be that of a layer of the base model, behind {PREFIX}"
        )


if __name__ == "__main__":
    sys.exit(main())
