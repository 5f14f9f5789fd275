"""What a run's gauges are named after."""

from trainables.worker.gauges import Gauge


def test_a_run_may_have_a_name_in_any_script() -> None:
    gauge = Gauge("raydistill_test", description="a test's", tag_keys=("run", "state"))
    gauge.set_default_tags({"run": "blüten-花"})
    gauge.set(1.0, {"state": "läuft"})
    assert gauge.info["default_tags"] == {"run": r"bl\xfcten-\u82b1"}
