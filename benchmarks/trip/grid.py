"""Which models a study compares: names of groups, or Hydra overrides that choose one.

"din"                                      configs/model/din.yaml
"transformer model.rank=learned"           with a part exchanged
"popularity", "cosine"                     counts, which nothing trains
"baselines", "encodings", "parts", "levers"  groups of the above
"""

from collections.abc import Sequence

COUNTS = ("popularity", "cosine")
ENCODINGS = {
    "none": "",
    "learned": "model.rank=learned",
    "sinusoidal": "model.rank=sinusoidal",
    "rope": "model.relative=rope",
    "alibi": "model.relative=alibi",
    "hstu": "model.relative=hstu",
    "tin": "model.time=tin",
    "fre": "model.rank=fre",
    "trte": "model.time=trte",
    "both": "model.rank=fre model.time=trte",
}
MASKS = ("causal", "bidirectional", "group")
APART = "model.read=apart model.keys=[items,tokens,summaries]"
GROUPS = {
    "baselines": [
        *COUNTS,
        "mean_pooling",
        "target_attention",
        "target_attention model.rank=fre model.time=trte",
        "target_attention_reconstruction",
        "target_attention_reconstruction model.rank=fre model.time=trte",
        "din",
        "tin",
        "bst",
        "sasrec",
        "hstu",
        "transformer",
    ],
    "encodings": [
        " ".join(f"transformer model.mask={mask} {encoding}".split())
        for encoding in ENCODINGS.values()
        for mask in MASKS
    ],
    "parts": [
        "trip",
        "trip model.rank=none",
        "trip model.rank_start=random",
        "trip model.rank_gate=true",
        "trip model.time=none",
        "trip model.reconstruction=0",
        "trip model.reconstruction=1",
        "trip model.mask=causal",
        "trip model.mask=bidirectional",
        "trip model.mask=learned",
        "trip model.session_gap=1800",
        "trip model.summaries=0",
        "trip model.keys=[summaries]",
        "trip model.keys=[items,tokens,summaries]",
    ],
    "levers": [
        "trip model.keys=[items,tokens,summaries] model.mask=learned model.rank_gate=true",
        "trip model.keys=[items,tokens,summaries] model.mask=bidirectional model.reconstruction=1",
        "trip model.mask=learned model.reconstruction=1 model.rank_gate=true",
        "trip model.summaries=0 model.keys=[items,tokens] model.mask=learned",
        f"trip {APART}",
        f"trip {APART} model.mask=learned",
        f"trip {APART} model.mask=bidirectional model.reconstruction=1",
        f"trip {APART} model.mask=learned model.reconstruction=1 model.rank_gate=true",
        f"trip {APART.replace('apart', 'gated')} model.mask=learned",
        "trip model.read=apart model.summaries=0 model.keys=[items,tokens] model.mask=learned",
        f"trip {APART} model.session_gap=1800",
        f"trip {APART} model.rank_start=waves",
    ],
}


def models(specs: Sequence[str]) -> list[str]:
    """Every model once, groups in full, in the order given."""
    found = [model for spec in specs for model in GROUPS.get(spec, [" ".join(spec.split())])]
    return list(dict.fromkeys(found))


def overrides(model: str) -> list[str]:
    """What composes it: its first word is a file of `configs/model`."""
    name, *others = model.split()
    return [f"model={name}", *others]
