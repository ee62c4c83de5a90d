"""What is computed of low-rank updates, against whole matrices."""

import pytest
import torch

from lightning_modules.lora_files.arithmetic import relative_change, squared_difference, weighted_sum
from lightning_modules.lora_files.delta import LowRank
from tests.support.lora_files import dense


def update(rank=6, out_features=40, in_features=30, seed=0):
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0, -2, rank)[:, None]
    down = spread * torch.randn(rank, in_features, generator=generator)
    return LowRank(down, torch.randn(out_features, rank, generator=generator))


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_reduced_update_is_the_best_of_its_rank(rank):
    """Its error is that of the discarded singular values of the whole matrix, which nothing of that rank is below."""
    one = update()
    reduced = one.reduced(rank)
    p, values, q = torch.linalg.svd(dense(one))
    assert reduced.rank == rank
    optimum = (p[:, :rank] * values[:rank]) @ q[:rank]
    torch.testing.assert_close(dense(reduced), optimum, rtol=0, atol=1e-6 * float(values[0]))
    discarded = float(values[rank:].norm() / values.norm())
    assert relative_change({"x": one}, {"x": reduced}) == pytest.approx(discarded, abs=1e-6)


def test_no_more_components_than_there_are():
    one = update()
    assert one.reduced(6) is one
    assert one.reduced(100) is one


def test_components_beyond_the_sides_are_reduced_exactly():
    """As of many LoRAs that were added up."""
    one = update(rank=50, out_features=8, in_features=12)
    assert relative_change({"x": one}, {"x": one.reduced(8)}) < 1e-6


def test_no_whole_matrix_is_made():
    """One of 100000 x 100000 would take 80 GB."""
    one = update(rank=3, out_features=100_000, in_features=100_000)
    assert one.reduced(2).rank == 2


def test_update_of_zeros_stays_zero():
    one = LowRank(torch.randn(4, 8), torch.zeros(8, 4))
    assert dense(one.reduced(2)).abs().max() == 0


def test_sum_is_exact():
    one, other = update(), update(rank=4, seed=1)
    total = weighted_sum([{"x": one}, {"x": other}], [1.0, 1.0])["x"]
    assert total.rank == 10
    torch.testing.assert_close(dense(total), dense(one) + dense(other))


def test_loras_of_other_layers_and_ranks_are_merged_by_weight():
    a, b = {"x": update(), "y": update(seed=2)}, {"x": update(rank=2, seed=3), "z": update(seed=4)}
    result = weighted_sum([a, b], [0.7, -2.0])
    expected = {"x": 0.7 * dense(a["x"]) - 2 * dense(b["x"]), "y": 0.7 * dense(a["y"]), "z": -2 * dense(b["z"])}
    assert result.keys() == expected.keys()
    for name, matrix in expected.items():
        torch.testing.assert_close(dense(result[name]), matrix, rtol=1e-5, atol=1e-5)


def test_change_counts_what_is_missing_on_either_side():
    a, b = update(), update(seed=1)
    norms = [float(dense(one).norm()) for one in (a, b)]
    assert relative_change({"x": a, "y": b}, {"x": a}) == pytest.approx(
        norms[1] / (norms[0] ** 2 + norms[1] ** 2) ** 0.5
    )
    assert relative_change({"x": a}, {"x": a, "y": b}) == pytest.approx(norms[1] / norms[0])
    assert relative_change({"x": a}, {"x": a.scaled(1.25)}) == pytest.approx(0.25)


def test_first_components_are_those_that_come_first():
    one = update()
    torch.testing.assert_close(dense(one.first(2)), one.up[:, :2].double() @ one.down[:2].double())
    assert squared_difference(one, one.first(6)) == pytest.approx(0, abs=1e-9)
