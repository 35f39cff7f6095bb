"""The item table: a vector for every item of the catalogue, found by its number.

V items, D hidden size

The model reads the table by calling it, and in no other way: whoever shards the model may have rows come
from other processes, and none of them need hold the whole table.
"""

import torch
from torch import Tensor, nn

from models.trip.encodings import EMBEDDING_STD
from models.trip.history import UNSEEN


class ItemTable(nn.Module):
    """One row for each item. Its only parameter has the rows, one after the other."""

    def __init__(self, num_items: int, hidden_size: int) -> None:
        super().__init__()
        self.num_items = num_items
        self.rows_VD = nn.Parameter(torch.empty(num_items, hidden_size))

    def forward(self, items: Tensor) -> Tensor:
        """The rows of these items, which may have any shape; a last dimension D is added."""
        return nn.functional.embedding(items, self.rows_VD)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """At random, but for what is no item: that is zero."""
        nn.init.normal_(self.rows_VD, std=EMBEDDING_STD)[: UNSEEN + 1] = 0
