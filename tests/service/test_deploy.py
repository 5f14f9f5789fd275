import itertools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "service" / "deploy"
SCHEMAS = Path(__file__).parent / "schemas"
MANIFESTS = (DEPLOY / "raycluster.yaml", DEPLOY / "rayjob.yaml")
OTHERS = tuple(DEPLOY / name for name in ("kueue.yaml", "mlflow.yaml", "networkpolicy.yaml"))


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def load_all(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text()))


def validate(manifest: dict[str, Any]) -> None:
    """Raises jsonschema.ValidationError."""
    schema = load(SCHEMAS / "kuberay.yaml")
    if manifest["apiVersion"] != "ray.io/v1" and not manifest["kind"].startswith("Ray"):
        properties = load(SCHEMAS / "kubernetes.yaml")["kinds"][f"{manifest['apiVersion']}/{manifest['kind']}"]
        metadata = schema["$defs"]["template"]["properties"]["metadata"]
        properties |= {"apiVersion": {}, "kind": {}, "metadata": {**metadata, "required": ["name"]}}
        required = [name for name in ("spec", "data", "value") if name in properties and manifest["kind"] != "ResourceFlavor"]
        schema = {"$defs": schema["$defs"], "properties": properties, "additionalProperties": False, "required": required}
    jsonschema.Draft202012Validator(schema).validate(manifest)


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((DEPLOY / "grafana.json").read_text())
    return found


def commands(cluster: dict[str, Any]) -> Iterator[str]:
    for key in ("setup_commands", "head_start_ray_commands", "worker_start_ray_commands"):
        yield from cluster[key]


def test_rays_launcher_accepts_the_cluster_file_and_keeps_every_node() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(load(ROOT / "cluster.yaml"))
    validate_config(prepared)
    node_type = prepared["available_node_types"][prepared["head_node_type"]]
    num_workers = len(prepared["provider"]["worker_ips"])
    assert (node_type["min_workers"], node_type["max_workers"]) == (num_workers, num_workers) != (0, 0)


def test_rays_launcher_refuses_the_cluster_file_with_a_slip_in_it() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    slipped = load(ROOT / "cluster.yaml")
    slipped["setup_command"] = slipped.pop("setup_commands")
    with pytest.raises(jsonschema.ValidationError, match="setup_command"):
        validate_config(prepare_config(slipped))


def test_the_cluster_files_commands_are_valid_shell_and_every_mounted_file_exists() -> None:
    cluster = load(ROOT / "cluster.yaml")
    for command in commands(cluster):
        checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, timeout=30)
        assert checked.returncode == 0, checked.stderr
    local = [path for path in cluster["file_mounts"].values() if not path.startswith("~")]
    assert local == ["requirements.lock"]
    assert all((ROOT / path).is_file() for path in local)


def test_the_cluster_requires_a_token_and_shows_its_dashboard_on_loopback_alone() -> None:
    cluster = load(ROOT / "cluster.yaml")
    assert any("RAY_AUTH_MODE=token" in command for command in cluster["setup_commands"])
    starts = [command for command in commands(cluster) if "ray start" in command]
    assert len(starts) == 2
    assert all(command.startswith(". ~/raydistill/env && ") for command in starts)
    assert [command for command in starts if "--head" in command and "--dashboard-host=127.0.0.1" in command]
    assert "~/.ray/auth_token" in cluster["file_mounts"]


def test_the_clusters_sessions_lie_in_a_folder_of_its_user_alone(tmp_path: Path) -> None:
    cluster = load(ROOT / "cluster.yaml")
    starts = [command for command in commands(cluster) if "ray start" in command]
    assert all('--temp-dir="$RAY_TMPDIR/ray"' in command for command in starts)
    for command in starts:
        make = re.search(r"mkdir .*(?= && ray start| ray start)", command)
        assert make is not None
        folder = tmp_path / "mine"
        folder.mkdir(mode=0o755, exist_ok=True)
        made = make.group().removesuffix(" &&")
        assert subprocess.run(["bash", "-c", made], env={"RAY_TMPDIR": str(folder)}, timeout=30).returncode == 0
        assert folder.stat().st_mode & 0o777 == 0o700
        link = tmp_path / "link"
        link.unlink(missing_ok=True)
        link.symlink_to(folder)  # whoever owns the link may let it lead elsewhere later
        assert subprocess.run(["bash", "-c", made], env={"RAY_TMPDIR": str(link)}, timeout=30).returncode != 0


@pytest.mark.parametrize(
    "path", [ROOT / "cluster.yaml", *MANIFESTS, *OTHERS, DEPLOY / "mlflow.service"], ids=lambda path: path.name
)
def test_what_a_user_has_to_change_is_marked(path: Path) -> None:
    unmarked = (
        "192.168.1.",
        "registry.example.com",
        "claimName:",
        "ssh_user:",
        "eplicas:",
        "RAYDISTILL_RUNS=",
        "=s3:",
        "metadata.name:",
    )
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    for before, line in itertools.pairwise(lines):
        if any(word in line for word in unmarked) and line != "  replicas: 1":
            assert "EDIT" in line or "pip install" in before or path.suffix == ".service", line
    assert "EDIT" in path.read_text()


@pytest.mark.parametrize("path", [*MANIFESTS, *OTHERS], ids=lambda path: path.name)
def test_the_manifests_fit_the_schemas_of_kuberay_kubernetes_and_kueue(path: Path) -> None:
    """Against hand-written schemas of the fields that the manifests are likely to use, not the CRDs' whole text.

    What the schemas take from where stands at their top. The manifests were checked once against the whole CRDs of KubeRay 1.7
    and Kueue with unknown fields refused, and against Kubernetes' own models.
    """
    for manifest in load_all(path):
        validate(manifest)


def test_every_file_for_kubernetes_is_checked() -> None:
    assert {*MANIFESTS, *OTHERS} == set(DEPLOY.glob("*.yaml"))


@pytest.mark.parametrize(
    ("name", "key_path", "value"),
    [
        ("raycluster", ("spec", "workerGroupSpecs", 0, "replica"), 2),
        ("raycluster", ("spec", "workerGroupSpecs", 0, "replicas"), "2"),
        ("raycluster", ("spec", "headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (
            "raycluster",
            ("spec", "workerGroupSpecs", 0, "template", "spec", "containers", 0, "resources", "limits", "cpu"),
            "2 CPU",
        ),
        ("raycluster", ("spec", "headGroupSpec", "template", "spec", "volumes", 1, "emptyDir", "medium"), "RAM"),
        ("raycluster", ("spec", "gcsFaultToleranceOptions", "backend"), "rocks"),
        ("raycluster", ("spec", "autoscalerOptions", "idleTimeoutSecond"), 60),
        ("raycluster", ("apiVersion",), "ray.io/v1alpha1"),
        ("networkpolicy", ("spec", "ingress", 0, "ports", 0), {"port": 8265, "protocol": "tcp"}),
        ("networkpolicy", ("spec", "ingres"), []),
        ("mlflow", ("spec", "template", "spec", "containers", 0, "readinessProbe", "httpget"), {"port": "http"}),
    ],
)
def test_the_schemas_catch_a_slip(name: str, key_path: tuple[str | int, ...], value: object) -> None:
    manifest = next(each for each in load_all(DEPLOY / f"{name}.yaml") if each["kind"] != "ConfigMap")
    inner = manifest
    for key in key_path[:-1]:
        inner = inner.setdefault(key, [None]) if isinstance(inner, dict) else inner[key]
    inner[key_path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        validate(manifest)


def test_the_jobs_cluster_is_the_standing_one_without_what_only_that_one_needs() -> None:
    cluster, job = (load(path)["spec"] for path in MANIFESTS)
    only_standing = {"enableInTreeAutoscaling", "autoscalerOptions", "gcsFaultToleranceOptions"}
    counts = {"replicas": 2, "minReplicas": 2, "maxReplicas": 2}
    assert only_standing <= set(cluster)
    expected = {key: value for key, value in cluster.items() if key not in only_standing}
    expected["workerGroupSpecs"] = [{**group, **counts} for group in cluster["workerGroupSpecs"]]
    assert job["rayClusterSpec"] == expected


def test_a_job_that_is_started_again_continues_its_run_and_waits_in_the_queue_that_ships() -> None:
    job, kinds = load(MANIFESTS[1]), {}
    assert job["spec"]["entrypoint"].startswith("python -m service sweep ")
    assert job["spec"]["entrypoint"].endswith(" --continue")
    for manifest in load_all(DEPLOY / "kueue.yaml"):
        kinds.setdefault(manifest["kind"], []).append(manifest["metadata"]["name"])
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] in kinds["LocalQueue"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/priority-class"] in kinds["WorkloadPriorityClass"]


def test_the_queue_has_room_for_a_job() -> None:
    (queue,) = (each["spec"] for each in load_all(DEPLOY / "kueue.yaml") if each["kind"] == "ClusterQueue")
    (group,) = queue["resourceGroups"]
    (flavor,) = group["flavors"]
    quota = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
    assert list(quota) == group["coveredResources"]
    spec = load(MANIFESTS[1])["spec"]["rayClusterSpec"]
    needed = dict.fromkeys(quota, 0)
    for spec_group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        for name, value in spec_group["template"]["spec"]["containers"][0]["resources"]["requests"].items():
            needed[name] += int(value.removesuffix("Gi")) * spec_group.get("replicas", 1)
    assert all(needed[name] <= int(quota[name].removesuffix("Gi")) for name in quota)


def test_mlflows_server_asks_for_a_login_and_takes_its_passwords_from_the_secret_alone() -> None:
    config, deployment, service = load_all(DEPLOY / "mlflow.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    unit = (DEPLOY / "mlflow.service").read_text()
    assert "--app-name=basic-auth" in container["command"]
    assert "--app-name=basic-auth" in unit
    assert container["envFrom"] == [{"secretRef": {"name": "raydistill-mlflow"}}]
    assert "EnvironmentFile=/etc/mlflow/env" in unit
    texts = [config["data"]["basic_auth.ini"], *container["args"], unit]
    assert not any(re.search(r"://[^/@\s]*:[^/@\s]*@|^admin_password", text, re.MULTILINE) for text in texts)
    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]


def test_systemd_takes_the_unit_of_mlflows_server(tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd here")
    unit = tmp_path / "mlflow.service"
    unit.write_text((DEPLOY / "mlflow.service").read_text().replace("/opt/mlflow/bin/mlflow", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=30)
    assert not [line for line in checked.stderr.splitlines() if "mlflow.service" in line], checked.stderr


def test_every_pod_mounts_the_shared_volume_and_memory_for_rays_object_store() -> None:
    spec = load(MANIFESTS[0])["spec"]
    pods = [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]
    for pod in pods:
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert "persistentVolumeClaim" in mounted["/shared"]
            assert mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory"
            assert container["env"] == [{"name": "RAYDISTILL_RUNS", "value": "/shared/raydistill/runs"}]
    assert "nvidia.com/gpu" in pods[1]["containers"][0]["resources"]["limits"]
    assert spec["authOptions"] == {"mode": "token", "secretName": "raydistill-token"}


def test_trials_may_reserve_as_much_of_the_heads_memory_as_documented() -> None:
    head = load(MANIFESTS[0])["spec"]["headGroupSpec"]
    limit = head["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    assert int(head["rayStartParams"]["memory"]) == int(0.7 * int(limit.removesuffix("Gi")) * 2**30)


def test_the_manifests_name_the_ray_that_the_lock_pins() -> None:
    locked = re.search(r"^ray==(\S+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE)
    assert locked is not None
    for path in MANIFESTS:
        text = path.read_text()
        assert f'rayVersion: "{locked[1]}"' in text


def test_every_panel_shows_a_metric_that_is_exported() -> None:
    from ray.dashboard.modules.reporter.reporter_agent import METRICS_GAUGES

    from service.sweeps.run_trials import TRIALS_GAUGE
    from trainables.worker.reporter import GAUGES

    ours = [name for name, _ in (TRIALS_GAUGE, *GAUGES.values())]
    exported = {f"ray_{name}" for name in (*ours, *METRICS_GAUGES)}
    shown: set[str] = set()
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", []):
            names = set(re.findall(r"\bray_\w+", target["expr"]))
            assert names, target["expr"]
            assert names <= exported, target["expr"]
            shown |= names
    assert {f"ray_{name}" for name in ours} <= shown


def test_our_panels_can_be_narrowed_to_a_run_a_trial_and_a_stage() -> None:
    board = dashboard()
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            assert target["datasource"]["uid"] == panel["datasource"]["uid"] == "${datasource}"
            used = set(re.findall(r"\$(\w+)", target["expr"]))
            assert used <= set(variables)
            if "ray_raydistill_trials" in target["expr"]:
                assert used == {"run"}
            elif "ray_raydistill_" in target["expr"]:
                assert used == {"run", "trial", "stage"}


def test_panels_lie_within_the_page_and_do_not_overlap() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        grid = panel["gridPos"]
        own = set(itertools.product(range(grid["x"], grid["x"] + grid["w"]), range(grid["y"], grid["y"] + grid["h"])))
        assert grid["x"] + grid["w"] <= 24, panel["title"]
        assert not own & cells, panel["title"]
        cells |= own


def test_the_image_is_made_of_what_it_copies_and_runs_as_no_root() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    copied = [word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]]
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert sorted(copied) == sorted(allowed)
    assert all((ROOT / name).exists() for name in copied)
    users = [line.split()[1] for line in lines if line.startswith("USER ")]
    assert users == ["ray"]
    assert lines.index("USER ray") < next(number for number, line in enumerate(lines) if line.startswith("CMD "))


def test_pods_run_as_no_root_and_take_no_privileges() -> None:
    spec = load(MANIFESTS[0])["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert all(container["securityContext"]["allowPrivilegeEscalation"] is False for container in pod["containers"])
        assert all(container["securityContext"]["capabilities"] == {"drop": ["ALL"]} for container in pod["containers"])


def test_a_node_has_cpus_for_every_point_of_the_shipped_sweep() -> None:
    from service.config.experiment import load as load_experiment

    limits = load(MANIFESTS[0])["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    experiment = load_experiment("imagenet_r34_r18").experiment
    most_loaders = max(experiment.sweep.space["data.loader_workers"])
    assert int(limits["nvidia.com/gpu"]) * (experiment.scale.cpus_per_worker + most_loaders) <= int(limits["cpu"])
