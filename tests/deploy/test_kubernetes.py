"""The manifests in deploy/kubernetes: they name each other, and what the server, its metrics and its routes have."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.config.loader import read_config
from headrace.server.config_checks import check_config
from tests.support.running_server import asynchronous, serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
METRICS = (ROOT / "docs" / "reference" / "metrics.md").read_text(encoding="utf-8")
SECRETS = {
    "HEADRACE_OPS_KEY": "sk-ops",
    "HEADRACE_POSTGRES": "postgres://headrace@db/headrace",
    "HEADRACE_REDIS": "redis://redis/0",
}


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / name).read_text(encoding="utf-8"))


@pytest.fixture
def pod() -> dict[str, Any]:
    return manifest("deployment.yaml")["spec"]["template"]


def test_kustomize_lists_every_manifest() -> None:
    files = {path.name for path in FOLDER.iterdir()} - {"kustomization.yaml"}
    assert set(manifest("kustomization.yaml")["resources"]) == files
    for name in files:
        found = manifest(name)
        assert {"apiVersion", "kind", "metadata"} <= set(found), name
        assert found["metadata"]["name"] == "headrace"


def test_the_configuration_is_valid_and_its_variables_are_in_the_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "headrace.toml"
    file.write_text(manifest("config.yaml")["data"]["headrace.toml"], encoding="utf-8")
    config = read_config(file, environ=SECRETS, check=check_config)
    assert config.keys
    assert {config.keys[0].key_env, config.admin.dsn_env, config.ledger.dsn_env, config.limiting.redis_env} == set(
        SECRETS
    )
    grace = manifest("deployment.yaml")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > config.server.drain_s + 5  # preStop, too
    container = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": config.server.port, "internal": config.server.internal_port}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")]
    assert str(config.storage.path) in mounts
    assert os.path.dirname(container["args"][-1]) in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_selectors_volumes_and_targets_name_what_is_there(pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"]
    spec = pod["spec"]
    assert manifest("deployment.yaml")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert manifest("service.yaml")["spec"]["selector"].items() <= labels.items()
    assert manifest("disruption-budget.yaml")["spec"]["selector"]["matchLabels"].items() <= labels.items()
    (container,) = spec["containers"]
    names = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in manifest("service.yaml")["spec"]["ports"]} <= names
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    policy = manifest("network-policy.yaml")["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    assert {port["port"] for rule in policy["ingress"] for port in rule["ports"]} == names
    assert all("from" in rule for rule in policy["ingress"] if {"port": "internal"} in rule["ports"])
    scaler = manifest("autoscaler.yaml")["spec"]
    target = scaler["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", manifest("deployment.yaml")["metadata"]["name"])
    assert "replicas" not in manifest("deployment.yaml")["spec"]  # or each apply would undo the autoscaler's
    assert 1 < scaler["minReplicas"] < scaler["maxReplicas"]


def test_the_autoscaler_reads_metrics_that_the_server_has() -> None:
    metrics = [
        each["pods"]["metric"]["name"] for each in manifest("autoscaler.yaml")["spec"]["metrics"] if "pods" in each
    ]
    assert metrics
    for name in metrics:
        assert f"`{name}`" in METRICS


def test_the_pods_have_no_privileges(pod: dict[str, Any]) -> None:
    own = pod["spec"]["containers"][0]["securityContext"]
    assert own["allowPrivilegeEscalation"] is False
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"] == {"drop": ["ALL"]}
    assert pod["spec"]["securityContext"]["runAsNonRoot"] is True
    assert "limits" in pod["spec"]["containers"][0]["resources"]


@asynchronous
async def test_the_probes_ask_for_paths_that_answer() -> None:
    container = manifest("deployment.yaml")["spec"]["template"]["spec"]["containers"][0]
    async with serving() as running:
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            answer = await running.ask("GET", container[probe]["httpGet"]["path"])
            assert answer.status == 200
