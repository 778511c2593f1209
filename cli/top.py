"""`redraft top`: figures of a running server, from pairs of readings of its /metrics."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from http.client import HTTPException
from typing import TYPE_CHECKING, Annotated
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import typer

from redraft.errors import RedraftError, UsageError

if TYPE_CHECKING:
    from rich.table import Table

PREFIX = "redraft:"
PERCENTILES = (50, 90, 99)
UNKNOWN = "-"
_TIMEOUT_SECONDS = 10
_MOST_BYTES = 1 << 24


def top(
    url: Annotated[str, typer.Argument(help="The server's address, for example http://127.0.0.1:8000.")],
    interval: Annotated[float, typer.Option(min=0.01, help="Seconds between readings.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print one table, after one interval.")] = False,
) -> None:
    """Show the speed and the load of a server, and what speculation gains there. Ctrl-C ends it."""
    from rich.console import Console
    from rich.live import Live

    address, console = metrics_url(url), Console(highlight=False)
    latest = read(address)
    with Live(console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live:
        while True:
            time.sleep(interval)
            before, latest = latest, read(address)
            shown = table(Window(before, latest), url)
            if live is None:
                console.print(shown)
            else:
                live.update(shown, refresh=True)
            if once:
                return


def metrics_url(url: str) -> str:
    """Return the address of the metrics of a server. Raises UsageError if it is not one of HTTP."""
    whole = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(whole)
        known = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        known = False
    if not known:
        raise UsageError(f"{url} is not the address of a server", "give one such as http://127.0.0.1:8000")
    return whole if parts.path.strip("/") else f"{whole.rstrip('/')}/metrics"


@dataclass(frozen=True)
class Reading:
    """One reading of a server's metrics.

    at: seconds of a clock.   models: names of its models.
    values:  sums of a metric's series, by its name without the prefix.
    buckets: observations up to each upper bound, by the histogram's name.
    """

    at: float
    models: tuple[str, ...]
    values: Mapping[str, float]
    buckets: Mapping[str, Mapping[float, float]]


def read(address: str) -> Reading:
    """Read the metrics of a server now. Raises RedraftError if it cannot be reached, or has no metrics of redraft."""
    try:
        with urlopen(address, timeout=_TIMEOUT_SECONDS) as response:
            body = response.read(_MOST_BYTES)
    except HTTPError as error:
        raise RedraftError(
            f"{address} answers with status {error.code}", "give the address of `redraft serve`"
        ) from None
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RedraftError(f"{address} cannot be reached: {reason}", "start `redraft serve` first") from None
    try:
        return parse(body.decode("utf-8"), time.monotonic())
    except (ValueError, LookupError):
        raise RedraftError(f"{address} has no metrics of redraft", "give the address of `redraft serve`") from None


def parse(text: str, at: float) -> Reading:
    """Return the metrics of redraft in the text of a server. Raises ValueError or LookupError for another text."""
    from prometheus_client.parser import text_string_to_metric_families

    values: defaultdict[str, float] = defaultdict(float)
    buckets: defaultdict[str, defaultdict[float, float]] = defaultdict(lambda: defaultdict(float))
    models = set()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                name = sample.name.removeprefix(PREFIX)
                values[name] += sample.value
                models.add(sample.labels.get("model_name", ""))
                if name.endswith("_bucket"):
                    buckets[name.removesuffix("_bucket")][float(sample.labels["le"])] += sample.value
    if "num_requests_running" not in values:
        raise ValueError("not a server's metrics")
    return Reading(at, tuple(sorted(models - {""})), values, buckets)


@dataclass(frozen=True)
class Window:
    """What a server did between two readings. If it began anew in between, since then."""

    before: Reading
    after: Reading

    def grown(self, name: str) -> float:
        """Return the growth of a counter."""
        before, after = self.before.values.get(name, 0.0), self.after.values.get(name, 0.0)
        return after - before if after >= before else after

    def per_second(self, name: str) -> float:
        """Return the growth of a counter in a second."""
        return self.grown(name) / max(self.after.at - self.before.at, 1e-9)

    def ratio(self, name: str, of: str) -> float | None:
        """Return the growth of one counter over that of another one; None if the latter did not grow."""
        whole = self.grown(of)
        return self.grown(name) / whole if whole else None

    def quantile(self, histogram: str, share: float) -> float | None:
        """Return the value that a share of the observations does not exceed; None without observations.

        Inside a bucket, observations are spread evenly. Beyond the last bound, it is that bound.
        """
        after, before = self.after.buckets.get(histogram, {}), self.before.buckets.get(histogram, {})
        if any(after.get(bound, 0.0) < count for bound, count in before.items()):
            before = {}
        counts = [(bound, after[bound] - before.get(bound, 0.0)) for bound in sorted(after)]
        if not counts or not counts[-1][1]:
            return None
        wanted, low, below = share * counts[-1][1], 0.0, 0.0
        for bound, count in counts[:-1]:
            if count >= wanted:
                return low + (bound - low) * (wanted - below) / (count - below)
            low, below = bound, count
        return low


def table(window: Window, url: str) -> Table:
    """Return the figures of a window as a table."""
    from rich.table import Table
    from rich.text import Text

    models = ", ".join(window.after.models)
    shown = Table("", "", show_header=False, title=Text(f"{models} at {url}"), title_justify="left")
    for name, value in figures(window).items():
        shown.add_row(Text(name), Text(value))
    return shown


def figures(window: Window) -> dict[str, str]:
    """Return the figures of a window as texts, by name."""
    now = window.after.values
    running, waiting = now.get("num_requests_running", 0.0), now.get("num_requests_waiting", 0.0)
    return {
        "requests": f"{running:.0f} running, {waiting:.0f} waiting",
        "tokens per second": f"{window.per_second('generation_tokens_total'):.1f}",
        "time to first token": _percentiles(window, "time_to_first_token_seconds"),
        "time between outputs": _percentiles(window, "inter_token_latency_seconds"),
        "accepted of drafted tokens": _percent(
            window.ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total")
        ),
        "tokens per step": _number(window.ratio("generation_tokens_total", "request_steps_total"), ""),
        "speed over plain decoding": _number(window.ratio("plain_decode_seconds_total", "decode_seconds_total"), " ×"),
        "KV cache": _percent(now.get("kv_cache_usage_perc")),
    }


def _percentiles(window: Window, histogram: str) -> str:
    found = [(share, window.quantile(histogram, share / 100)) for share in PERCENTILES]
    return ", ".join([f"p{share} {_seconds(value)}" for share, value in found if value is not None]) or UNKNOWN


def _seconds(value: float) -> str:
    return f"{value * 1e3:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else f"{100 * value:.0f} %"


def _number(value: float | None, unit: str) -> str:
    return UNKNOWN if value is None else f"{value:.2f}{unit}"
