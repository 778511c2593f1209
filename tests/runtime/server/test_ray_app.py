"""Replicas on Ray: the settings of an application, and what is refused before anything starts."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from pydantic import ValidationError

from redraft.engines.manifest import load_manifest
from redraft.errors import BundleError, UsageError
from redraft.runtime.replicas.calls import identity_of
from redraft.runtime.server.ray_app import AppSettings, build, local_replicas
from redraft.runtime.server.settings import ServerSettings
from tests.conftest import ROOT

BUNDLE = "/engines/one"


def test_the_fields_of_one_model_are_those_of_the_application() -> None:
    settings = AppSettings.model_validate({"bundle": BUNDLE, "replicas": "4", "cores": 8, "drain_timeout": 5})
    assert list(settings.models) == ["one"]
    model = settings.models["one"]
    assert (model.bundle, model.replicas, model.cores, settings.drain_timeout) == (Path(BUNDLE), 4, 8, 5)
    assert list(AppSettings.model_validate({"bundle": BUNDLE, "name": "other"}).models) == ["other"]


def test_settings_are_read_as_the_command_line_gives_them() -> None:
    given = {"bundle": "engines/one", "allow_hosts": "a.b,c", "exact": "false", "gpus": "1", "max_body_bytes": "99"}
    settings = AppSettings.model_validate(given)
    assert (settings.allow_hosts, settings.max_body_bytes) == (("a.b", "c"), 99)
    model = settings.models["one"]
    assert (model.bundle, model.exact, model.gpus) == (Path.cwd() / "engines/one", False, 1)


def test_several_models_have_settings_of_their_own() -> None:
    models = {"a": {"bundle": BUNDLE}, "b": {"bundle": "/engines/two", "replicas": 2}}
    settings = AppSettings.model_validate({"models": models, "max_prompt_tokens": 100})
    assert [(name, model.replicas) for name, model in settings.models.items()] == [("a", 1), ("b", 2)]
    server = settings.server("b")
    assert (server.model_name, server.host, server.max_prompt_tokens) == ("b", "0.0.0.0", 100)


@pytest.mark.parametrize(
    "wrong",
    [
        {"bundle": BUNDLE, "colour": "red"},
        {"bundle": BUNDLE, "replicas": 0},
        {"models": {"a": {"bundle": BUNDLE, "core": 1}}},
        {"models": {"a": {}}},
        {"bundle": BUNDLE, "progress_timeout": 0},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        AppSettings.model_validate(wrong)


def test_an_application_needs_a_model() -> None:
    with pytest.raises(UsageError, match="the application has no model"):
        build(AppSettings())


@pytest.mark.parametrize(
    "given", [{"bundle": "BUNDLE", "name": "m"}, {"models": {"a": {"bundle": "BUNDLE"}, "b": {"bundle": "BUNDLE"}}}]
)
def test_an_application_is_built_from_what_serve_reads(tiny_bundle: Path, given: dict[str, object]) -> None:
    api = pytest.importorskip("ray.serve._private.api", reason="the extra `ray` is not installed")
    arguments = json.loads(json.dumps(given).replace("BUNDLE", str(tiny_bundle)))
    application = api.call_user_app_builder_with_args_if_necessary(build, arguments)
    assert application._bound_deployment.name == "front"


@pytest.mark.parametrize("file", ["serve.yaml", "kuberay/rayservice.yaml"])
def test_the_configurations_of_deploy_are_valid(file: str) -> None:
    text = yaml.safe_load((ROOT / "deploy" / file).read_text())
    config = yaml.safe_load(text["spec"]["serveConfigV2"]) if "spec" in text else text
    (application,) = config["applications"]
    assert application["import_path"] == "redraft.runtime.server.ray_app:build"
    settings = AppSettings.model_validate(application["args"])
    assert settings.models
    schema = pytest.importorskip("ray.serve.schema", reason="the extra `ray` is not installed")
    schema.ServeDeploySchema.model_validate(config)
    if "spec" in text:
        workers = text["spec"]["rayClusterConfig"]["workerGroupSpecs"][0]["template"]["spec"]["containers"]
        assert int(workers[0]["resources"]["limits"]["cpu"]) > max(one.cores for one in settings.models.values())


def test_replicas_need_ray(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(UsageError, match="replicas need Ray"),
        local_replicas(tiny_bundle, 1, {}, ServerSettings("tiny")),
    ):
        pass


def test_more_replicas_than_cores_are_refused(tiny_bundle: Path) -> None:
    count = len(os.sched_getaffinity(0)) + 1
    with (
        pytest.raises(UsageError, match=f"{count} replicas need {count} cores"),
        local_replicas(tiny_bundle, count, {}, ServerSettings("tiny")),
    ):
        pass


@pytest.mark.parametrize(
    ("running", "waiting", "replicas"),
    [((), (), 1), ((0.0,), (0.0,), 1), ((6.0,), (0.0,), 1), ((7.0,), (0.0,), 2), ((8.0, 8.0), (0.0, 4096.0), 4)],
)
def test_the_number_of_replicas_follows_the_load(
    running: tuple[float, ...], waiting: tuple[float, ...], replicas: int
) -> None:
    pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
    from redraft.runtime.replicas.ray_serve import LoadPolicy

    found = {"running_requests": dict(enumerate(running)), "waiting_tokens": dict(enumerate(waiting))}
    context = SimpleNamespace(aggregated_metrics=found)
    assert LoadPolicy(slots=8, queued_tokens=4096)(context)[0] == replicas  # type: ignore[arg-type]


def test_another_bundle_on_a_node_is_refused(tiny_bundle: Path) -> None:
    pytest.importorskip("ray.serve", reason="the extra `ray` is not installed")
    from redraft.runtime.replicas.ray_serve import Engine

    with pytest.raises(BundleError, match="on this node is another bundle than on the node that deploys it"):
        Engine(str(tiny_bundle), "0" * 64, {}, 0, 30.0)


def test_the_identity_of_texts_is_that_of_verifier_and_kernels(lyanna_bundle: Path, tiny_bundle: Path) -> None:
    one, other = load_manifest(lyanna_bundle), load_manifest(tiny_bundle)
    found = identity_of(one, "kernels")
    assert found == identity_of(replace(one, drafters={}, build_key="other"), "kernels")
    assert found.texts != identity_of(one, "others").texts
    assert found.tokens == identity_of(one, "others").tokens
    assert found.texts != identity_of(other, "kernels").texts
    assert found.tokens != identity_of(replace(one, max_model_len=99), "kernels").tokens
