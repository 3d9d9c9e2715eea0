"""The chart in deploy/helm, rendered by Helm's own library: its objects fit Kubernetes' schemas, each other and the
server with its metrics and routes, and values that cannot work are rejected."""

from __future__ import annotations

import inspect
import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace import __version__
from headrace.cli.serving.serve import serve
from headrace.config import Config
from headrace.config.loader import read_config
from headrace.server.config_checks import check_config
from tests.support.running_server import asynchronous, serving

helm = pytest.importorskip("helm_python", reason="helm-python-sdk is not installed")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "headrace"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
SHARED = yaml.safe_load((CHART / "values-shared.yaml").read_text(encoding="utf-8"))
SECRETS = {
    "HEADRACE_OPS_KEY": "sk-ops",
    "HEADRACE_POSTGRES": "postgres://headrace@db/headrace",
    "HEADRACE_REDIS": "redis://redis/0",
}
ONE: dict[str, Any] = {"secret": {"existing": "headrace-keys"}}
EVERYTHING: dict[str, Any] = {
    "secret": {"values": SECRETS},
    "image": {"pullSecrets": ["registry"]},
    "keda": {"enabled": True},
    "podMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "persistence": {
        "cache": {"enabled": True, "accessModes": ["ReadWriteMany"], "storageClass": "nfs"},
        "models": {"existingClaim": "weights"},
    },
    "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
    "antiAffinity": "required",
    "nodeSelector": {"pool": "cpu"},
    "tolerations": [{"key": "pool", "operator": "Exists"}],
    "podAnnotations": {"team": "search"},
    "podLabels": {"tier": "models"},
    "service": {"annotations": {"team": "search"}},
}
STATEFUL: dict[str, Any] = {**ONE, "persistence": {"state": {"enabled": True}, "cache": {"enabled": True}}}
VALUES = {"one": ONE, "shared": SHARED, "everything": EVERYTHING, "stateful": STATEFUL}
OF_OPERATORS = {"ScaledObject", "PodMonitor"}  # whose schemas are not Kubernetes' own

Objects = dict[str, dict[str, Any]]


def render(values: dict[str, Any], name: str = "demo") -> Objects:
    """Return the objects by kind, or by kind and name where a kind has several."""
    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace="prod")
    found: Objects = {}
    for file, text in files.items():
        if file.endswith(".txt"):
            continue
        for each in filter(None, yaml.safe_load_all(text)):
            kind = each["kind"]
            assert (kind, each["metadata"]["name"]) not in [(o["kind"], o["metadata"]["name"]) for o in found.values()]
            found[f"{kind} {each['metadata']['name']}" if kind == "PersistentVolumeClaim" else kind] = each
    return found


def pod_of(objects: Objects) -> dict[str, Any]:
    return objects["Deployment"]["spec"]["template"]["spec"]


def configuration(objects: Objects, folder: Path) -> Config:
    file = folder / "headrace.toml"
    file.write_text(objects["ConfigMap"]["data"]["headrace.toml"], encoding="utf-8")
    return read_config(file, environ=SECRETS, check=check_config)


@pytest.fixture(params=VALUES)
def objects(request: pytest.FixtureRequest) -> Objects:
    return render(VALUES[request.param])


def test_helm_finds_nothing_wrong_with_the_chart() -> None:
    found = helm.lint(str(CHART), values=ONE)
    assert [each for each in found["messages"] if "icon" not in each["error"]] == []
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


def test_objects_fit_the_schemas_of_kubernetes(objects: Objects) -> None:
    for each in objects.values():
        if each["kind"] not in OF_OPERATORS:
            kubernetes_validate.validate(each, "1.30", strict=True)
        assert each["metadata"]["labels"]["app.kubernetes.io/instance"] == "demo"


@pytest.mark.parametrize("values", VALUES)
def test_the_configuration_is_valid_and_the_pod_fits_it(
    values: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    objects = render(VALUES[values])
    config = configuration(objects, tmp_path)
    pod = pod_of(objects)
    (container,) = pod["containers"]
    assert config.keys
    assert pod["terminationGracePeriodSeconds"] > config.server.drain_s + int(
        container["lifecycle"]["preStop"]["exec"]["command"][1]
    )
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.server.port, "internal": config.server.internal_port}
    for each in (*pod["initContainers"], container):
        mounts = [mount["mountPath"] for mount in each["volumeMounts"] if not mount.get("readOnly")]
        assert {str(config.storage.path), "/tmp", "/var/cache/headrace"} == set(mounts)
        assert os.path.dirname(each["args"][-1]) in [mount["mountPath"] for mount in each["volumeMounts"]]
        assert each["args"][1] == "--config"
    assert "config" in inspect.signature(serve).parameters
    assert container["args"][0] == "serve"
    assert "HEADRACE_CACHE=/var/cache/headrace" in DOCKERFILE
    assert f"USER {pod['securityContext']['runAsUser']}" in DOCKERFILE


def test_selectors_volumes_ports_and_targets_name_what_is_there(objects: Objects) -> None:
    deployment, pod = objects["Deployment"], pod_of(objects)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    selectors = [
        deployment["spec"]["selector"]["matchLabels"],
        objects["Service"]["spec"]["selector"],
        objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"],
        objects["NetworkPolicy"]["spec"]["podSelector"]["matchLabels"],
    ]
    if "PodMonitor" in objects:
        selectors.append(objects["PodMonitor"]["spec"]["selector"]["matchLabels"])
    assert all(selector and selector.items() <= labels.items() for selector in selectors)
    names = {port["name"] for port in pod["containers"][0]["ports"]}
    assert {port["targetPort"] for port in objects["Service"]["spec"]["ports"]} <= names
    policy = objects["NetworkPolicy"]["spec"]
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == names
    assert all("from" in rule for rule in policy["ingress"] if {"port": "internal"} in rule["ports"])
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    for each in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in each["volumeMounts"]} == set(volumes)
        (source,) = each["envFrom"]
        assert source["secretRef"]["name"] in ("headrace-keys", objects.get("Secret", deployment)["metadata"]["name"])
    named = [volume.get("persistentVolumeClaim", {}).get("claimName") for volume in volumes.values()]
    claims = {name for name in named if name not in (None, "weights")}
    assert claims == {each["metadata"]["name"] for each in objects.values() if each["kind"] == "PersistentVolumeClaim"}
    assert volumes["config"]["configMap"]["name"] == objects["ConfigMap"]["metadata"]["name"]


@pytest.mark.parametrize(("values", "kind"), [(SHARED, "HorizontalPodAutoscaler"), (EVERYTHING, "ScaledObject")])
def test_autoscalers_read_metrics_that_the_server_has(values: dict[str, Any], kind: str) -> None:
    objects = render(values)
    assert "replicas" not in objects["Deployment"]["spec"]  # or each upgrade would undo the autoscaler's
    assert {"HorizontalPodAutoscaler", "ScaledObject"} & set(objects) == {kind}
    scaler = objects[kind]["spec"]
    assert scaler["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    metrics = set(re.findall(r"headrace_\w+", str(scaler)))
    assert metrics
    for name in metrics:
        assert f"`{name}`" in METRICS
    if kind == "ScaledObject":
        (trigger,) = scaler["triggers"]
        assert trigger["metadata"]["query"] == 'sum(headrace_engine_waiting{namespace="prod", pod=~"demo-headrace-.*"})'
        assert trigger["metadata"]["threshold"] == "2"
        assert 1 < scaler["minReplicaCount"] < scaler["maxReplicaCount"]


def test_the_pods_have_no_privileges(objects: Objects) -> None:
    pod = pod_of(objects)
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["automountServiceAccountToken"] is False
    assert pod["enableServiceLinks"] is False
    for each in (*pod["initContainers"], *pod["containers"]):
        own = each["securityContext"]
        assert (own["allowPrivilegeEscalation"], own["readOnlyRootFilesystem"]) == (False, True)
        assert own["capabilities"] == {"drop": ["ALL"]}
        assert "limits" in each["resources"]


@asynchronous
async def test_the_probes_ask_for_paths_that_answer() -> None:
    objects = render(ONE)
    (container,) = pod_of(objects)["containers"]
    annotations = objects["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    (endpoint,) = render(EVERYTHING)["PodMonitor"]["spec"]["podMetricsEndpoints"]
    assert annotations["prometheus.io/port"] == "9400"
    paths = [container[probe]["httpGet"]["path"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    async with serving() as running:
        for path in (*paths, annotations["prometheus.io/path"], endpoint["path"]):
            assert (await running.ask("GET", path)).status == 200


def test_values_become_toml_with_the_same_types(tmp_path: Path) -> None:
    config = {
        "server": {"drain_s": 7.5, "connections": 2000000},
        "models": {"mini": None, "a.b": {"upstream": {"url": "http://far/v1", "headers": {"x-a": 'say "é" <b>\n\\'}}}},
        "routing": {"rules": [{"name": "night", "variant": "a.b", "when": {"hours": ["22:00-06:00"], "tools": True}}]},
    }
    objects = render({**ONE, "config": config})
    read = tomllib.loads(objects["ConfigMap"]["data"]["headrace.toml"])
    assert read["server"]["drain_s"] == 7.5
    assert (read["server"]["connections"], read["server"]["port"]) == (2000000, 8000)
    assert type(read["server"]["port"]) is int
    assert read["models"] == {"a.b": config["models"]["a.b"]}
    assert read["routing"] == config["routing"]
    assert pod_of(objects)["terminationGracePeriodSeconds"] == 5 + 8 + 25
    changed = [
        each["Deployment"]["spec"]["template"]["metadata"]["annotations"]["checksum/config"]
        for each in (objects, render(ONE))
    ]
    assert changed[0] != changed[1]


def test_a_pod_that_keeps_its_ledger_is_replaced_before_the_next_starts() -> None:
    assert render(STATEFUL)["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    assert render(ONE)["Deployment"]["spec"]["strategy"]["type"] == "RollingUpdate"


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({}, "set secret.existing"),
        ({**ONE, "secret": {"existing": "a", "values": {"A": "b"}}}, "secret.existing and secret.values"),
        ({**SHARED, "keda": {"enabled": True}}, "autoscaling.enabled and keda.enabled"),
        ({**STATEFUL, "replicas": 2}, "persistence.state is for one pod"),
        ({**SHARED, "persistence": {"cache": {"enabled": True}}}, "ReadWriteMany"),
        ({**ONE, "replica": 2}, "replica"),
        ({**ONE, "config": {"server": {"port": "http"}}}, "port"),
        ({**ONE, "config": {"server": None}}, "server"),
        ({**ONE, "antiAffinity": "always"}, "antiAffinity"),
        ({**ONE, "secret": {"values": {"not-a-name": "x"}}}, "not-a-name"),
    ],
)
def test_values_that_cannot_work_are_rejected(values: dict[str, Any], reason: str) -> None:
    with pytest.raises(helm.HelmError) as caught:
        render(values)
    assert reason in str(caught.value)
