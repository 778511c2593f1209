"""`redraft doctor --engines`: exactness of texts on this machine, and costs of verification."""

from __future__ import annotations

import json

from redraft.cli import doctor_engines
from redraft.cli.doctor import _cache_folder
from redraft.runtime.exactness import Exactness


def test_a_bundle_is_exact_and_its_costs_are_shown_as_measured_and_as_believed(redraft, bundle):
    found = json.loads(redraft("doctor", "--engines", bundle, "--max-num-seqs", 2, "--json").stdout)
    (exact,) = (finding for finding in found["findings"] if finding["name"] == "exact texts")
    assert exact["status"] == "ok"
    assert exact["found"].endswith("logits agree to the bit, however they are computed") or "as two" in exact["found"]
    costs = found["costs_ms"]
    assert set(costs) == {"measured", "believed"}
    for part in costs.values():
        assert set(part) == {"1", "2"}
        assert list(part["1"])[:3] == ["1", "2", "3"]
        assert all(0 < part["1"][n] <= part["2"][n] * 3 for n in part["1"])


def test_a_person_sees_a_table(redraft, bundle):
    shown = redraft("doctor", "--engines", bundle).stdout.splitlines()
    (heading,) = (line for line in shown if line.startswith("nodes"))
    assert heading.split() == ["nodes", "1", "sequence"]
    first = shown[shown.index(heading) + 1].split()
    assert first[0] == "1"
    assert len(first) == 3


def test_kernels_that_round_otherwise_are_named(bundle, monkeypatch):
    differing = Exactness(1000, {"a tree's branch": 0.25})
    monkeypatch.setattr(doctor_engines, "measure_exactness", lambda verifier: differing)
    finding = doctor_engines.examine_engines(bundle, 1).exactness
    assert finding.status == "warning"
    assert finding.found.endswith("round otherwise for a tree's branch by up to 0.2")


def test_no_bundle_is_one_line(redraft, tmp_path):
    done = redraft("doctor", "--engines", tmp_path / "nothing")
    assert done.returncode == 1
    assert "expected an engine bundle" in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_a_home_folder_the_cache_is_not_writable(no_home: None) -> None:
    found = _cache_folder()
    assert (found.name, found.status) == ("cache folder", "warning")
    assert found.hint == "set XDG_CACHE_HOME to a folder that is"
