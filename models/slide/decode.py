"""From histories to lists of items: beam search, and the whole list in one greedy pass.

B users, W beams, C codes of a level, L levels, K items of a list, R items of the fullest leaf,
U items that may not be written (again)

Both walk the trie on the device. A code is allowed if an item is left below it: the items below it
(`Trie.items_S`), less those of the U used items that are below it, which are counted by walking along
with them. So nothing invalid and nothing twice is ever written, exactly, and no step asks the host
or has a shape that depends on data. Scores are sums of log-probabilities over all codes of a level,
averaged over the models if there are several.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.slide import launches
from models.slide.build import Decoder
from models.slide.heads import SlideHeads
from models.slide.history import NOTHING, read_history
from models.slide.trie import Trie


class Lists(NamedTuple):
    """The items of each user, best first."""

    items_BK: Tensor
    """NOTHING where no item was left."""
    scores_BK: Tensor
    """Log-probabilities; -inf where there is no item."""


@dataclass(frozen=True)
class Walk:
    """Where beams stand in the trie, and which of the used items are below."""

    state_BW: Tensor
    below_BWU: Tensor

    @classmethod
    def at_root(cls, used_BU: Tensor) -> "Walk":
        """One beam a user."""
        state_BW = torch.zeros(len(used_BU), 1, dtype=torch.int64, device=used_BU.device)
        return cls(state_BW, (used_BU != NOTHING)[:, None])

    def allowed(self, trie: Trie, codes_BU: Tensor) -> Tensor:
        """Which codes lead to an item that is left (B, W, C); `codes` are those of the used items."""
        child_BWC = trie.children(self.state_BW)
        used_BWC = torch.zeros_like(child_BWC)
        codes_BWU = codes_BU[:, None].expand_as(self.below_BWU)
        used_BWC.scatter_add_(2, codes_BWU, self.below_BWU.long())
        return (child_BWC >= 0) & (trie.items_S[child_BWC.clamp(min=0)] > used_BWC)

    def step(self, trie: Trie, parents_BW: Tensor, code_BW: Tensor, codes_BU: Tensor) -> "Walk":
        """On from these of the beams by these codes; one that leads nowhere goes to the root."""
        state_BW = self.state_BW.gather(1, parents_BW)
        below_BWU = self.below_BWU.take_along_dim(parents_BW[..., None], dim=1)
        state_BW = trie.child(state_BW, code_BW).clamp(min=0)
        return Walk(state_BW, below_BWU & (codes_BU[:, None] == code_BW[..., None]))


def used_codes(trie: Trie, used_BU: Tensor) -> Tensor:
    """Codes of items that may not be written (B, U, L); of NOTHING, those of any item."""
    return trie.codes_IL[used_BU.clamp(min=0)]


def _first_left(trie: Trie, state_BW: Tensor, used_BU: Tensor) -> Tensor:
    """The items of each leaf that are not used, in their order, then NOTHING: (B, W, R)."""
    leaf_BW = (state_BW - trie.first_leaf).clamp(min=0)
    items_BWR = trie.leaf_items_FR[leaf_BW]
    taken_BWR = (items_BWR[..., None] == used_BU[:, None, None]).any(3) | (items_BWR == NOTHING)
    order = taken_BWR.to(torch.int8).argsort(dim=2, stable=True)
    return items_BWR.masked_fill(taken_BWR, NOTHING).gather(2, order)


class Ensemble:
    """Models that read the same histories and write the same codes."""

    def __init__(
        self, models: Sequence[Decoder], trie: Trie, items_BH: Tensor, places: int
    ) -> None:
        self.models = models
        begun = [read_history(model, trie, items_BH, places) for model in models]
        self.caches = [cache for cache, _ in begun]
        self.first_B1C = self._mean([logits for _, logits in begun])

    def _mean(self, logits: Sequence[Tensor]) -> Tensor:
        total = sum(x.float().log_softmax(-1) for x in logits)
        assert isinstance(total, Tensor)
        return total / len(self.models)

    def write(self, level: int, code_BW: Tensor, slot: int = 0) -> Tensor:
        """Put a code of this level behind each beam; returns log-probabilities of the next (B, W, C)."""
        slots_BW = torch.full_like(code_BW, slot)
        pairs = zip(self.models, self.caches, strict=True)
        return self._mean(
            [model(code_BW + model.offsets[level], slots_BW, cache)[0] for model, cache in pairs]
        )

    def keep(self, parents_BW: Tensor) -> None:
        """See `Cache.keep`."""
        for cache in self.caches:
            cache.keep(parents_BW)

    def forget(self) -> None:
        """See `Cache.forget`."""
        for cache in self.caches:
            cache.forget()


@torch.no_grad()
def beam_search(
    models: Sequence[Decoder], trie: Trie, items_BH: Tensor, beams: int, exclude_BU: Tensor
) -> Lists:
    """The `beams` best items for each history (B, K = beams), none of which is in `exclude`.

    With as many beams as the trie has states at a level, this is the exact order of all items. Items
    with the same codes have the same score and follow each other in their order.
    """
    ensemble = Ensemble(models, trie, items_BH, trie.levels - 1)
    codes_BUL = used_codes(trie, exclude_BU)
    walk, logp_BWC = Walk.at_root(exclude_BU), ensemble.first_B1C
    total_BW = logp_BWC.new_zeros(len(items_BH), 1)
    for level in range(trie.levels):
        codes_BU, C = codes_BUL[..., level], trie.sizes[level]
        allowed_BWC = walk.allowed(trie, codes_BU)[..., :C]
        score_BWC = (total_BW[..., None] + logp_BWC).masked_fill(~allowed_BWC, float("-inf"))
        total_BW, at_BW = score_BWC.flatten(1).topk(min(beams, score_BWC[0].numel()), dim=1)
        parents_BW, code_BW = at_BW // C, at_BW % C
        walk = walk.step(trie, parents_BW, code_BW, codes_BU)
        if level + 1 < trie.levels:
            ensemble.keep(parents_BW)
            logp_BWC = ensemble.write(level, code_BW)
    items_BWR = _first_left(trie, walk.state_BW, exclude_BU)
    found_BWR = total_BW.isfinite()[..., None] & (items_BWR != NOTHING)
    items_BN = items_BWR.masked_fill(~found_BWR, NOTHING).flatten(1)
    scores_BWR = total_BW[..., None].expand_as(items_BWR).masked_fill(~found_BWR, float("-inf"))
    order_BK = (items_BN == NOTHING).to(torch.int8).argsort(dim=1, stable=True)[:, :beams]
    return Lists(items_BN.gather(1, order_BK), scores_BWR.flatten(1).gather(1, order_BK))


@torch.no_grad()
def greedy_list(
    models: Sequence[Decoder],
    trie: Trie,
    items_BH: Tensor,
    length: int,
    exclude_BU: Tensor,
    feedback: bool = True,
    constrain: bool = True,
    noise: float = 0.0,
) -> Lists:
    """A list in one pass of `length` times L steps, each of which takes the likeliest code left.

    Without `feedback` no item sees those before it: an item-wise model, asked again and again for
    something else. Without `constrain` any code may be written, to see what the trie is for: what is no
    item is NOTHING, and items may be there twice. With `noise`, a temperature, codes are drawn instead:
    the likeliest after Gumbel noise is a draw from the codes that are allowed.
    """
    plain = feedback and constrain and not noise and trie.child_NC is not None
    model = models[0] if len(models) == 1 else None
    if plain and isinstance(model, SlideHeads) and launches.choose(model.tokens_VD):
        from models.slide.item_triton import write_list

        return write_list(model, trie, items_BH, length, exclude_BU)
    L = trie.levels
    ensemble = Ensemble(models, trie, items_BH, length * L)
    B, U = exclude_BU.shape
    used_BU = torch.cat([exclude_BU, exclude_BU.new_full((B, length), NOTHING)], dim=1)
    codes_BUL = used_codes(trie, used_BU)
    one_BW = torch.zeros(B, 1, dtype=torch.int64, device=used_BU.device)
    logp_BWC, scores = ensemble.first_B1C, []
    for slot in range(length):
        walk, total_BW = Walk.at_root(used_BU), logp_BWC.new_zeros(B, 1)
        for level in range(L):
            codes_BU = codes_BUL[..., level]
            allowed_BWC = walk.allowed(trie, codes_BU)[..., : trie.sizes[level]]
            if constrain:
                logp_BWC = logp_BWC.masked_fill(~allowed_BWC, float("-inf"))
            code_BW = (_noisy(logp_BWC / noise) if noise else logp_BWC).argmax(2)
            best_BW = logp_BWC.gather(2, code_BW[..., None]).squeeze(2)
            total_BW = total_BW + best_BW
            walk = walk.step(trie, one_BW, code_BW, codes_BU)
            if level + 1 < L or (feedback and slot + 1 < length):
                logp_BWC = ensemble.write(level, code_BW, slot + 1 if feedback else 0)
        item_B = _first_left(trie, walk.state_BW, used_BU if constrain else used_BU[:, :0])[:, 0, 0]
        found_B = total_BW[:, 0].isfinite() & (walk.state_BW[:, 0] >= trie.first_leaf)
        used_BU[:, U + slot] = item_B.masked_fill(~found_B, NOTHING)
        codes_BUL[:, U + slot] = trie.codes_IL[item_B.clamp(min=0)]
        scores.append(total_BW)
        if not feedback:
            ensemble.forget()
            logp_BWC = ensemble.first_B1C
    return Lists(used_BU[:, U:], torch.cat(scores, dim=1))


def _noisy(logp_BWC: Tensor) -> Tensor:
    uniform_BWC = torch.rand_like(logp_BWC).clamp(1e-20, 1 - 1e-7)
    return logp_BWC - (-uniform_BWC.log()).log()


@torch.no_grad()
def allowed_along(trie: Trie, lists_BK: Tensor) -> list[list[Tensor]]:
    """Which codes were allowed when these lists were written (B, C): of each item, of each level."""
    codes_BKL = used_codes(trie, lists_BK)
    found = []
    for slot in range(lists_BK.shape[1]):
        walk = Walk.at_root(lists_BK[:, :slot])
        one_BW = torch.zeros_like(walk.state_BW)
        of_item = []
        for level in range(trie.levels):
            of_item.append(walk.allowed(trie, codes_BKL[:, :slot, level])[:, 0])
            code_BW = codes_BKL[:, slot, level, None]
            walk = walk.step(trie, one_BW, code_BW, codes_BKL[:, :slot, level])
        found.append(of_item)
    return found
