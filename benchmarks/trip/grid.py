"""Which models a study compares: names of groups, or Hydra overrides that choose one.

"din"                                      configs/model/din.yaml
"transformer model.rank=learned"           with a part exchanged
"popularity", "cosine"                     counts, which nothing trains
"baselines", "encodings", "parts", "levers", "together"  groups of the above
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
EQUAL = "model.session_gap=0"
TOGETHER = f"{EQUAL} model.read=together"
"""One attention over all keys, and groups of equally many items."""
EVERY, ABOVE = "model.keys=[items,tokens,summaries]", "model.keys=[tokens,summaries]"
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
        "bst model.rank=none model.rank_start=sinusoid",
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
        "trip model.reconstruction_rows=0.25",
        "trip model.mask=causal",
        "trip model.mask=bidirectional",
        "trip model.mask=learned",
        f"trip {EQUAL}",
        "trip model.summaries=0 model.keys=[items,tokens]",
        f"trip {ABOVE}",
        "trip model.read=together",
        "trip model.read=gated",
    ],
    "levers": [
        f"trip {EQUAL} model.mask=learned",
        f"trip {EQUAL} model.mask=bidirectional model.reconstruction=1",
        f"trip {EQUAL} model.mask=learned model.reconstruction=1 model.rank_gate=true",
        f"trip {EQUAL} model.mask=learned model.read=gated",
        f"trip {EQUAL} model.mask=learned model.summaries=0 model.keys=[items,tokens]",
        f"trip {EQUAL} model.rank_start=waves",
        f"trip {TOGETHER}",
        f"trip {TOGETHER} model.mask=learned model.rank_gate=true",
        f"trip {TOGETHER} model.mask=bidirectional model.reconstruction=1",
        f"trip {TOGETHER} model.mask=learned model.summaries=0 model.keys=[items,tokens]",
        f"trip {TOGETHER} {ABOVE}",
        f"trip {TOGETHER} {ABOVE} model.mask=learned model.reconstruction=1 model.rank_gate=true",
    ],
    "together": [
        f"trip {TOGETHER} {ABOVE}{change}"
        for change in (
            "",
            " model.rank=none",
            " model.rank_start=random",
            " model.rank_gate=true",
            " model.time=none",
            " model.reconstruction=0",
            " model.reconstruction=1",
            " model.mask=causal",
            " model.mask=bidirectional",
            " model.mask=learned",
        )
    ]
    + [
        f"trip model.read=together {ABOVE}",
        f"trip {TOGETHER} {ABOVE} model.summaries=0",
        f"trip {TOGETHER} model.keys=[summaries]",
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
