"""`redraft demo`: the same prompt plainly and speculatively, side by side, and commands to try next."""

from __future__ import annotations

from typing import Annotated

import typer

from redraft.cli.console import print_caveats, print_json
from redraft.cli.options import Device, Engines, Json, NewTokens, Threads, Verify

PROMPT = """class Vector:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __add__(self, other):
        return Vector(self.x + other.x, self.y + other.y)

    def __sub__(self, other):
"""
ROUNDS = 5


def demo(
    engines: Engines,
    prompt: Annotated[str, typer.Option(help="The prompt to continue.")] = PROMPT,
    max_new_tokens: NewTokens = 128,
    threads: Threads = None,
    device: Device = None,
    verify: Verify = None,
    as_json: Json = False,
) -> None:
    """Decode one prompt plainly and speculatively, and compare speed and text."""
    from redraft.bench.compare import PLAIN, Settings, compare
    from redraft.bench.prompts import Prompt
    from redraft.bench.summary import summarise
    from redraft.cli.bench import margin_finder
    from redraft.cli.opening import open_runtime
    from redraft.runtime import SamplingParams

    settings = Settings(SamplingParams(max_tokens=max_new_tokens))
    with open_runtime(engines, threads=threads, verify=verify, device=device) as runtime:
        best = runtime.default_method
        caveats = runtime.caveats
        runs = compare(runtime, [Prompt("demo", "demo", prompt)] * ROUNDS, [best], settings)
        methods = summarise(runs, margin_finder(runtime, settings))
    plain, fast = methods[PLAIN], methods[best]
    if as_json:
        text = runs[0].generations[PLAIN].text
        print_json({"caveats": list(caveats), "prompt": prompt, "text": text, "methods": methods})
        return
    print_caveats(caveats)
    texts = [runs[0].generations[method].text for method in (PLAIN, best)]
    _print_side_by_side(prompt, texts, [f"plain, {_rate(plain)}", f"{best}, {_rate(fast)}"])
    if fast["prompts"]:
        typer.echo(f"{fast['speedup']:.2f} times as fast, {fast['mean_acceptance_length']:.2f} tokens a verification")
    typer.echo(_accept_output(fast))
    typer.echo(f"""
next:
  . .venv/bin/activate                # the environment of make
  redraft generate --engines {engines} --prompt "def main():"
  redraft bench --engines {engines} --prompts assets/tiny/prompts/code.jsonl
  redraft inspect {engines}
  redraft doctor
  make engines MODEL=<a Hugging Face checkpoint folder or id>""")


def _rate(figures: dict[str, float]) -> str:
    return f"{figures['tokens_per_second']:.0f} tokens/s" if figures["prompts"] else "too short to time"


def _accept_output(figures: dict[str, object]) -> str:
    if figures["identical_to_plain"]:
        return "lossless: both wrote the same tokens"
    return "lossless but for a near-tie of two logits" if figures["lossless"] else "NOT LOSSLESS: please report this"


def _print_side_by_side(prompt: str, texts: list[str], titles: list[str]) -> None:
    from rich.columns import Columns
    from rich.console import Console
    from rich.panel import Panel
    from rich.text import Text

    console = Console(highlight=False)
    width = max(console.width // 2 - 2, 30)
    panels = [
        Panel(Text(prompt, style="dim") + Text(text), title=title, width=width)
        for text, title in zip(texts, titles, strict=True)
    ]
    console.print(Columns(panels))
