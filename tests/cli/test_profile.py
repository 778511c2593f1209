"""`redraft profile`: the tables, the trace, the arguments and the report of Nsight Systems, and bad usage.

The `nsys` of these tests runs the command with an `nvtx` that records its ranges. It prints them in the columns that
NVIDIA documents for `nvtx_pushpop_trace`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import onnxruntime as ort
import pytest
from tests.cli.conftest import Refused, Run, edit_manifest
from tests.little import Redraft
from tests.runtime.devices import tensorrt_device
from tests.runtime.fakes import CURVE
from tests.standins.cuda import FakeCuda, Status

from redraft.cli.nsys import parse, profile_options
from redraft.cli.profile import ProfileRun, decode
from redraft.engines import open_bundle
from redraft.runtime import api
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.observe.profiling import Recorded, Recording

RUN = ("--prompt", "abc abc abc", "--max-new-tokens", "24", "--method", "ngram")

NVTX = """
import os, time

class Domain:
    def __init__(self, name):
        self.name, self.open = name, []

    def get_event_attributes(self, message):
        return message

    def push_range(self, name):
        self.open.append((name, time.perf_counter_ns()))

    def pop_range(self):
        (name, start), end = self.open.pop(), time.perf_counter_ns()
        level = len(self.open)
        with open(os.environ["SEEN"], "a") as file:
            file.write(f"{start},{end},{end - start},0,{end - start},{self.name}:{name},7,7,{level},0,1,,:1,{name}\\n")

get_domain = Domain
"""

NSYS = """#!{python}
import os, subprocess, sys
command, *rest = sys.argv[1:]

if command == "profile":
    place = next(i for i, word in enumerate(rest) if not word.startswith("--"))
    options = dict(word.split("=", 1) for word in rest[:place])
    assert options["--trace"] == "cuda,nvtx", options
    assert options["--capture-range"] == "nvtx", options
    assert options["--nvtx-capture"] == "decode@redraft", options
    report = options["--output"] + ".nsys-rep"
    open(report, "w").close()
    env = {{**os.environ, "PYTHONPATH": {folder!r}, "SEEN": report}}
    sys.exit({act})
assert command == "stats", command
assert rest[:4] == ["--report=nvtx_pushpop_trace", "--format=csv", "--output=-", "--force-export=true"], rest
print("Generating SQLite file from the report")
print("{columns}")
print(open(rest[4]).read(), end="")
"""
COLUMNS = ("Start (ns),End (ns),Duration (ns),DurChild (ns),DurNonChild (ns),Name,PID,TID,Lvl,NumChild,RangeId,"
           "ParentId,RangeStack,NameTree")  # fmt: skip
RUNS = "subprocess.run(rest[place:], env=env).returncode"


@pytest.fixture
def install_nsys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an `nsys` on the PATH that runs the command to profile, or does something else."""

    def install(act: str = RUNS) -> None:
        folder = tmp_path / "nsight"
        folder.mkdir()
        (folder / "nvtx.py").write_text(NVTX)
        script = folder / "nsys"
        script.write_text(NSYS.format(python=sys.executable, folder=str(folder), act=act, columns=COLUMNS))
        script.chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    return install


def test_a_table_and_a_trace(redraft: Redraft, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    shown = redraft("profile", "--engines", bundle, *RUN, "--out", out).stdout.splitlines()
    assert shown[0] == "ngram, times of the clock"
    assert shown[1].split() == ["range", "calls", "total", "ms", "mean", "ms", "p50", "ms", "p99", "ms", "share"]
    assert [line.split()[0] for line in shown[2:]] == [
        "prefill", "engine.verifier", "step", "offers", "choose", "fill", "verify", "engine.verifier",
        "accept", "commit", "(between)", "ms", "wrote",
    ]  # fmt: skip
    trace = json.loads(out.read_text())
    assert trace["otherData"]["method"] == "ngram"
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert int(shown[4].split()[1]) == len(steps) > 0


def test_json_holds_the_stages_the_metrics_and_the_memory(run: Run, bundle: Path) -> None:
    values = run("profile", "--engines", bundle, *RUN, "--roofline")
    assert values["stage_ms"] == pytest.approx(values["metrics"]["stage_ms"], rel=1e-6)
    assert values["outside_engines"] == pytest.approx(values["metrics"]["overhead_fraction"], rel=1e-6)
    assert values["tokens"]["new"] > 1
    assert (values["trace"], values["device"], values["environment"]["device"]) == (None, "host", "host")
    graphs = [(engine["graph"], engine["tokens"]) for engine in values["roofline"]["engines"]]
    assert graphs == [(f"verifier{form}", nodes) for form in ("", ".batch", ".single") for nodes in (1, 8)]
    assert all(engine["traffic"]["weights"] > 0 for engine in values["roofline"]["engines"])


def test_on_a_device_the_tables_and_the_json_name_it(run: Run, redraft: Redraft, bundle: Path, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    asked = ("profile", "--engines", bundle, *RUN, "--device", "cpu", "--roofline")
    shown = redraft(*asked, "--out", out).stdout.splitlines()
    assert shown[0] == "ngram on cpu, times of the clock"
    assert shown[-1].startswith("memory of cpu: copies ")
    assert shown[-1].endswith(" GB/s, over 256 MiB")
    assert json.loads(out.read_text())["otherData"]["environment"]["device"] == "cpu"
    values = run(*asked)
    assert (values["device"], values["environment"]["device"], values["roofline"]["device"]) == ("cpu",) * 3
    graphs = [(engine["graph"], engine["tokens"]) for engine in values["roofline"]["engines"]]
    assert graphs == [("verifier", 1), ("verifier", 8)]
    assert ["step", "verify", "engine.verifier"] in [stage["path"] for stage in values["stages"]]


@pytest.mark.parametrize(
    ("device", "status", "word"),
    [("tpu", 2, "unknown device 'tpu'; choose one of cpu, cuda"), ("cuda", 1, "install onnxruntime-gpu")],
)
def test_a_device_that_is_not_here_is_refused_as_generate_does(
    refused: Refused, bundle: Path, device: str, status: int, word: str
) -> None:
    if device == "cuda" and "CUDAExecutionProvider" in ort.get_available_providers():
        pytest.skip("this build has CUDA")
    lines = [
        refused(command, "--engines", bundle, *RUN, "--device", device, status=status)
        for command in ("profile", "generate")
    ]
    assert word in lines[0]
    assert lines[0] == lines[1]


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_on_a_device_nothing_is_captured_while_it_is_recorded(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Capturing a step takes longer than the step. The second run captures the prompt's, before the trace begins."""
    captures: list[bool] = []

    class Watch(Recording):
        seen = False

        def enter(self, name: str) -> None:
            self.seen = True
            super().enter(name)

    class Cuda(FakeCuda):
        def cudaStreamBeginCapture(self, stream: int, mode: int) -> tuple[Status]:
            captures.append(watch.seen)
            return super().cudaStreamBeginCapture(stream, mode)

    watch, cuda = Watch(), Cuda()
    device = tensorrt_device(open_bundle(bundle, verify=False), tmp_path, cuda=cuda).device
    monkeypatch.setattr(api, "open_device", lambda bundle, name, threads: device)
    monkeypatch.setattr(api, "load_costs", lambda verifier, identity: VerifyCosts({1: CURVE}))
    asked = ProfileRun(bundle, "abc abc abc", method, 12, "nodes=3,depth=3,width=1", 1, "cuda")
    with ExitStack() as stack:
        assert decode(asked, stack, watch)[0].verifier.device.name == "cuda"
    assert watch.seen
    assert len(captures) > 1
    assert not any(captures)


def test_nsight_sees_the_same_ranges(
    run: Run, redraft: Redraft, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    """On a device too, which has no range `accept`: `accept_output` comes with the verification."""
    install_nsys()
    out = tmp_path / "kept.nsys-rep"
    arguments = ("profile", "--engines", bundle, *RUN, "--budget", "nodes=3,depth=3,width=1")
    plain = run(*arguments)
    values = run(*arguments, "--nsys", "--out", out)
    assert (values["source"], values["trace"]) == ("nsys", str(out))
    assert "redraft:decode" in out.read_text()
    assert values["device"] is None
    calls = [{tuple(stage["path"]): stage["calls"] for stage in found["stages"]} for found in (plain, values)]
    assert calls[0] == calls[1]
    assert values["stage_ms"]["verify"] > 0
    assert 0 < values["outside_engines"] < 1
    shown = redraft("profile", "--engines", bundle, *RUN, "--device", "cpu", "--nsys").stdout
    assert shown.splitlines()[0] == "ngram on cpu, times of the nsys"
    assert "accept" not in shown


def test_ranges_of_a_report_keep_their_level_and_their_nanoseconds() -> None:
    """Rows as nsys 2026.3 prints them; those of other domains and its own words are left out."""
    text = f"""Processing [profile.sqlite] with [nvtx_pushpop_trace.py]...
{COLUMNS}
1000000000,1500000000,500000000,0,0,redraft:decode,53,53,0,1,1,,:1,redraft:decode
1100000000,1400000000,300000000,0,0,redraft:step,53,53,1,1,2,1,:1:2,--redraft:step
1150000000,1200000000,50000000,0,0,NCCL:ncclCommInitAll,53,53,2,0,3,2,:1:2:3,----NCCL:ncclCommInitAll
1200000000,1300000000,100000000,0,0,redraft:verify,53,53,2,0,4,2,:1:2:4,----redraft:verify
"""
    assert list(parse(text)) == [Recorded("step", 1.1, 1.4, 0), Recorded("verify", 1.2, 1.3, 1)]
    assert list(parse("no report here")) == []


def test_without_nsight(refused: Refused, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "install Nsight Systems" in refused("profile", "--engines", bundle, *RUN, "--nsys", status=1)


def test_failures_under_nsight_are_reported(
    refused: Refused, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    install_nsys()
    arguments = ("profile", "--engines", bundle, "--prompt", "a", "--nsys")
    assert "this bundle has no drafter 'magic'" in refused(*arguments, "--method", "magic", status=2)
    assert "not an engine bundle" in refused("profile", "--engines", tmp_path, "--prompt", "a", "--nsys", status=1)
    assert ".nsys-rep" in refused(*arguments, "--out", tmp_path / "trace.json", status=2)


@pytest.mark.parametrize(
    ("act", "words"),
    [("print('no GPU, no permission') or 3", "`nsys profile` left with 3: no GPU, no permission"),
     ("0", "nsys wrote no range of redraft")],
)  # fmt: skip
def test_an_nsight_that_sees_nothing(
    refused: Refused, bundle: Path, install_nsys: Callable[..., None], act: str, words: str
) -> None:
    install_nsys(act)
    assert words in refused("profile", "--engines", bundle, *RUN, "--nsys", status=1)


def test_nsights_child_is_asked_the_same(
    refused: Refused, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    """The child gets every option of the run, and the text as a file: no argument holds a zero or over 128 KiB."""
    install_nsys("print(rest[place:], [open(rest[-2]).read().rstrip('a')]) or 3")
    options = ("--method", "ngram", "--budget", "nodes=1,depth=1,width=1", "--threads", "1", "--device", "cpu")
    (tmp_path / "prompt.txt").write_text("-a\nb\0" + "a" * 200_000)
    asked = ("profile", "--engines", bundle, "--max-new-tokens", "9", *options, "--prompt-file")
    line = refused(*asked, tmp_path / "prompt.txt", "--nsys", status=1)
    assert f", {str([*map(str, asked)])[1:-1]}, " in line
    assert line.endswith("/prompt.txt', '--nvtx'] ['-a\\nb\\x00']")


def test_failures_leave_the_file_unchanged(
    refused: Refused, bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    old.write_text("an old trace")
    for out in (old, new):
        for arguments in (["--method", "magic"], ["--budget", "many"]):
            refused("profile", "--engines", bundle, "--prompt", "a", *arguments, "--out", out, status=2)
    report = tmp_path / "old.nsys-rep"
    report.write_text("an old report")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused("profile", "--engines", bundle, *RUN, "--nsys", "--out", report, status=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["old.json", "old.nsys-rep"]
    assert (old.read_text(), report.read_text()) == ("an old trace", "an old report")


def test_nothing_is_decoded_if_no_trace_can_be_written(redraft: Redraft, bundle: Path, tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "missing" / "trace.json"):
        result = redraft("profile", "--engines", bundle, *RUN, "--out", out)
        assert result.returncode == 2
        assert f"--out {out} cannot be written" in result.stderr
        assert "decoding" not in result.stderr


def test_missing_packages_of_the_roofline_fail_before_decoding(
    refused: Refused, bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "redraft.bench.roofline", raising=False)
    monkeypatch.setitem(sys.modules, "onnx", None)
    line = refused("profile", "--engines", bundle, *RUN, "--roofline", status=1)
    assert line.startswith("redraft: error: onnx is not installed")


@pytest.mark.parametrize(
    ("options", "named"),
    [(["--json"], "--json"), (["--nsys", "--out", "trace.json"], "--out, --nsys"), (["--roofline"], "--roofline")],
)
def test_options_that_do_nothing_with_nvtx_are_refused(
    refused: Refused, bundle: Path, options: list[str], named: str
) -> None:
    line = refused("profile", "--engines", bundle, *RUN, "--nvtx", *options, status=2)
    assert f"--nvtx only emits ranges: {named} would do nothing" in line


def test_caveats_of_a_bundle_are_printed(
    run: Run, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    """Random weights, as every output notes."""
    engines = Path(shutil.copytree(bundle, tmp_path / "random"))
    edit_manifest(engines, lambda manifest: manifest["model"].update(random_weights=True))
    caveat = "random weights (the verifier): speeds are real, texts and acceptance are not"
    arguments = ("profile", "--engines", engines, "--prompt", "abc", "--max-new-tokens", "9", "--method", "none")
    assert caveat in run(*arguments)["caveats"]
    install_nsys()
    assert caveat in run(*arguments, "--nsys")["caveats"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "one of --prompt and --prompt-file"),
        (["--prompt", "a", "--method", "magic"], "this bundle has no drafter 'magic'"),
        (["--prompt", "a", "--budget", "many"], "--budget"),
        (["--prompt", "a", "--method", "none", "--budget", "nodes=1,depth=1,width=1"], "--budget would do nothing"),
        (["--prompt", "a" * 64], "shorten the prompt"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, arguments: list[str], word: str) -> None:
    assert word in refused("profile", "--engines", bundle, *arguments, status=2)


def test_the_documented_command_is_the_one_that_runs() -> None:
    """Without one of its options the report shows other columns."""
    text = (Path(__file__).parents[2] / "docs" / "profiling.md").read_text(encoding="utf-8")
    command = text.partition("\nnsys profile ")[2].partition(" redraft profile ")[0].replace("\\\n", " ")
    assert ["profile", *command.split()] == profile_options(Path("profile.nsys-rep"))
