"""A small decoder with weights that make its choices differ, and plain twins of what it computes."""

import numpy as np
import torch

from models.slide.build import build
from models.slide.config import SlideConfig
from models.slide.ids import make_ids
from models.slide.model import training_inputs
from models.slide.trie import build_trie

SIZES = (4, 5, 6)
HISTORIES = ([1, 2, 3], [5], [7, 8, 9, 10, 11, 12], [])


def small_ids(items=40, sizes=SIZES, distinct=False, seed=0):
    """Random codes; a third of the items share theirs unless `distinct`."""
    generator = np.random.default_rng(seed)
    space = np.stack(np.meshgrid(*map(np.arange, sizes), indexing="ij"), -1).reshape(-1, len(sizes))
    rows = generator.permutation(len(space))[: items if distinct else items * 2 // 3]
    codes = space[
        rows if distinct else np.concatenate([rows, generator.choice(rows, items - len(rows))])
    ]
    return make_ids(codes, sizes, generator.integers(0, 3, items))


def small_model(sizes=SIZES, seed=0, list_length=0, codes="steps"):
    torch.manual_seed(seed)
    config = SlideConfig(
        hidden_size=16, num_layers=2, num_heads=2, max_history=5, dropout=0.0,
        list_length=list_length, codes=codes,
    )  # fmt: skip
    model = build(config, sizes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def trie_of(ids):
    return build_trie(ids, torch.device("cpu"))


@torch.no_grad()
def log_probabilities(model, ids, history, written, slots=True):
    """Of all codes of each level (C), for what follows `history` and the items `written`; uncached.

    A function of the codes that the next item already has.
    """
    newest = list(history)[-model.config.max_history :]

    def of(prefix):
        filler = [*prefix, *[0] * (len(ids.sizes) - len(prefix))]
        codes = [*ids.codes_IL[newest + list(written)].tolist(), filler]
        lists = torch.tensor([len(newest)]) if slots else None
        tokens, places = training_inputs(torch.tensor(codes)[None], ids.sizes, lists)
        return model(tokens, places)[len(prefix)][0, -1].log_softmax(-1)

    return of


@torch.no_grad()
def score(model, ids, history, item, written=()):
    """The log-probability of one item, by one pass over the whole sequence."""
    newest = list(history)[-model.config.max_history :]
    codes = torch.tensor(ids.codes_IL[[*newest, *written, item]])
    tokens, places = training_inputs(codes[None], ids.sizes, torch.tensor([len(newest)]))
    logits = model(tokens, places)
    return sum(
        x[0, -1].log_softmax(-1)[code].item() for x, code in zip(logits, codes[-1], strict=True)
    )


def in_order(ids, items):
    """Items of one ID as they follow each other."""
    return sorted(items, key=lambda item: ids.ranks_I[item])
