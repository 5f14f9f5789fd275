"""Points drawn from a space."""

from service.config.space import points


def test_randint_draws_both_ends_and_nothing_beyond_them() -> None:
    drawn = points({"seed": {"randint": [3, 5]}}, "random", num_samples=200, seed=0)
    assert sorted(point["seed"] for point in drawn) == [3, 4, 5]
