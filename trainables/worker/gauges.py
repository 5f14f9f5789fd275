"""Gauges that Ray passes on to Prometheus and Grafana."""

from ray.util.metrics import Gauge as RayGauge


class Gauge(RayGauge):  # type: ignore[misc]
    """Ray's gauge with tags of any text, such as a run's name. Ray itself raises UnicodeEncodeError unless they are ASCII."""

    def set_default_tags(self, default_tags: dict[str, str]) -> None:
        super().set_default_tags(_escaped(default_tags))

    def set(self, value: float, tags: dict[str, str] | None = None) -> None:
        super().set(value, _escaped(tags or {}))


def _escaped(tags: dict[str, str]) -> dict[str, str]:
    return {name: value.encode("ascii", "backslashreplace").decode() for name, value in tags.items()}
