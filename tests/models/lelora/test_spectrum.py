import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from models.lelora import spectrum
from models.lelora.spectrum import decompose, decompose_stack
from models.lelora.windows import STARTS, WINDOWS, needed, order, regions, window


def odd_matrices():
    torch.manual_seed(0)
    rank_1 = torch.outer(torch.randn(6), torch.randn(9))
    zero_rows = torch.randn(8, 5)
    zero_rows[[1, 4]] = 0
    q, _ = torch.linalg.qr(torch.randn(7, 7))
    return {"rank 1": rank_1, "zero rows": zero_rows, "zero": torch.zeros(4, 6),
            "1 x n": torch.randn(1, 5), "n x 1": torch.randn(5, 1), "equal values": 3 * q}  # fmt: skip


@pytest.mark.parametrize("name", odd_matrices())
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_matrix_is_the_sum_of_its_components(name, dtype):
    weight = odd_matrices()[name]
    k = min(weight.shape)
    atoms = decompose(weight, range(k), dtype)
    again = (atoms.left_MJ * atoms.values_K) @ atoms.right_JN
    torch.testing.assert_close(again, weight, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(atoms.values_K, torch.linalg.svdvals(weight.double()).float(),
                               atol=2e-6, rtol=1e-5)  # fmt: skip
    torch.testing.assert_close(atoms.right_JN @ atoms.right_JN.T, torch.eye(k), atol=1e-5, rtol=0)


def test_signs_are_fixed_and_some_components_are_the_same_as_all():
    weight = torch.randn(9, 6, generator=torch.Generator().manual_seed(3))
    atoms = decompose(weight, range(6))
    largest = atoms.left_MJ.abs().argmax(0)
    assert (atoms.left_MJ.gather(0, largest[None])[0] > 0).all()
    some = decompose(weight, [4, 1])
    for one, other in zip(some.pick([4, 1]), atoms.pick([4, 1]), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(AssertionError, match="not all among the atoms"):
        some.pick([2])


def test_where_the_device_fails_the_cpu_decomposes(monkeypatch):
    calls, svd = [], torch.linalg.svd

    def failing(matrix, **options):
        calls.append(matrix.dtype)
        if len(calls) == 1:
            u, s, v = svd(matrix, **options)
            return u, s * torch.nan, v  # as cuSOLVER has been seen to
        return svd(matrix, **options)

    monkeypatch.setattr(spectrum.torch.linalg, "svd", failing)
    weight = torch.randn(5, 4)
    atoms = decompose(weight, range(4))
    torch.testing.assert_close((atoms.left_MJ * atoms.values_K) @ atoms.right_JN, weight)
    assert calls == [torch.float32, torch.float64]
    with pytest.raises(ValueError, match="not finite"):
        decompose(weight * torch.inf, [0])


@given(st.integers(1, 400))
def test_regions_are_all_components_once(k):
    assert [c for part in regions(k) for c in part] == list(range(k))


@given(st.sampled_from(WINDOWS), st.integers(1, 40), st.integers(1, 100))
def test_orders_name_components_once(kind, rows, k):
    found = order(kind, rows, k, "0/q")
    assert len(found) == len(set(found)) == min(rows, k)
    assert all(0 <= component < k for component in found)
    assert found == order(kind, rows, k, "0/q")


@given(st.integers(0, len(STARTS) - 1), st.integers(1, 40), st.integers(1, 100))
def test_windows_lie_inside(start, width, k):
    found = window(start, width, k)
    assert len(found) == min(width, k)
    assert found[0] >= 0
    assert found[-1] < k
    assert set(found) <= set(needed(True, "random", [0, width], k, "x"))


def test_places_of_windows():
    assert window(0, 4, 100) == [0, 1, 2, 3]
    assert window(len(STARTS) - 1, 4, 100) == [96, 97, 98, 99]
    assert order("minor", 3, 10, "") == [9, 8, 7]
    assert order("even", 4, 16, "") == [2, 10, 6, 14]


@pytest.mark.parametrize("shape", [(5, 12, 7), (3, 7, 12), (2, 8, 8)])
def test_a_stack_is_decomposed_as_its_matrices_are(shape):
    w_LMN = torch.randn(shape) * torch.logspace(0, -3, shape[2])
    left_LMK, values_LK, right_LKN = decompose_stack(w_LMN)
    torch.testing.assert_close(
        left_LMK * values_LK[:, None] @ right_LKN, w_LMN, atol=1e-5, rtol=1e-5
    )
    for at, w_MN in enumerate(w_LMN):
        atoms = decompose(w_MN, range(min(w_MN.shape)), torch.float64)
        torch.testing.assert_close(values_LK[at], atoms.values_K, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(left_LMK[at], atoms.left_MJ, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(right_LKN[at], atoms.right_JN, atol=1e-4, rtol=1e-4)
