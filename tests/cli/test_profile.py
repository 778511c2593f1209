"""`redraft profile`: the tables, the trace, what Nsight Systems is asked and how its report is read, and bad usage.

The `nsys` of these tests runs the command with an `nvtx` that notes its ranges, and prints them in the columns that
NVIDIA documents for `nvtx_pushpop_trace`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from redraft.cli.nsys import parse
from redraft.runtime.watchers import Recorded

Refused = Callable[..., str]
Redraft = Callable[..., subprocess.CompletedProcess[str]]
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
    """Puts a `nsys` on the PATH that runs the command to profile, or does something else."""

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
        "begin", "prefill", "step", "lookup", "resample", "draft", "choose", "fill", "verify", "engine.verifier",
        "judge", "commit", "(between)", "ms", "wrote",
    ]  # fmt: skip
    trace = json.loads(out.read_text())
    assert trace["otherData"]["method"] == "ngram"
    steps = [event for event in trace["traceEvents"] if event["name"] == "step"]
    assert int(shown[4].split()[1]) == len(steps) > 0


def test_json_holds_the_stages_beside_the_metrics_and_the_memory(redraft: Redraft, bundle: Path) -> None:
    values = json.loads(redraft("profile", "--engines", bundle, *RUN, "--roofline", "--json").stdout)
    assert values["stage_ms"] == pytest.approx(values["metrics"]["stage_ms"], rel=1e-6)
    assert values["outside_engines"] == pytest.approx(values["metrics"]["overhead_fraction"], rel=1e-6)
    assert values["tokens"]["new"] > 1
    assert values["trace"] is None
    graphs = [(engine["graph"], engine["tokens"]) for engine in values["roofline"]["engines"]]
    assert graphs == [("verifier", 1), ("verifier", 8), ("verifier.single", 1), ("verifier.single", 8)]
    assert all(engine["traffic"]["weights"] > 0 for engine in values["roofline"]["engines"])


def test_an_empty_prompt_is_the_bare_bos_token(redraft: Redraft, bundle: Path) -> None:
    values = json.loads(redraft("profile", "--engines", bundle, "--prompt", "", "--json").stdout)
    assert values["tokens"]["prompt"] == 1


def test_nsight_sees_the_same_ranges(
    redraft: Redraft, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    install_nsys()
    out = tmp_path / "kept.nsys-rep"
    arguments = ("profile", "--engines", bundle, *RUN, "--budget", "nodes=3,depth=3,width=1", "--json")
    plain = json.loads(redraft(*arguments).stdout)
    result = redraft(*arguments, "--nsys", "--out", out)
    assert result.returncode == 0, result.stderr
    values = json.loads(result.stdout)
    assert (values["source"], values["trace"]) == ("nsys", str(out))
    assert "redraft:decode" in out.read_text()
    calls = [{tuple(stage["path"]): stage["calls"] for stage in found["stages"]} for found in (plain, values)]
    assert calls[0] == calls[1]
    assert values["stage_ms"]["verify"] > 0
    assert 0 < values["outside_engines"] < 1


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


def test_what_fails_under_nsight_is_told(
    refused: Refused, bundle: Path, tmp_path: Path, install_nsys: Callable[..., None]
) -> None:
    install_nsys()
    arguments = ("profile", "--engines", bundle, "--prompt", "a", "--nsys")
    assert "unknown method 'magic'" in refused(*arguments, "--method", "magic", status=2)
    assert "no engine bundle" in refused("profile", "--engines", tmp_path, "--prompt", "a", "--nsys", status=1)
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


def test_no_bundle(refused: Refused, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    assert f"expected an engine bundle at {absent}" in refused("profile", "--engines", absent, *RUN, status=1)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--prompt"),
        (["--prompt", "a", "--prompt-file", "b"], "one of --prompt and --prompt-file"),
        (["--prompt", "a", "--method", "magic"], "unknown method 'magic'"),
        (["--prompt", "a", "--budget", "many"], "--budget"),
        (
            ["--prompt", "a", "--out", "/no/such/folder/trace.json"],
            "--out /no/such/folder/trace.json cannot",
        ),
        (["--prompt", "a", "--max-new-tokens", "1"], "raise --max-new-tokens"),
        (["--prompt", "a" * 64], "shorten the prompt"),
    ],
)
def test_bad_options(refused: Refused, bundle: Path, arguments: list[str], word: str) -> None:
    assert word in refused("profile", "--engines", bundle, *arguments, status=2)
