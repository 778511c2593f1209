"""Replicas in this process, which die when a test says so."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

from redraft import __version__
from redraft.runtime import Runtime
from redraft.runtime.replicas.calls import Answer, Call, Identity, Update
from redraft.runtime.replicas.gateway import Gateway, ReplicaDied
from redraft.runtime.replicas.replica import Replica

Dies = Callable[[Call, int, int], bool]
"""Whether a replica dies before it sends an update: the call, and how many calls and updates came before it."""


class LocalReplicas:
    """Replicas that take calls in turns.   calls: all that came, in order."""

    def __init__(self, runtimes: Sequence[Runtime], dies: Dies = lambda *_: False) -> None:
        self.replicas = [
            Replica(runtime, f"replica {number}", Identity(__version__, "tokens", "texts"))
            for number, runtime in enumerate(runtimes)
        ]
        self.calls: list[Call] = []
        self._dies = dies

    async def ping(self) -> None:
        """There is always one."""

    async def run(self, call: Call) -> AsyncGenerator[Answer]:
        number = len(self.calls)
        self.calls.append(call)
        sent = 0
        async for answer in self.replicas[number % len(self.replicas)].run(call):
            if isinstance(answer, Update) and self._dies(call, number, sent):
                raise ReplicaDied
            yield answer
            sent += isinstance(answer, Update)


def gateway_of(replicas: LocalReplicas, **options: int) -> Gateway:
    runtime = replicas.replicas[0].runtime
    manifest = SimpleNamespace(max_model_len=runtime.max_model_len, eos_token_ids=(), model=SimpleNamespace(caveats=()))
    bundle = SimpleNamespace(manifest=manifest, path=Path("nowhere"))
    return Gateway(bundle, runtime.tokenizer, replicas, replicas.replicas[0].describe(), **options)  # type: ignore[arg-type]
