"""Where models have their stages: as the papers that distil them count, and as their libraries declare it."""

from functools import cache
from pathlib import Path

import pytest

from tests.trainables.models.small_families import unchanged
from trainables.models.tap_names import STAGE, list_taps

TABLE = [line.split(" | ") for line in Path(__file__).with_name("tap_table.txt").read_text().splitlines()[1:]]
"""Read off traces of the models' graphs, but for timm's, which are those of its `feature_info`."""
IDS = [row[0] for row in TABLE]


@cache
def named(name: str, image_size: int) -> dict[str, tuple[tuple[str, ...], tuple[int, ...]]]:
    """Each point of a model: all of its names, and its shape."""
    found = list_taps(unchanged(name, image_size), image_size)
    return {each: ((point.name, *point.aliases), point.shape) for point in found for each in (point.name, *point.aliases)}


@pytest.mark.parametrize("row", TABLE, ids=IDS)
def test_stages_pre_activations_and_the_pooled_map_are_these_modules_values(row: list[str]) -> None:
    (name, size), stages, preacts, (unpooled,), shapes = (cell.split() for cell in row)
    if name.startswith("timm/"):
        pytest.importorskip("timm")
    found = named(name, int(size))
    expected = {"unpooled": unpooled, "stem": stages[0]} | {f"stage{number}": path for number, path in enumerate(stages[1:], 1)}
    expected |= {f"stage{number}.preact": path for number, path in enumerate(preacts, 1)}
    points = {point: path for point, path in expected.items() if path != "-"}
    assert {point: found[path] for point, path in points.items()} == {point: found[point] for point in points}
    assert {each for each in found if STAGE.fullmatch(each) or each in ("stem", "unpooled")} == set(points)
    for point, shape in zip(("stem", *(f"stage{number}" for number in range(1, len(shapes)))), shapes, strict=True):
        assert shape == "-" or found[point][1] == tuple(int(part) for part in (*shape.split("×"), shape.split("×")[1]))


def test_maps_that_swin_holds_channels_last_are_handed_out_channels_first() -> None:
    found = named("swin", 32)
    assert [found[f"stage{number}"][1] for number in (1, 2, 3, 4)] == [(16, 8, 8), (32, 4, 4), (64, 2, 2), (128, 1, 1)]


def test_a_map_of_as_many_channels_as_pixels_is_read_as_the_models_other_maps_are() -> None:
    assert named("swin", 64)["stage1"][1] == (16, 16, 16)
    assert named("convnet_small", 8)["stage1"][1] == (8, 8, 8)


def test_models_of_tokens_and_of_vectors_have_features_of_an_image_and_no_stages() -> None:
    assert set(named("vit", 64)) >= {"map", "embedding", "pooled"}
    assert {"embedding", "pooled"} <= set(named("mlp_small", 64))
    assert not {"stage1", "stem", "map", "unpooled"} & set(named("mlp_small", 64))
    assert not {"stage1", "stem", "unpooled"} & set(named("vit", 64))
