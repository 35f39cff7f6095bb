"""The exact decomposition of every adapted matrix: once for a base model, shared by all ranks.

Every rank gathers each matrix in turn; one of them, by the cost, decomposes it, and hands the result to
the others, so that no two ranks ever hold different signs or bases. What came of it is kept in a file
that the base model's checksum names: a run that is resumed must not decompose again.
"""

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from collectives.host import broadcast, gather_objects
from models.lelora.inject import Target
from models.lelora.spectrum import Atoms, decompose, svd_flops
from parallel.weights import checksum
from recipes.lelora.ranks import num_ranks, this_rank
from recipes.lelora.shards import gathered

FORMAT = 1
"""Raise it when the file changes its meaning."""


@dataclass(frozen=True)
class Spectra:
    """Decompositions by the targets' names."""

    atoms: Mapping[str, Atoms]
    base: int
    """Checksum of the base model."""
    seconds: float
    """It took to decompose; 0: they were kept."""
    file: Path


def find_spectra(
    model: nn.Module, targets: Sequence[Target], wanted: Mapping[str, Sequence[int]], cache_dir: str
) -> Spectra:
    """The decomposition of every target, with directions of the components that are `wanted`.

    Collective. Raises `ValueError` for a cache that cannot be written.
    """
    base = checksum(p for p in model.parameters() if not p.requires_grad)
    asked = json.dumps([FORMAT, base, {name: list(c) for name, c in wanted.items()}])
    folder = Path(os.environ.get("SPRINGTIDE_CACHE", cache_dir)).expanduser()
    digest = hashlib.blake2b(asked.encode(), digest_size=12).hexdigest()
    file = folder / f"spectra-{digest}.safetensors"
    kept = broadcast(_read(file) if this_rank() == 0 else None)
    if kept is not None:
        return Spectra(kept, base, 0.0, file)
    begin = time.monotonic()
    atoms = _decompose_all(model, targets, wanted)
    seconds = time.monotonic() - begin
    problem = broadcast(_write(file, atoms) if this_rank() == 0 else None)
    if problem is not None:
        raise ValueError(f"cannot write {file} ({problem}): set lelora.cache_dir")
    return Spectra(atoms, base, seconds, file)


def _decompose_all(
    model: nn.Module, targets: Sequence[Target], wanted: Mapping[str, Sequence[int]]
) -> dict[str, Atoms]:
    owners = share_out([(t.shape.outputs, t.shape.inputs) for t in targets], num_ranks())
    mine: dict[str, Atoms] = {}
    problem = ""
    for target, owner in zip(targets, owners, strict=True):
        weight = gathered(model.get_submodule(target.name).weight)  # type: ignore[arg-type]
        if owner == this_rank():
            try:
                mine[target.name] = decompose(target.oriented(weight), wanted[target.name])
            except ValueError as error:
                problem = problem or f"{target.name}: {error}: look at the base model's weights"
    found: dict[str, Atoms] = {}
    for part, wrong in gather_objects((mine, problem)):
        if wrong:
            raise ValueError(wrong)
        found |= part
    return {target.name: found[target.name] for target in targets}


def share_out(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """Which rank decomposes each matrix: the largest first, each to whom has least to do."""
    load = [0.0] * ranks
    owners = [0] * len(shapes)
    for number in sorted(range(len(shapes)), key=lambda n: (-svd_flops(shapes[n]), n)):
        owner = min(range(ranks), key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += svd_flops(shapes[number])
    return owners


def _read(file: Path) -> dict[str, Atoms] | None:
    try:
        stored = load_file(file)
    except (OSError, SafetensorError):
        return None
    names = sorted({name.rpartition("/")[0] for name in stored})
    fields = ("values_K", "components_J", "left_MJ", "right_JN")
    return {name: Atoms(*(stored[f"{name}/{field}"] for field in fields)) for name in names}


def _write(file: Path, atoms: Mapping[str, Atoms]) -> str | None:
    tensors: dict[str, Tensor] = {
        f"{name}/{field}": tensor.contiguous()
        for name, found in atoms.items()
        for field, tensor in vars(found).items()
    }
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        temporary = file.with_name(f".{file.name}.{os.getpid()}")
        save_file(tensors, temporary)
        os.replace(temporary, file)
    except OSError as error:
        return str(error.strerror)
    return None
