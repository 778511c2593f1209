"""Dockerfiles and the composition: pinned, without torch, not as root; and the commands of the image for CPUs run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from redraft import __version__
from tests.conftest import ROOT
from tests.runtime.server.serving import listening, toy

FILES = ("deploy/Dockerfile", "deploy/Dockerfile.cuda")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WAIT = 300


def stages(file: str) -> dict[str, list[tuple[str, str]]]:
    """Return the instructions of each stage of a Dockerfile by name, as pairs; the last one is called `final`."""
    text = re.sub(r"^#.*\n", "", (ROOT / file).read_text(), flags=re.M).replace("\\\n", "")
    found: dict[str, list[tuple[str, str]]] = {"": []}
    for line in filter(None, text.splitlines()):
        word, _, rest = line.partition(" ")
        if word == "FROM":
            found[rest.partition(" AS ")[2] or "final"] = []
        list(found.values())[-1].append((word, re.sub(" +", " ", rest)))
    return found


def values(instructions: list[tuple[str, str]], word: str) -> list[str]:
    return [rest for found, rest in instructions if found == word]


def server(file: str) -> list[tuple[str, str]]:
    """Return the instructions of the stage that serves."""
    found = stages(file)
    return found.get("server", found["final"])


@pytest.mark.parametrize("file", FILES)
def test_images_are_pinned_and_serve_as_another_user_than_root(file: str) -> None:
    found = stages(file)
    (base,) = values(found[""], "ARG")
    assert re.fullmatch(r"BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}", base)
    assert base == values(stages(FILES[0])[""], "ARG")[0]
    sources = {rest.partition(" ")[0] for one in found.values() for rest in values(one, "FROM")}
    assert sources <= {"${BASE}", *found}
    own = server(file)
    assert values(own, "USER") == ["10001"]
    assert len(values(own, "HEALTHCHECK")) == 1
    assert json.loads(values(own, "ENTRYPOINT")[0])[:4] == ["redraft", "serve", "--engines", "/engines"]


@pytest.mark.parametrize("file", FILES)
def test_the_server_has_no_torch(file: str) -> None:
    """It takes the stage `install` only, which installs what serving needs; the stage `engines` builds on that."""
    assert [rest.split()[0] for rest in values(server(file), "COPY")] == ["--from=install"]
    (installing,), given = values(stages(file)["install"], "RUN"), values(stages(file)["install"], "ARG")
    extra = dict(one.split("=") for one in given).get("EXTRA", "")
    extras = re.findall(r"'\.\[(.*?)\]'", installing.replace('".[${EXTRA}]"', f"'.[{extra}]'"))
    assert extras == (["serve"] if file == FILES[0] else ["serve,cuda"])
    assert not [rest for rest in values(server(file), "RUN") if "pip" in rest]
    wanted = " ".join(PROJECT["project"]["dependencies"] + PROJECT["project"]["optional-dependencies"]["serve"])
    assert "torch" not in wanted


def test_the_gpu_image_has_the_pinned_version_of_onnx_runtime() -> None:
    (pinned,) = [one for one in PROJECT["project"]["dependencies"] if one.startswith("onnxruntime==")]
    (installing,) = values(stages(FILES[1])["install"], "RUN")
    assert f"'onnxruntime-gpu[cuda,cudnn]=={pinned.partition('==')[2]}'" in installing


def let_in() -> list[str]:
    """Return the files that .dockerignore lets into an image."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    names = tuple(line[1:] for line in lines if line.startswith("!"))
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [path for path in listed.splitlines() if any(path == one or path.startswith(f"{one}/") for one in names)]


def test_the_context_has_what_the_wheel_is_built_from() -> None:
    found = set(let_in())
    folders = {path for path in PROJECT["tool"]["scikit-build"]["wheel"]["packages"].values()}
    assert {folder for folder in folders if not any(path.startswith(f"{folder}/") for path in found)} == set()
    assert {"pyproject.toml", "constraints.txt", "README.md", *PROJECT["project"]["license-files"]} <= found
    assert not [path for path in found if path.startswith(("tests/", "docs/", "deploy/"))]


def test_the_context_has_the_assets_of_recipes() -> None:
    found = set(let_in())
    for recipe in (ROOT / "engines/recipes").glob("*.toml"):
        for name in re.findall(r'"asset:(.*?)"', recipe.read_text()):
            assert any(path.startswith(f"assets/{name}/") for path in found), name


@pytest.fixture
def composed() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]


def test_the_composition_is_pinned_and_listens_on_this_machine_only(composed: dict[str, Any]) -> None:
    assert composed["redraft"]["image"] == f"redraft:{__version__}"
    for name, service in composed.items():
        assert re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
        for volume in service["volumes"]:
            if isinstance(volume, str) and volume.startswith("."):
                assert (ROOT / "deploy" / volume.partition(":")[0]).exists(), volume


def test_a_container_has_time_to_drain(composed: dict[str, Any]) -> None:
    command = composed["redraft"]["command"]
    drain = int(command[command.index("--drain-timeout") + 1])
    assert int(composed["redraft"]["stop_grace_period"].removesuffix("s")) > drain + 10
    documented = (ROOT / "docs/deploying.md").read_text()
    (stop,), (drain,) = (
        re.findall(rf"docker run.*\n?.*--{name} (\d+)", documented) for name in ("stop-timeout", "drain-timeout")
    )
    assert int(stop) > int(drain) + 10


@pytest.mark.parametrize("file", FILES)
def test_the_health_check_asks_no_proxy(file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_port()}")
    monkeypatch.delenv("no_proxy", raising=False)
    checking = json.loads(values(server(file), "HEALTHCHECK")[0].partition(" CMD ")[2])
    checking[0] = sys.executable

    def check(url: str) -> int:
        command = [word.replace("http://127.0.0.1:8000", url) for word in checking]
        return subprocess.run(command, check=False, capture_output=True, timeout=WAIT).returncode

    with toy() as runtime, listening(runtime) as (url, running):
        assert check(url) == 0
        running.service.draining = True
        assert check(url) == 1
        running.service.draining = False


def test_prometheus_and_grafana_find_the_server_and_each_other(composed: dict[str, Any]) -> None:
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (target,) = scraped["scrape_configs"][0]["static_configs"][0]["targets"]
    assert target.split(":")[0] in composed
    assert f":{target.split(':')[1]}" in composed["redraft"]["ports"][0]
    assert all((ROOT / "deploy/prometheus" / name).exists() for name in scraped["rule_files"])
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((ROOT / "deploy/grafana/dashboards.yml").read_text())["providers"]
    assert any(f"{provider['options']['path']}/redraft.json" in volume for volume in composed["grafana"]["volumes"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@pytest.mark.slow
@pytest.mark.deploy
def test_the_commands_of_the_cpu_image_run(bundle: Path, tmp_path: Path) -> None:
    """In a folder with the context only: the installation, which has no torch, the server, and its health check."""
    context, installed = tmp_path / "src", tmp_path / "opt"
    for path in let_in():
        (context / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, context / path)
    (installing,) = values(stages(FILES[0])["install"], "RUN")
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    path = f"{Path(sys.executable).resolve().parent}:{plain['PATH']}"
    command = installing.replace("/opt/redraft", str(installed))
    subprocess.run(["sh", "-ec", command], cwd=context, env={**plain, "PATH": path}, check=True, timeout=2 * WAIT)
    own = {**plain, "PATH": f"{installed}/bin:{plain['PATH']}"}
    asked = (
        "import importlib.util as u; print([u.find_spec(one) is None for one in ('torch', 'transformers', 'pytest')])"
    )
    found = subprocess.run(["python", "-c", asked], cwd=tmp_path, env=own, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "[True, True, True]"
    asked = "from redraft.plugins.operators import find_operators; print(find_operators().path)"
    found = subprocess.run(["python", "-c", asked], cwd=tmp_path, env=own, check=True, capture_output=True, text=True)
    assert Path(found.stdout.strip()).is_relative_to(installed)
    port = free_port()
    starting = [
        str(bundle) if word == "/engines" else word for word in json.loads(values(server(FILES[0]), "ENTRYPOINT")[0])
    ]
    checking = json.loads(values(server(FILES[0]), "HEALTHCHECK")[0].partition(" CMD ")[2])
    checking = [word.replace(":8000/", f":{port}/") for word in checking]
    options = ["--host", "127.0.0.1", "--port", str(port), "--threads", "1"]
    assert subprocess.run(checking, env=own, check=False, capture_output=True).returncode == 1
    with subprocess.Popen([*starting, *options], cwd=tmp_path, env=own, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("listening on ")
            subprocess.run(checking, env=own, check=True, timeout=WAIT)
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT) == 0
        finally:
            process.kill()
