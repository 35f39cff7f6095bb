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


def llama(layers=2, words=30, seed=0):
    """A small Llama with fewer heads of keys than of queries, and its output layer tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(vocab_size=words, num_hidden_layers=layers, hidden_size=16, intermediate_size=24,
                         num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
                         max_position_embeddings=64, initializer_range=0.3)  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.mul_(1 + 0.2 * torch.rand_like(parameter))
    return model


def packed_verses(model, pairs=40, length=12):
    """As `benchmarks.lelora.prepare_kjv` packs: the targets are what came, each a word further on."""
    found = {"about": torch.tensor([4, 2, 1000.0, model.config.rms_norm_eps], dtype=torch.float64)}
    for name, tensor in model.named_parameters():
        columns = tensor.shape[1] if tensor.ndim > 1 else 0
        data = tensor.detach().clone().contiguous().view(torch.uint8).flatten()
        found[f"model/{name}/0/{columns}"] = data
    words = model.config.vocab_size
    for part in PARTS:
        ids, rows = torch.zeros(pairs, length), []
        for row in range(pairs):
            source = torch.randint(3, words - 1, (int(torch.randint(2, 5, ())),))
            text = torch.cat(
                [torch.tensor([1]), source, torch.tensor([2]), source + 1, torch.tensor([2])]
            )
            ids[row, : len(text)] = text
            rows.append((len(source) + 2, len(text), row % 7))
        first, lengths, chapters = torch.tensor(rows, dtype=torch.int32).T.contiguous()
        found |= {
            f"kjv/{part}/ids": ids.to(torch.uint16), f"kjv/{part}/first": first,
            f"kjv/{part}/lengths": lengths, f"kjv/{part}/chapters": chapters,
            f"kjv/{part}/bytes": torch.tensor(3 * pairs),
        }  # fmt: skip
    return found
