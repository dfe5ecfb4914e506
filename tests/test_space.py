"""What a magnitude means in each space, against values worked out by hand from each system's definition."""

import pytest
import torch

from metaaugment.ops import INDEX, OPS, SPACES, Level, Space, find_space

# (space, function, side): the argument at m = 0, 2.5, 5, 9.99 and 10, sign +
GOLDEN = {
    ("metaaugment", "Rotate", 32): (0, 7.5, 15, 29.97, 30),
    ("metaaugment", "Posterize", 32): (8, 7, 6, 5, 4),
    ("metaaugment", "Solarize", 32): (256, 192, 128, 0.256, 0),
    ("metaaugment", "Brightness", 32): (0.1, 0.55, 1, 1.8982, 1.9),
    ("metaaugment", "ShearY", 32): (0, 0.075, 0.15, 0.2997, 0.3),
    ("metaaugment", "TranslateX", 32): (0, 2.5, 5, 9.99, 10),
    ("metaaugment", "TranslateY", 224): (0, 17.5, 35, 69.93, 70),
    ("metaaugment", "Cutout", 32): (0, 5, 10, 19, 20),
    ("autoaugment", "Rotate", 32): (0, 7, 15, 29, 30),
    ("autoaugment", "Posterize", 32): (4, 3, 2, 1, 0),
    ("autoaugment", "Solarize", 32): (256, 192, 128, 1, 0),
    ("autoaugment", "Color", 32): (0.1, 0.55, 1, 1.8982, 1.9),
    ("autoaugment", "ShearX", 32): (0, 0.075, 0.15, 0.2997, 0.3),
    ("autoaugment", "TranslateY", 32): (0, 2, 5, 9, 10),
    ("randaugment", "Rotate", 32): (0, 7.5, 15, 29.97, 30),
    ("randaugment", "Posterize", 32): (0, 1, 2, 3, 4),
    ("randaugment", "Solarize", 32): (0, 64, 128, 255, 256),
    ("randaugment", "TranslateX", 224): (0, 25, 50, 99.9, 100),
    ("randaugment", "Cutout", 224): (0, 20, 40, 79, 80),
    ("faa", "Rotate", 32): (-30, -15, 0, 29.94, 30),
    ("faa", "Posterize", 32): (4, 5, 6, 7, 8),
    ("faa", "Solarize", 32): (0, 64, 128, 255.744, 256),
    ("faa", "Sharpness", 32): (0.1, 0.55, 1, 1.8982, 1.9),
    ("faa", "ShearX", 32): (-0.3, -0.15, 0, 0.2994, 0.3),
    ("faa", "TranslateX", 100): (-45, -22.5, 0, 44.91, 45),
    ("faa", "Cutout", 100): (1, 6, 11, 20, 21),
    ("torchvision", "Rotate", 32): (0, 7.5, 15, 29.97, 30),
    ("torchvision", "Posterize", 32): (8, 7, 6, 4, 4),
    ("torchvision", "Solarize", 32): (255, 191.25, 127.5, 0.255, 0),
    ("torchvision", "Contrast", 32): (1, 1.225, 1.45, 1.8991, 1.9),
    ("torchvision", "ShearX", 32): (0, 0.075, 0.15, 0.2997, 0.3),
    ("torchvision", "TranslateX", 331): (0, 37, 75, 149, 150),
    ("torchvision", "Cutout", 32): (0, 5, 10, 19, 20),
    ("autoaugment", "Cutout", 32): (0, 5, 10, 19, 20),
    ("trivialaugment-wide", "Rotate", 32): (0, 33, 67, 134, 135),
    ("trivialaugment-wide", "Cutout", 100): (0, 15, 30, 59, 60),
    ("trivialaugment-wide", "Posterize", 32): (8, 7, 5, 3, 2),
    ("trivialaugment-wide", "Solarize", 32): (256, 192, 128, 1, 0),
    ("trivialaugment-wide", "Brightness", 32): (0.01, 0.5075, 1.005, 1.99801, 2),
    ("trivialaugment-wide", "ShearX", 32): (0, 0.2475, 0.495, 0.98901, 0.99),
    ("trivialaugment-wide", "TranslateX", 224): (0, 8, 16, 31, 32),
}


def argument(space: str, name: str, side: int, m: list[float], sign: int = 1) -> list[float]:
    ops = torch.full((len(m),), INDEX[name])
    magnitudes = torch.tensor(m, dtype=torch.float64)
    return find_space(space).arguments(ops, magnitudes, torch.full((len(m),), sign), side, side).tolist()


@pytest.mark.parametrize(("space", "name", "side"), GOLDEN)
def test_level_table(space: str, name: str, side: int) -> None:
    assert argument(space, name, side, [0, 2.5, 5, 9.99, 10]) == pytest.approx(GOLDEN[space, name, side], abs=1e-9)


@pytest.mark.parametrize("space", SPACES)
def test_the_other_sign(space: str) -> None:
    """Geometry turns around; torchvision's factors are mirrored at 1; nothing else has a sign."""
    m = [0, 1, 3.3, 10]
    for op in OPS:
        plus, minus = argument(space, op.name, 32, m), argument(space, op.name, 32, m, sign=-1)
        if op.name == "Rotate" or op.name.startswith(("Shear", "Translate")):
            assert minus == [-value for value in plus]
        elif space == "torchvision" and op.name in ("Color", "Contrast", "Brightness", "Sharpness"):
            assert [(a + b) / 2 for a, b in zip(plus, minus, strict=True)] == pytest.approx([1] * 4)
        else:
            assert minus == plus


@pytest.mark.parametrize("name", ["Rotate", "ShearX", "TranslateY", "Solarize"])
def test_default_space_grows_stronger_from_neutral(name: str) -> None:
    neutral = {"Solarize": 256}.get(name, 0)
    strength = [abs(value - neutral) for value in argument("metaaugment", name, 32, [m / 4 for m in range(41)])]
    assert strength[0] == 0
    assert strength == sorted(strength)


def test_a_space_of_ones_own_needs_every_level() -> None:
    with pytest.raises(ValueError, match=r"space 'mine' has no level for Posterize"):
        Space("mine", {"Rotate": Level(1.0)})
    levels = {op.name: Level(1.0) for op in OPS if op.magnitude}
    mine = Space("mine", levels)
    assert find_space(mine) is mine
    assert hash(mine) == hash(Space("mine", dict(reversed(levels.items()))))
    with pytest.raises(ValueError, match="has a level for Rotat, which takes none"):
        Space("mine", {**levels, "Rotat": Level(1.0)})
    with pytest.raises(ValueError, match="a level's rounding is 'up'; choose one of none, truncate, nearest"):
        Level(1.0, rounding="up")
    with pytest.raises(ValueError, match="a level's per is 'area'"):
        Level(1.0, per="area")
    with pytest.raises(ValueError, match="not finite, or an `of`"):
        Level(1.0, of=0)


def test_torchs_default_dtype_has_no_say() -> None:
    expected = argument("faa", "TranslateX", 5013, [7.7])
    torch.set_default_dtype(torch.bfloat16)
    try:
        assert argument("faa", "TranslateX", 5013, [7.7]) == expected
    finally:
        torch.set_default_dtype(torch.float32)
