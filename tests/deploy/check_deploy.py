"""The Helm chart and Triton's configuration, by tools that `make test` lacks. `make check-deploy` installs them.

Helm itself lints the chart and renders it, and each object is checked by the schemas of Kubernetes.
"""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import helm_python as helm
import kubernetes_validate
import pytest
import tritonclient
import yaml
from google.protobuf import text_format

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/redraft"
VERSIONS = ("1.30", "1.37")
ALL: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "engines": {"volume": {"persistentVolumeClaim": {"claimName": "engines", "readOnly": True}}, "path": "/engines/a"},
    "extraArgs": ["--device", "cuda"],
    "apiKeys": {"secretName": "redraft-keys"},
    "service": {"type": "LoadBalancer", "port": 80},
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "autoscaling": {"enabled": True},
    "podAnnotations": {"a": "b"},
    "nodeSelector": {"a": "b"},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
    "affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [
        {"matchExpressions": [{"key": "gpu", "operator": "Exists"}]}]}}},
}  # fmt: skip
"""Values that render every part of the chart."""


def rendered(values: dict[str, Any] | None = None) -> dict[str, dict[str, Any]]:
    """Return the objects of a release by kind."""
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name="chat", namespace="llm")
    objects = [one for text in files.values() for one in yaml.safe_load_all(text) if one]
    found = {one["kind"]: one for one in objects}
    assert len(found) == len(objects)
    return found


def container(objects: dict[str, Any]) -> dict[str, Any]:
    (found,) = objects["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def test_helm_finds_no_fault() -> None:
    report = helm.lint(CHART, strict=True)
    assert report["errors"] == []
    assert [one["error"] for one in report["messages"] if one["severity"] > 1] == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("values", [{}, ALL])
def test_objects_fit_the_schemas_of_kubernetes(values: dict[str, Any], version: str) -> None:
    objects = rendered(values)
    own = {"ServiceMonitor", "ScaledObject"}  # of operators, which Kubernetes does not know
    assert objects.keys() == {"Deployment", "Service", "PodDisruptionBudget"} | (own if values else set())
    for kind in objects.keys() - own:
        kubernetes_validate.validate(objects[kind], version, strict=True)


@pytest.mark.parametrize(
    "wrong", [{"replica": 2}, {"replicas": -1}, {"image": {"pullPolicy": "Never again"}}, {"engines": {"path": "here"}},
              {"autoscaling": {"requestsPerReplica": 0}}, {"autoscaling": {"minReplicas": 0}},
              {"service": {"port": 70000}}]
)  # fmt: skip
def test_wrong_values_are_refused(wrong: dict[str, Any]) -> None:
    with helm.Chart.load(CHART) as chart, pytest.raises(helm.HelmValuesError):
        chart.validate_schema(chart.merge_values(wrong))


def test_versions_are_those_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    with helm.Chart.load(CHART) as chart:
        assert (chart.version, chart.metadata["appVersion"]) == (version, version)
    assert container(rendered())["image"] == f"redraft:{version}"


def test_probes_ask_what_the_server_answers() -> None:
    found = container(rendered({"startupSeconds": 120}))
    paths = {name: found[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/ready", "liveness": "/ready"}
    startup, liveness = found["startupProbe"], found["livenessProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == 120
    assert liveness["periodSeconds"] * liveness["failureThreshold"] > 60


def test_a_pod_has_time_to_drain() -> None:
    objects = rendered({"drainSeconds": 90})
    found = container(objects)
    assert "--drain-timeout=90" in found["args"]
    before = found["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert objects["Deployment"]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= before + 90 + 10


def test_pods_are_not_root_and_write_into_volumes_only() -> None:
    objects = rendered(ALL)
    pod, found = objects["Deployment"]["spec"]["template"]["spec"], container(objects)
    user = re.search(r"useradd --uid (\d+)", (ROOT / "deploy/Dockerfile").read_text())
    assert user
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] == int(user[1])
    assert found["securityContext"]["readOnlyRootFilesystem"]
    writable = {one["mountPath"] for one in found["volumeMounts"] if not one.get("readOnly")}
    assert writable == {"/tmp", "/var/cache/redraft"}
    assert {one["name"] for one in found["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_keda_scales_on_the_requests_of_this_release() -> None:
    objects = rendered(ALL)
    assert "replicas" not in objects["Deployment"]["spec"]
    assert objects["ScaledObject"]["spec"]["scaleTargetRef"]["name"] == objects["Deployment"]["metadata"]["name"]
    (trigger,) = objects["ScaledObject"]["spec"]["triggers"]
    assert all(isinstance(value, str) for value in trigger["metadata"].values())
    service = objects["Service"]["metadata"]["name"]
    assert trigger["metadata"]["query"].count(f'{{namespace="llm",service="{service}"}}') == 2
    assert objects["Service"]["spec"]["selector"].items() <= objects["Service"]["metadata"]["labels"].items()


def test_tritons_configuration_is_one_of_its_protocol() -> None:
    path = Path(tritonclient.__file__).parent / "grpc/model_config_pb2.py"  # the package itself needs gRPC
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    assert spec
    assert spec.loader
    protocol = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(protocol)
    config = text_format.Parse((ROOT / "deploy/triton/redraft/config.pbtxt").read_text(), protocol.ModelConfig())
    assert config.name == "redraft"
    assert config.model_transaction_policy.decoupled
    assert [one.name for one in config.input] == ["text_input", "messages", "sampling_parameters", "stream"]
    assert all(one.optional for one in config.input)
    assert [one.name for one in config.output] == ["text_output", "finish_reason", "usage"]
    assert {next(iter(one.dims)) for one in [*config.input, *config.output]} == {1}
    assert {one.data_type for one in config.output} == {protocol.TYPE_STRING}
    assert config.parameters["engines"].string_value == "engines"
