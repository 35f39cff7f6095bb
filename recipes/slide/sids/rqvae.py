"""RQ-VAE (Lee et al. 2022; TIGER): an autoencoder whose middle is quantized level by level.

I items, D numbers of an item, B items of a step, Z numbers of the middle, C codes

Codebooks begin as residual k-means of the untrained middle, and a code that has not been used for a
while begins anew at what the level quantizes, since codes that are never chosen never learn.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from recipes.slide.sids.kmeans import Quantized, nearest, residual_kmeans

WIDTH, MIDDLE = 256, 32
COMMITMENT = 0.25
REVIVE = 200
"""Every so many steps, codes without use since the last time begin anew."""


class Autoencoder(nn.Module):
    """Two small networks and codebooks between them."""

    def __init__(self, D: int, sizes: Sequence[int]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(D, WIDTH), nn.ReLU(), nn.Linear(WIDTH, MIDDLE))
        self.decoder = nn.Sequential(nn.Linear(MIDDLE, WIDTH), nn.ReLU(), nn.Linear(WIDTH, D))
        self.books = nn.ParameterList([nn.Parameter(torch.zeros(C, MIDDLE)) for C in sizes])

    def quantize(self, z_BZ: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Codes of each level (B), and what each level quantizes (B, Z)."""
        codes, lefts = [], []
        for book_CZ in self.books:
            code_B, _ = nearest(z_BZ.detach(), book_CZ.detach())
            codes.append(code_B)
            lefts.append(z_BZ)
            z_BZ = z_BZ - book_CZ[code_B].detach()
        return codes, lefts

    def loss(self, x_BD: Tensor) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        """Squared error of the reconstruction, plus what draws codes and middle together."""
        z_BZ = self.encoder(x_BD)
        codes, lefts = self.quantize(z_BZ)
        chosen = [book[code] for book, code in zip(self.books, codes, strict=True)]
        drawn = sum(
            (left.detach() - code).square().sum(1)
            + COMMITMENT * (left - code.detach()).square().sum(1)
            for left, code in zip(lefts, chosen, strict=True)
        )
        sum_BZ = torch.stack(chosen).sum(0)
        through_BZ = (
            z_BZ + (sum_BZ - z_BZ).detach()
        )  # the gradient passes as if nothing was quantized
        error_B = (self.decoder(through_BZ) - x_BD).square().sum(1)
        return (error_B + drawn).mean(), codes, lefts


def rqvae(
    x_ID: Tensor, sizes: Sequence[int], seed: int, steps: int, batch: int, lr: float
) -> Quantized:
    """Train on one process, on the device of `x`, and quantize all items."""
    devices = [x_ID.device] if x_ID.device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        model = Autoencoder(x_ID.shape[1], sizes).to(x_ID.device)
        model = _train(model, x_ID.float(), steps, min(batch, len(x_ID)), lr, seed)
    with torch.no_grad():
        codes, lefts = model.quantize(model.encoder(x_ID.float()))
    books = [book.detach().double().cpu() for book in model.books]
    return Quantized(torch.stack(codes, dim=1).cpu(), books, lefts[-1].double().cpu())


def _train(
    model: Autoencoder, x_ID: Tensor, steps: int, batch: int, lr: float, seed: int
) -> Autoencoder:
    with torch.no_grad():
        start = residual_kmeans(model.encoder(x_ID).cpu(), [len(b) for b in model.books], seed, 10)
        for book, center in zip(model.books, start.centers, strict=True):
            book.copy_(center)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=1e-4)
    used = [torch.zeros(len(book), dtype=torch.bool, device=x_ID.device) for book in model.books]
    for step in range(1, steps + 1):
        rows = torch.randint(len(x_ID), (batch,), device=x_ID.device)
        loss, codes, lefts = model.loss(x_ID[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for flags, code in zip(used, codes, strict=True):
            flags[code] = True
        if step % REVIVE == 0 and step < steps - REVIVE:
            _revive(model, used, lefts)
    return model


@torch.no_grad()
def _revive(model: Autoencoder, used: list[Tensor], lefts: list[Tensor]) -> None:
    for book, flags, left in zip(model.books, used, lefts, strict=True):
        dead = (~flags).nonzero()[:, 0]
        book[dead] = left[torch.randint(len(left), (len(dead),), device=left.device)]
        flags.fill_(False)
