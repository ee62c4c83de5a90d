"""Deltas of every kind and their arithmetic, against whole matrices."""

import pytest
import torch
import torch.nn.functional as F

from lightning_modules.lora_files.delta import LowRank, relative_change, squared_difference, weighted_sum
from lightning_modules.lora_files.kinds import Hadamard, Kronecker
from tests.support.lora_files import dense


def low_rank(rank=6, out_features=40, in_features=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -2, rank)[:, None]
    down = spread * torch.randn(rank, in_features, generator=generator)
    return LowRank(down, torch.randn(out_features, rank, generator=generator))


def numbers(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def two(*shapes, seed=0):
    return [numbers(*shape, seed=seed + index) for index, shape in enumerate(shapes)]


DELTAS = {
    "low rank": low_rank(3, 60, 48),
    "whole": Kronecker(two((6, 4)), two((10, 12), seed=1)),
    "factored": Kronecker(two((6, 2), (2, 4)), two((10, 3), (3, 12), seed=2)),
    "rows": Kronecker(two((6, 4)), two((10, 12), seed=1), (7, 31)),
    "hadamard": Hadamard(two((60, 3), (60, 3)), two((3, 48), (3, 48), seed=3)),
    "hadamard of a high rank": Hadamard(two((60, 9), (60, 9)), two((9, 48), (9, 48), seed=3)),
}


@pytest.mark.parametrize("name", DELTAS)
def test_norms_and_factors_computed_without_the_matrix_equal_those_of_the_matrix(name):
    delta = DELTAS[name]
    matrix, x = delta.matrix(), numbers(2, 3, 48)
    torch.testing.assert_close(delta.apply(x), F.linear(x, matrix), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(delta.square(), float(matrix.double().square().sum()), rtol=1e-5, atol=0)
    assert delta.like(delta.tensors()).apply(x).equal(delta.apply(x))
    half = delta.scaled(0.5)
    torch.testing.assert_close(half.matrix(), 0.5 * matrix)
    assert relative_change({"a": delta}, {"a": half}) == pytest.approx(0.5, rel=1e-4)
    lora = LowRank(numbers(4, 48), numbers(len(matrix), 4, seed=1))
    matrices = matrix.double(), lora.matrix().double()
    expected = float((matrices[0] - matrices[1]).square().sum())
    assert squared_difference(delta, lora) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("widths", [(20, 20, 20), (7, 3, 50)])
def test_sub_layers_get_their_rows_of_a_fused_layer(name, widths):
    delta, widths = DELTAS[name], (11, 20) if name == "rows" else widths
    parts = delta.split(widths, swapped=False)
    for part, rows in zip(parts, delta.matrix().split(widths), strict=True):
        torch.testing.assert_close(part.matrix(), rows)
        assert part.shape == rows.shape
    if name == "whole":
        assert [bool(part.unwritable) for part in parts] == [width % 10 != 0 for width in widths]
    if name != "rows":
        [swapped] = delta.split([60], swapped=True)
        torch.testing.assert_close(swapped.matrix(), torch.cat(delta.matrix().chunk(2)[::-1]))


@pytest.mark.parametrize("name", DELTAS)
@pytest.mark.parametrize("rank", [2, 5])
def test_reduced_update_is_the_best_of_its_rank(name, rank):
    """Its error is that of the discarded singular values, which nothing of that rank is below."""
    delta = DELTAS[name]
    reduced, values = delta.reduced(rank), torch.linalg.svdvals(delta.matrix().double())
    assert reduced.rank <= rank
    error = float((reduced.matrix().double() - delta.matrix().double()).norm())
    assert error == pytest.approx(float(values[rank:].norm()), rel=1e-3, abs=1e-4)
    torch.testing.assert_close(delta.reduced(10_000).matrix(), delta.matrix(), rtol=1e-4, atol=1e-4)


def test_low_rank_updates_are_reduced_exactly_and_without_a_matrix():
    one = low_rank()
    assert one.reduced(6) is one
    many = low_rank(rank=50, out_features=8, in_features=12)  # as the sum of many LoRAs
    assert relative_change({"x": many}, {"x": many.reduced(8)}) < 1e-6
    assert low_rank(3, 100_000, 100_000).reduced(2).rank == 2  # the matrix would take 80 GB
    zero = LowRank(torch.randn(4, 8), torch.zeros(8, 4))
    assert dense(zero.reduced(2)).abs().max() == 0


def test_loras_of_other_layers_and_ranks_are_summed_exactly():
    a, b = {"x": low_rank(), "y": low_rank(seed=2)}, {"x": low_rank(rank=2, seed=3), "z": low_rank(seed=4)}
    result = weighted_sum([a, b], [0.7, -2.0])
    expected = {"x": 0.7 * dense(a["x"]) - 2 * dense(b["x"]), "y": 0.7 * dense(a["y"]), "z": -2 * dense(b["z"])}
    assert result["x"].rank == 8
    torch.testing.assert_close({name: dense(one) for name, one in result.items()}, expected, rtol=1e-5, atol=1e-5)


def test_change_counts_layers_missing_on_either_side():
    a, b = low_rank(), low_rank(seed=1)
    norms = [float(dense(one).norm()) for one in (a, b)]
    whole = (norms[0] ** 2 + norms[1] ** 2) ** 0.5
    assert relative_change({"x": a, "y": b}, {"x": a}) == pytest.approx(norms[1] / whole)
    assert relative_change({"x": a}, {"x": a, "y": b}) == pytest.approx(norms[1] / norms[0])
