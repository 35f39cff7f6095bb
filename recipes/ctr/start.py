"""First vectors of items from who met them in training, so that every model starts with the same ones.

    U users, V items that training knows, D hidden size

Where most items are rare, what a model reaches depends more on how its item table began than on what
it does with it; a table from counts takes that out of a comparison. A training click is among the
counts that place its own item, so a model that trusts the table too long learns from its own answers.
"""

import json

import numpy as np
import torch
from numpy.typing import NDArray

from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN
from recipes.ctr.frozen import frozen
from recipes.ctr.table import Interactions, counts_by, hash_of
from recipes.ctr.targets import Split
from recipes.interactions.tables import Ints


def item_vectors(table: Interactions, parts: Split, D: int, folder: str) -> NDArray[np.float32]:
    """(V, D), in the order of the vocabulary; made once, and kept in `folder`."""
    known = np.flatnonzero(parts.known_E)
    users, items = table.users_E[known], parts.vocabulary_I[table.items_E[known]] - UNSEEN - 1
    key = json.dumps([table.fingerprint, hash_of(known), D])
    return frozen(folder, "items", key, lambda: singular_vectors(users, items, D))


def singular_vectors(users: Ints, items: Ints, D: int) -> NDArray[np.float32]:
    """Right singular vectors of users x items, each pair over the root of both counts.

    Each times its singular value, then every item's vector scaled to the length of those that the
    model would draw at random.
    """
    U, V = int(users.max()) + 1, int(items.max()) + 1
    users, items = np.divmod(np.unique(users * V + items), V)
    values = 1 / np.sqrt(counts_by(users, U)[users] * counts_by(items, V)[items])
    pairs_2E = torch.from_numpy(np.stack([users, items]))
    matrix_UV = torch.sparse_coo_tensor(
        pairs_2E, torch.from_numpy(values), (U, V), check_invariants=False
    )
    rank = min(D, U, V)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        # more than are kept, since the last ones of a randomized decomposition are rough
        _, s_R, v_VR = torch.svd_lowrank(matrix_UV, q=min(2 * rank, U, V), niter=8)
    s_R, v_VR = s_R[:rank], v_VR[:, :rank]
    top_R = v_VR.abs().argmax(0)  # singular vectors have no sign of their own
    v_VR = v_VR * v_VR[top_R, torch.arange(rank)].sign() * s_R
    vectors_VD = torch.zeros(V, D, dtype=torch.float64)
    vectors_VD[:, :rank] = v_VR / v_VR.norm(dim=1, keepdim=True).clamp(min=1e-12)
    return (vectors_VD * EMBEDDING_STD * D**0.5).float().numpy()
