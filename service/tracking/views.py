"""Saved views of an MLflow experiment: its trials as a table and as charts.

A view is a tag of the experiment, `mlflow.sharedViewState.KEY`, which MLflow lists and opens since 3.16. KEY is a hash of its
content, so that sweeps over the same keys share a pair of views.
"""

import base64
import hashlib
import json
import time
import zlib
from collections.abc import Mapping
from typing import Any, Literal

VIEW_TAG = "mlflow.sharedViewState."
VIEWS_SINCE = (3, 16)
_SECTION = "raydistill"


def saved_views(
    kind: Literal["trial", "train"], swept: Mapping[str, str], first: str, *, ascending: bool, has_accuracy: bool
) -> dict[str, str]:
    """Return KEY → value of two views, a table and charts, of the runs whose tag `raydistill.kind` is `kind`.

    `swept` maps a sweep's keys to their short names. Runs are sorted by the metric `first`.
    """
    compared = ["images_per_s", *(["top1_pct"] if has_accuracy else [])]
    metrics = dict.fromkeys([*compared, first, "epoch_s", "data_pct"])
    columns = [*(f"metrics.`{name}`" for name in metrics), *(f"params.`{key}`" for key in swept), "attributes.`Dataset`"]
    charts = [_chart("BAR", name, metricKey=name, runsCountToCompare=20) for name in compared]
    if has_accuracy:
        axes = {axis: {"key": name, "type": "METRIC"} for axis, name in zip(("xaxis", "yaxis"), compared, strict=True)}
        charts.append(_chart("SCATTER", "scatter", **axes))
    if swept:
        lines = {"selectedParams": list(swept), "selectedMetrics": compared, "showAllRuns": True}
        charts.append(_chart("PARALLEL", "parallel", **lines))
    what = "Trials" if kind == "trial" else "Runs"
    shown = {"display": True, "columns": 2, "cardHeight": 320, "isReordered": False, "deleted": False, "isGenerated": False}
    state = {
        "searchFilter": f"tags.`raydistill.kind` = '{kind}'",
        "orderByKey": f"metrics.`{first}`",
        "orderByAsc": ascending,
        "startTime": "ALL",
        "lifecycleFilter": "Active",
        "datasetsFilter": [],
        "modelVersionFilter": "All Runs",
        "selectedColumns": columns,
        "columnOrder": columns,
        "columnWidths": {},
        "runsHiddenMode": "SHOW_ALL",
        "hideEmptyCharts": True,
        "groupBy": None,
        "isAccordionReordered": True,  # otherwise MLflow's own chart sections come first
        "compareRunSections": [{"uuid": _SECTION, "name": what, **shown}],
        "compareRunCharts": charts,
    }
    text = json.dumps(state)
    compressed = "deflate;" + base64.b64encode(zlib.compress(text.encode())).decode()
    over = f" by {', '.join(swept.values())}" if swept else ""
    times = dict.fromkeys(("createdAt", "updatedAt"), time.time_ns() // 1_000_000)
    names = [f"{view}{over}" for view in (what, "Charts" if swept else f"Charts of {what.lower()}")]
    keys = [hashlib.sha256((name + text).encode()).hexdigest()[:16] for name in names]
    return {key: json.dumps({"name": name, **times, "state": compressed}) for key, name in zip(keys, names, strict=True)}


def _chart(kind: str, uuid: str, **fields: Any) -> dict[str, Any]:
    common = {"metricSectionId": _SECTION, "runsCountToCompare": 1000, "deleted": False, "isGenerated": False}
    return {"type": kind, "uuid": uuid} | common | fields
