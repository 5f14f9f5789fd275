"""What `distill taps` shows: the points of a model that a method can read."""

from service.report.table import Table


def points_table(model: str, image_size: int, num_classes: int, show_all: bool) -> Table:
    """Names, other names and shape of one sample's value; `show_all`: of all modules.

    Raises ModelError: no such model, or it does not take images of this size.
    """
    from trainables.models.registry import check_forward, construct
    from trainables.models.tap_names import list_taps

    built = construct(model, num_classes=num_classes, image_size=image_size, seed=0)
    check_forward(built, image_size, num_classes, name=model)
    points = list_taps(built, image_size, every=show_all)
    rows = [[point.name, ", ".join(point.aliases), "×".join(map(str, point.shape))] for point in points]
    title = f"taps of {model} at {image_size}×{image_size}"
    return Table(title, ["name", "aliases", "shape per sample"], rows, left=["name", "aliases"])
