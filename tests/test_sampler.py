"""Eq. 5 and the samplers."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

import metaaugment as ma
from metaaugment import IdentitySampler, Transformation, TransformationSampler, UniformSampler
from metaaugment.ops import INDEX
from metaaugment.sampler import FixedSampler, Sampler, SingleSampler, draw_pairs


def transformation(first: list[int], second: list[int]) -> Transformation:
    n = len(first)
    return Transformation(torch.tensor(first), torch.tensor(second), torch.zeros(n, 2), torch.ones(n, 2))


def test_eq_5_by_hand() -> None:
    """K = 2; (0, 0) was seen twice with mean 0.6, the others once; (1, 1) never: it has the mean of the seen ones."""
    sampler = TransformationSampler(epsilon=0.1, functions=2)
    sampler.record(transformation([0, 0, 0, 1], [0, 0, 1, 0]), torch.tensor([0.5, 0.7, 0.3, 0.9]))
    sampler.update()
    v = [[0.6, 0.3], [0.9, 0.6]]
    expected = [[0.9 * x / 2.4 + 0.1 / 4 for x in row] for row in v]
    torch.testing.assert_close(sampler.probabilities, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=0)


def test_p_is_uniform_until_something_was_seen_and_with_an_epsilon_of_one() -> None:
    sampler = TransformationSampler(epsilon=1.0)
    sampler.update()
    assert (sampler.probabilities == 1 / 196).all()
    sampler.record(sampler.sample(1000), torch.rand(1000))
    sampler.update()
    torch.testing.assert_close(sampler.probabilities, torch.full((14, 14), 1 / 196, dtype=torch.float64))
    sampler = TransformationSampler()
    sampler.record(sampler.sample(100), torch.zeros(100))  # nor by outputs of zero
    sampler.update()
    assert (sampler.probabilities == 1 / 196).all()


def test_the_window_forgets() -> None:
    """An update uses the records of the last two calls; what came before has no effect any more."""
    sampler = TransformationSampler(epsilon=0.0, window=2, functions=2)
    everything = transformation([0, 0, 1, 1], [0, 1, 0, 1])
    for outputs in ([1.0, 0.1, 0.1, 0.1], [0.2, 0.4, 0.2, 0.2], [0.2, 0.2, 0.6, 0.2]):
        sampler.record(everything, torch.tensor(outputs))
        sampler.update()
    expected = torch.tensor([[0.2, 0.3], [0.4, 0.2]], dtype=torch.float64) / 1.1
    torch.testing.assert_close(sampler.probabilities, expected, rtol=1e-6, atol=0)
    last = torch.tensor([[0.2, 0.2], [0.6, 0.2]], dtype=torch.float64) / 1.2
    for _ in range(3):  # nothing more is seen: first the last records alone count, then p stays
        sampler.update()
        torch.testing.assert_close(sampler.probabilities, last, rtol=1e-6, atol=0)


def test_outputs_that_are_not_finite_are_left_out() -> None:
    sampler = TransformationSampler(epsilon=0.0, functions=2)
    sampler.record(transformation([0, 0, 1], [0, 0, 1]), torch.tensor([0.5, math.nan, math.inf]))
    sampler.update()
    assert sampler.probabilities.isfinite().all()
    assert (sampler.probabilities == 0.25).all()  # one pair seen, the others have its mean


def test_singles_by_hand() -> None:
    """Of two functions seen with mean outputs 0.2 and 0.6 the others have their mean, 0.4; nothing is drawn second."""
    sampler, alone = SingleSampler(epsilon=0.5), INDEX["Identity"]
    assert torch.equal(sampler.probabilities[:, alone], torch.full((14,), 1 / 14, dtype=torch.float64))
    t = Transformation(
        torch.tensor([0, 0, 1]), torch.full((3,), alone), torch.zeros(3, 2), torch.ones(3, 2, dtype=torch.int8)
    )
    sampler.record(t, torch.tensor([0.1, 0.3, 0.6]))
    sampler.update()
    v = torch.tensor([0.2, 0.6, *[0.4] * 12], dtype=torch.float64)
    torch.testing.assert_close(sampler.probabilities[:, alone], 0.5 * v / 5.6 + 0.5 / 14, rtol=0, atol=1e-7)
    assert sampler.probabilities.sum() == pytest.approx(1)
    assert (sampler.sample(500, torch.Generator().manual_seed(0)).second == alone).all()


def test_pairs_are_drawn_by_p() -> None:
    p = torch.tensor([[0.5, 0.0], [0.2, 0.3]], dtype=torch.float64)
    first, second = draw_pairs(p, 40_000, torch.Generator().manual_seed(0))
    share = torch.bincount(2 * first + second, minlength=4) / 40_000
    assert share[1] == 0
    assert (share - p.flatten()).abs().max() < 5 * math.sqrt(0.25 / 40_000)
    last = torch.zeros(14, 14, dtype=torch.float64)
    last[13, 13] = 1
    first, second = draw_pairs(last, 1000)
    assert (first.eq(13) & second.eq(13)).all()


@pytest.mark.parametrize(
    "sampler", [TransformationSampler(), UniformSampler(), IdentitySampler()], ids=lambda s: type(s).__name__
)
def test_draws_come_from_the_generator(sampler: UniformSampler) -> None:
    state = torch.get_rng_state()
    one, same, other = (sampler.sample(100, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one.first, same.first)
    assert torch.equal(one.magnitudes, same.magnitudes)
    assert not torch.equal(one.magnitudes, other.magnitudes)
    assert len(sampler.sample(7)) == 7


def test_identity_sampler_leaves_images_alone() -> None:
    images = torch.randint(0, 256, (9, 3, 8, 8), dtype=torch.uint8)
    t = IdentitySampler().sample(9)
    assert t.first.eq(INDEX["Identity"]).all()
    assert torch.equal(ma.apply(images, t), images)


def test_state_goes_on_where_it_was() -> None:
    one, other = TransformationSampler(window=3), TransformationSampler(window=3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        one.record(one.sample(500, generator), torch.rand(500, generator=generator))
        one.update()
    one.record(one.sample(500, generator), torch.rand(500, generator=generator))
    other.load_state_dict({name: value.clone() for name, value in one.state_dict().items()})
    for sampler in (one, other):
        sampler.update()
    assert torch.equal(one.probabilities, other.probabilities)
    assert torch.equal(one.past, other.past)


def test_a_state_stays_as_it_was_when_it_was_taken() -> None:
    sampler = TransformationSampler(window=3)
    sampler.record(sampler.sample(50), torch.rand(50))
    sampler.update()
    state = sampler.state_dict()
    before = {name: value.clone() for name, value in state.items()}
    sampler.record(sampler.sample(50), torch.rand(50))
    sampler.update()
    assert not torch.equal(sampler.probabilities, before["probabilities"])
    sampler.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in sampler.state_dict().items())


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"epsilon": 1.5}, r"epsilon is 1.5; .* in \[0, 1\]"),
        ({"window": 0}, r"window is 0; .* at least 1"),
        ({"window": 20.0}, "must be a whole number of at least 1"),
        ({"functions": 0}, "must be a whole number of at least 1"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        TransformationSampler(**wrong)


def test_small_indices_are_counted_in_their_pair() -> None:
    """13 · 14 + 13 is more than a signed byte holds."""
    sampler, last = TransformationSampler(), torch.full((4,), 13, dtype=torch.int8)
    sampler.record(Transformation(last, last, torch.zeros(4, 2), torch.ones(4, 2)), torch.ones(4))
    assert sampler.present[1, 13, 13] == sampler.present[1].sum() == 4


def test_a_fixed_sampler_counts_nothing_and_draws_as_the_learned_one() -> None:
    learned = TransformationSampler()
    learned.record(transformation([3, 2], [5, 7]), torch.tensor([0.9, 0.1]))
    learned.update()
    p = learned.probabilities.clone()
    fixed = FixedSampler(p)
    p.zero_()  # it keeps what it was given
    assert isinstance(fixed, Sampler)
    assert not fixed.tallies
    fixed.record(transformation([1], [1]), torch.tensor([0.5]))
    fixed.update()
    one, other = (sampler.sample(64, torch.Generator().manual_seed(0)) for sampler in (learned, fixed))
    assert all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("first", "second", "magnitudes"))


def test_a_fixed_sampler_goes_on_from_the_state_of_a_learning_one() -> None:
    """Which is what checkpoints of its phase held in older versions."""
    learned = TransformationSampler()
    learned.probabilities.copy_(torch.eye(14) / 14)
    fixed = FixedSampler()
    fixed.load_state_dict(learned.state_dict())
    assert fixed.state_dict().keys() == {"probabilities"}
    assert torch.equal(fixed.state_dict()["probabilities"], learned.probabilities)
    for sampler in (fixed, learned):
        with pytest.raises(ValueError, match=r"this sampler has \(14, 14\) pairs; load the state of a sampler of"):
            sampler.load_state_dict(TransformationSampler(functions=2).state_dict())


def test_a_function_that_the_sampler_does_not_draw_is_not_recorded_as_another() -> None:
    """(AutoContrast, Invert) was counted as (Equalize, AutoContrast)."""
    sampler = ma.TransformationSampler()
    t = ma.Transformation.draw(torch.tensor([0]), torch.tensor([14]))
    with pytest.raises(ValueError, match="has no place for function index 14; it draws functions 0 to 13"):
        sampler.record(t, torch.tensor([0.5]))
    assert sampler.present.sum() == 0


class Counting(ma.UniformSampler):
    """Its state is empty until it has recorded."""

    def __init__(self) -> None:
        self.counts: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self.counts)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self.counts = dict(state)


def test_an_empty_state_is_a_state_and_half_a_pair_is_none() -> None:
    learners = [ma.Learner(ma.network("small-cnn", 3), Counting(), ma.UniformPolicy()) for _ in range(2)]
    learners[0].sampler.counts["drawn"] = torch.ones(2)
    learners[1].load_state_dict(learners[0].state_dict())
    assert learners[1].sampler.counts["drawn"].tolist() == [1, 1]
    with pytest.raises(TypeError, match="Half has one of state_dict and load_state_dict"):
        type("Half", (ma.UniformSampler,), {"state_dict": Counting.state_dict})
    with pytest.raises(TypeError, match=r"write \(nn.Module, Sampler\)"):
        type("Shadowed", (ma.Sampler, torch.nn.Module), {})
    assert type("Module", (torch.nn.Module, ma.UniformSampler), {})().stateful
