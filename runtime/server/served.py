"""What a server asks: one runtime, or a gateway to several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from redraft.runtime.controllers.experience import Gain
from redraft.runtime.loop.decode_loop import Health
from redraft.runtime.params import SamplingParams, SpeculationParams
from redraft.runtime.requests.request import Request
from redraft.runtime.submission import Listener, Submission
from redraft.runtime.text.tokenizer import Tokenizer


class Served(Protocol):
    """A `Runtime`, or a `Gateway`. `Runtime` says what each member means."""

    tokenizer: Tokenizer
    max_model_len: int

    @property
    def vocabulary(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def methods(self) -> tuple[str, ...]: ...

    @property
    def default_method(self) -> str: ...

    @property
    def caveats(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def health(self) -> Health: ...

    @property
    def gain(self) -> Gain: ...

    @property
    def running(self) -> list[Request]: ...

    @property
    def calls_lost(self) -> int | None: ...

    def replica_of(self, request: Request) -> str | None: ...

    def unavailable(self) -> str | None: ...

    def check_running(self) -> None: ...

    def check_queue(self, count: int) -> None: ...

    def reload_drafters(self) -> tuple[str, ...]: ...

    def model_sampling(self) -> SamplingParams: ...

    def submit(  # noqa: PLR0913 - as `Runtime.submit`
        self, prompt: Sequence[int], params: SamplingParams, speculation: SpeculationParams, *,
        priority: int, timeout: float | None, first_token_timeout: float | None, tenant: str | None,
        cache_salt: str | None, session: str | None, on_output: Listener, keep_trees: bool,
    ) -> Submission: ...  # fmt: skip
