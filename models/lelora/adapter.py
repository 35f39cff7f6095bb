"""The trainable low-rank update beside a linear layer, padded, in five parametrisations.

    M outputs, N inputs, R rows (padded), C rows of what is folded, T vectors at once

| `kind` | update of the weight | trains | at its start |
|---|---|---|---|
| dir_ab | g B A | A, B | A: right directions, B: 0 |
| svd_ab | g (B A - B0 A0) | A, B | B: left, A: right directions, both times one norm; B0, A0 the same |
| left | g U A | A | A: 0 |
| core | g U R V | R (R x R) | 0 |
| sigma | g U diag(d) V | d | 0 |

Only rows with a gate other than 0 take part; the gate is g, the matrix's scale. The others' factors are
0, all of them, so that they add nothing and get no gradient. So a switch of rows changes values and
never a tensor's shape, place or owner. The base layer is not touched: the adapter adds to what it gives,
in a hook, and names of the base model's tensors stay as they are.
"""

from typing import cast

import torch
from torch import Tensor, nn

KINDS = {
    "dir_ab": (("a_RN", "b_MR"), ()),
    "svd_ab": (("a_RN", "b_MR"), ("a0_RN", "b0_MR")),
    "left": (("a_RN",), ("u_MR",)),
    "core": (("core_RR",), ("u_MR", "v_RN")),
    "sigma": (("d_R",), ("u_MR", "v_RN")),
}
"""Tensors that train, and tensors that only a switch changes."""
LEADING = {"dir_ab": ("b_MR",), "svd_ab": ("b_MR", "b0_MR"), "left": ("a_RN",),
           "core": ("core_RR",), "sigma": ("d_R",)}  # fmt: skip
"""The factor that takes up a change of the scale, so that the product stays."""


class Adapter(nn.Module):
    """Starts without any row: it adds nothing until a switch gives it some."""

    def __init__(self, kind: str, outputs: int, inputs: int, rows: int, fold_rows: int) -> None:
        super().__init__()
        self.kind, self.outputs, self.inputs, self.rows = kind, outputs, inputs, rows
        trained, fixed = KINDS[kind]
        for name in trained:
            self.register_parameter(name, nn.Parameter(torch.empty(self._shape(name))))
        for name in fixed:
            self.register_buffer(name, torch.empty(self._shape(name)))
        self.register_buffer("fold_b_MC", torch.empty(outputs, fold_rows))
        self.register_buffer("fold_a_CN", torch.empty(fold_rows, inputs))
        self.register_buffer("gate_R", torch.empty(rows))
        self.register_buffer("scale", torch.empty(()))
        self.register_buffer("age_R", torch.empty(rows))
        self.register_buffer("components_R", torch.empty(rows, dtype=torch.int64))
        self.gain = 1.0
        """The scale, as the host knows it."""
        self.folded = False
        """Whether anything is folded: known on the host, so that nothing is multiplied by zeros."""
        self.young_steps = 0
        """For so many steps, the count of some row's steps matters (`models.lelora.row_steps`)."""
        self.has_younger: bool | None = None
        """Whether some row is younger than its tensor; None: to be looked up before the next step."""

    def _shape(self, name: str) -> tuple[int, ...]:
        sizes = {"M": self.outputs, "N": self.inputs, "R": self.rows}
        return tuple(sizes[letter] for letter in name.rpartition("_")[2])

    @property
    def trained(self) -> tuple[str, ...]:
        """Names of the parameters."""
        return KINDS[self.kind][0]

    @property
    def fixed(self) -> tuple[str, ...]:
        """Names of the directions that do not train."""
        return KINDS[self.kind][1]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """No rows, nothing folded, scale 1."""
        for tensor in (*self.parameters(), *self.buffers()):
            tensor.zero_()
        self.get_buffer("scale").fill_(1.0)
        self.get_buffer("components_R").fill_(-1)
        self.gain, self.folded, self.young_steps, self.has_younger = 1.0, False, 0, None

    def forward(self, x_N: Tensor, beside_M: Tensor | None = None) -> Tensor:
        """What to add to the layer's output, for inputs of any leading shape.

        With `beside_M`, that output with it added, which is fewer operations: in small layers, their
        number is what costs. The scale alone stands in front, since rows without a gate are 0.
        """
        x_TN = x_N.reshape(-1, self.inputs)
        y_TM = None if beside_M is None else beside_M.reshape(-1, self.outputs).to(x_N.dtype)
        linear = nn.functional.linear

        def of(name: str) -> Tensor:
            """In the type of the inputs: FSDP2 casts parameters only."""
            return cast(Tensor, getattr(self, name)).to(x_N.dtype)

        # compiled code would be made anew for each number, and a product with a tensor costs it nothing
        gain = of("scale") if torch.compiler.is_compiling() else self.gain
        if self.kind == "dir_ab":
            y_TM = _added(y_TM, linear(x_TN, of("a_RN")), of("b_MR"), gain)
        elif self.kind == "svd_ab":  # in this order, since it is exactly 0 at its start
            moved_TM = linear(linear(x_TN, of("a_RN")), of("b_MR"))
            moved_TM = gain * (moved_TM - linear(linear(x_TN, of("a0_RN")), of("b0_MR")))
            y_TM = moved_TM if y_TM is None else y_TM + moved_TM
        elif self.kind == "left":
            y_TM = _added(y_TM, linear(x_TN, of("a_RN")), of("u_MR"), gain)
        elif self.kind == "core":
            h_TR = linear(linear(x_TN, of("v_RN")), of("core_RR"))
            y_TM = _added(y_TM, h_TR, of("u_MR"), gain)
        else:
            y_TM = _added(y_TM, linear(x_TN, of("v_RN")) * of("d_R"), of("u_MR"), gain)
        if self.folded:
            y_TM = _added(y_TM, linear(x_TN, of("fold_a_CN")), of("fold_b_MC"), 1.0)
        return y_TM.view(*x_N.shape[:-1], self.outputs)


def _added(y_TM: Tensor | None, h_TR: Tensor, left_MR: Tensor, gain: float | Tensor) -> Tensor:
    """y + gain h left^T, in one operation; y None: 0."""
    if y_TM is None or isinstance(gain, Tensor):
        h_TR, gain = h_TR * gain, 1.0
    if y_TM is None:
        return nn.functional.linear(h_TR, left_MR)
    return torch.addmm(y_TM, h_TR, left_MR.T, alpha=gain)


def factors(kind: str, whole: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Left (M, r) and right (r, N) factors of all that an adapter adds to the weight, in fp64.

    `whole` has the adapter's tensors by name, none of them sharded. What is folded is in it; rows
    without a gate are not.
    """
    active = whole["gate_R"] != 0
    left, right = row_factors(kind, whole, active.nonzero().flatten())
    left = torch.cat([left, whole["fold_b_MC"].double()], 1)
    return left, torch.cat([right, whole["fold_a_CN"].double()], 0)


def row_factors(kind: str, whole: dict[str, Tensor], rows: Tensor | slice) -> tuple[Tensor, Tensor]:
    """The same for what `rows` add, each by itself; of `core`, for rows among each other.

    Tensors may have more axes in front, for several adapters at once.
    """
    t = {name: tensor.double() for name, tensor in whole.items() if tensor.is_floating_point()}
    gate = t["gate_R"][..., None, rows]
    if kind == "dir_ab":
        return t["b_MR"][..., rows] * gate, t["a_RN"][..., rows, :]
    if kind == "svd_ab":
        left = torch.cat([t["b_MR"][..., rows] * gate, -t["b0_MR"][..., rows] * gate], -1)
        return left, torch.cat([t["a_RN"][..., rows, :], t["a0_RN"][..., rows, :]], -2)
    if kind == "left":
        return t["u_MR"][..., rows] * gate, t["a_RN"][..., rows, :]
    if kind == "sigma":
        strength = gate * t["d_R"][..., None, rows]
        return t["u_MR"][..., rows] * strength, t["v_RN"][..., rows, :]
    core = t["core_RR"][..., rows, :][..., rows]
    return t["u_MR"][..., rows] * gate, core @ t["v_RN"][..., rows, :]


def update_norms(kind: str, stacked: dict[str, Tensor]) -> Tensor:
    """Frobenius norms of what adapters of one shape add, from their tensors behind a common axis."""
    left, right = row_factors(kind, stacked, slice(None))
    left = torch.cat([left, stacked["fold_b_MC"].double()], -1)
    right = torch.cat([right, stacked["fold_a_CN"].double()], -2)
    squares = (left.mT @ left) * (right @ right.mT)
    return squares.sum((-2, -1)).clamp(min=0).sqrt()
