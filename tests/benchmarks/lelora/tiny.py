"""A small encoder and texts, as `benchmarks.lelora.prepare` packs them."""

import torch
from safetensors.torch import save_file

from benchmarks.lelora.prepare import LENGTHS, PARTS


def write(file, texts=60, length=8, words=20, labels=3):
    """Which of three words a text has decides its label."""
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    config = BertConfig(vocab_size=words, num_hidden_layers=2, hidden_size=16, intermediate_size=24,
                        num_attention_heads=2, max_position_embeddings=length,
                        initializer_range=0.2)  # fmt: skip
    found = {
        f"model/{n}": t.half().contiguous()
        for n, t in BertModel(config).state_dict().items()
        if t.is_floating_point()
    }
    for task in LENGTHS:
        for part in PARTS:
            ids = torch.randint(4, words, (texts, length))
            answers = torch.randint(labels, (texts,))
            ids[torch.arange(texts), torch.randint(1, 4, (texts,))] = answers + 1
            lengths = torch.randint(4, length + 1, (texts,))
            ids[torch.arange(length) >= lengths[:, None]] = 0
            found |= {
                f"{task}/{part}/ids": ids.short(),
                f"{task}/{part}/lengths": lengths.int(),
                f"{task}/{part}/labels": answers.int(),
            }
    save_file(found, file)
    return file
