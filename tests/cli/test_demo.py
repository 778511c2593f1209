"""`redraft demo`: what it prints agrees with itself, and its bundle may be the user's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.little import Redraft

PROMPTS = ("--prompt", "the cat sat on the cat sat on the", "--prompt", "a dog and a dog and a dog and")


def test_the_ratio_is_that_of_the_rates_it_prints(redraft: Redraft, lyanna_bundle: Path) -> None:
    done = redraft("demo", "--engines", lyanna_bundle, "--prompt", "abcd", "--prompt", "bab", "--max-new-tokens", 60)
    assert done.returncode == 0, done.stderr
    plain, fast = (float(rate) for rate in re.findall(r"^  \S+ +([\d.]+) tokens a second$", done.stdout, re.M))
    (ratio,) = re.findall(r"([\d.]+) times as fast", done.stdout)
    assert ratio == f"{fast / plain:.{len(ratio.partition('.')[2])}f}"
    assert "lossless: both wrote the same tokens" in done.stdout
    assert len(re.findall(r"^  \S", done.stdout.partition("next:")[2], re.M)) == 3


def test_texts_and_origins_of_each_prompt(redraft: Redraft, bundle: Path) -> None:
    done = redraft("demo", "--engines", bundle, *PROMPTS, "--max-new-tokens", 20, "--json")
    (found,) = json.loads(done.stdout)["bundles"]
    assert [each["prompt"] for each in found["prompts"]] == list(PROMPTS[1::2])
    for each in found["prompts"]:
        assert each["texts"]["none"] == each["texts"][found["method"]]
        assert 1 <= sum(each["origins"].values()) <= 20


@pytest.mark.parametrize(("options", "line"), [(("--system", "a"), "--system needs --chat"), ((), "found none")])
def test_refusals(redraft: Redraft, tmp_path: Path, options: tuple[str, ...], line: str) -> None:
    done = redraft("demo", "--engines", tmp_path, *options)
    assert done.returncode in (1, 2)
    assert line in done.stderr
    assert done.stderr.count("redraft: error") == 1
