"""e(T) as the paper writes it."""

import pytest
import torch

from metaaugment import PAPER_OPS, Transformation, embed


def transformation(first: int, second: int, m1: float, m2: float) -> Transformation:
    magnitudes = torch.tensor([[m1, m2]])
    return Transformation(torch.tensor([first]), torch.tensor([second]), magnitudes, torch.ones(1, 2))


def test_the_papers_order() -> None:
    assert [op.name for op in PAPER_OPS] == [
        "AutoContrast", "Equalize", "Rotate", "Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness",
        "ShearX", "ShearY", "TranslateX", "TranslateY", "Identity",
    ]  # fmt: skip


def test_magnitudes_plus_one_at_the_papers_places() -> None:
    """The paper counts from 1: the third function first, the fifth second, at positions 2·3 − 1 and 2·5."""
    expected = torch.zeros(28)
    expected[2 * 3 - 1 - 1] = 4.5
    expected[2 * 5 - 1] = 8.0
    t = transformation(2, 4, 3.5, 7.0)
    assert torch.equal(embed(t)[0], expected)
    assert torch.equal(embed(Transformation(t.first, t.second, t.magnitudes, -t.signs))[0], expected)
    assert embed(t[:0]).shape == (0, 28)


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Identity"])
def test_eleven_where_there_is_no_magnitude(name: str) -> None:
    index = [op.name for op in PAPER_OPS].index(name)
    expected = torch.zeros(28)
    expected[2 * index : 2 * index + 2] = 11
    assert torch.equal(embed(transformation(index, index, 0.3, 9.0))[0], expected)


def test_every_pair_has_its_own_two_places() -> None:
    first, second = torch.cartesian_prod(torch.arange(14), torch.arange(14)).unbind(1)
    places = embed(Transformation.draw(first, second)).nonzero().view(196, 2, 2)[:, :, 1]
    assert torch.equal(places.sort().values, torch.stack([2 * first, 2 * second + 1], 1).sort().values)


def test_functions_beyond_the_papers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"function index 14; .* the paper's functions, 0 to 13"):
        embed(transformation(2, 14, 1.0, 1.0))
