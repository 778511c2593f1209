"""The runtime's public interface: open a bundle, generate or stream text, and read metrics."""

# pylint: disable=too-many-lines  # the public interface, most of it docstrings
from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from numbers import Integral
from pathlib import Path
from typing import IO, Any, Self

from redraft.engines import Bundle, check_max_num_seqs, open_bundle, open_device, open_host
from redraft.engines.host_device import HostDevice
from redraft.errors import BundleError, UsageError
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.drafters.synthetic import Acceptance
from redraft.runtime.generation import Generation, RequestError, keep_tree
from redraft.runtime.loop.decode_loop import DecodeLoop, Health
from redraft.runtime.loop.request_maker import Parameters, Prompt, RequestMaker, parameters_of, reader_of
from redraft.runtime.loop.speculation import SpeculationFactory, check_options
from redraft.runtime.loop.thread import LoopThread
from redraft.runtime.observe.trace import TraceWriter
from redraft.runtime.params import SamplingParams, SpeculationParams, check_tenant
from redraft.runtime.requests.request import Request
from redraft.runtime.sampling import model_sampling
from redraft.runtime.steps.exactness import settle_exactness
from redraft.runtime.steps.measurements import Identity, identity_key, identity_of, load_costs, save_costs
from redraft.runtime.steps.verifier import Verifier, open_verifier
from redraft.runtime.submission import Listener, Submission
from redraft.runtime.text.tokenizer import Tokenizer

GREEDY = SamplingParams()
MOST_THREADS = 1024
"""Most threads of an engine. ONNX Runtime starts any number, which takes minutes for a hundred thousand."""
_SAVE_STEPS = 256
"""A generation writes the estimated costs to disk if this many steps have corrected them."""


class Runtime:
    """An open engine bundle, with a decode loop that all threads share. All methods may be called from any thread."""

    def __init__(  # noqa: PLR0913 - options of the public interface
        self, verifier: Verifier, tokenizer: Tokenizer, costs: VerifyCosts, max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        drafter_options: Mapping[str, Mapping[str, Any]] | None = None, bundle: Bundle | None = None,
        identity: Identity | None = None, exact: bool = False, max_waiting: int | None = None,
        max_total_tokens: int | None = None,
    ) -> None:  # fmt: skip
        """identity: settings that measured costs depend on, apart from the machine. `open` sets all of them."""
        self.verifier = verifier
        self.tokenizer = tokenizer
        self.costs = costs
        self.max_model_len = max_model_len
        self._bundle = bundle
        self._identity = identity or {}
        self._exact = exact
        self._saved_steps = 0
        self._speculation = SpeculationFactory(
            verifier, costs, drafter_options or {}, bundle, self._identity, self.exact
        )
        stop_tokens = frozenset(eos_token_ids)
        self._requests = RequestMaker(tokenizer, verifier.vocabulary, max_model_len, stop_tokens, self._speculation)
        self._thread = LoopThread(DecodeLoop(verifier, self._speculation.plain, costs, max_waiting, max_total_tokens))

    @classmethod
    def open(  # noqa: PLR0913 - options of the public interface
        cls, path: Path | str, threads: int | None = None, max_num_seqs: int = 1, verify: bool | None = None,
        drafter_options: Mapping[str, Mapping[str, Any]] | None = None, device: str | None = None, exact: bool = True,
        max_waiting: int | None = None, prefix_slots: int | None = None, max_total_tokens: int | None = None,
        report: Callable[[str], None] = lambda message: None,
    ) -> Self:  # fmt: skip
        """Open the bundle at `path`.

        threads: threads of the engine; None uses one a core.   max_num_seqs: sequences that may run at once.
        verify:  True checks every byte of the bundle, None too if a file has changed since the last full check on this
                machine, False none.
        drafter_options: settings by id, for example {"ngram": {"prompt_lookup_max": 3}}.
        device: `cpu` or `cuda`. Everything between a step's tokens stays on it. None uses the GPU for TensorRT engines,
                and otherwise a faster path on the CPU.
        exact:  True if a text must be the same to the bit alone, in a batch and with any method (`exactness`).
                False uses kernels that compute single tokens of one sequence a few percent faster. They round
                differently from kernels for several tokens, so most longer texts differ in 8 and 4 bits. With
                redraft's operators, one graph is exact and the fastest, so False changes nothing.
        max_waiting:  most requests of `submit` that wait for a slot; None takes any number.
        prefix_slots: slots that hold rows of earlier prefixes only, beside the free ones. None is `max_num_seqs` on the
                      host, which takes memory for their rows when they are used, and 0 on a GPU.
        max_total_tokens: most tokens whose rows are kept in all slots together, those of drafts included. If rows run
                      out, prefixes are dropped, then the youngest request waits and goes on later with the same text.
                      A request that could have more tokens is refused. None is no limit: each slot may be full.
        report:       called with the name of each stage that may take seconds, when it begins.
        The first opening on a machine takes up to three seconds longer: it checks kernels and measures their costs.
        Raises BundleError, BackendError, and UsageError for fewer than one slot or thread, for more than MOST_THREADS,
        or an unknown device.
        """
        least = {"max_num_seqs": (max_num_seqs, 1), "threads": (threads, 1), "prefix_slots": (prefix_slots, 0),
                 "max_waiting": (max_waiting, 0), "max_total_tokens": (max_total_tokens, 2)}  # fmt: skip
        for name, (value, lowest) in least.items():
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral)):
                raise UsageError(f"{name} must be a whole number, not {value!r}")
            if value is not None and value < lowest:
                raise UsageError(f"{name} must be at least {lowest}, not {value}")
        if threads is not None and threads > MOST_THREADS:
            raise UsageError(
                f"threads must be at most {MOST_THREADS}, not {threads}", "give one a core, or leave it out"
            )
        report("checking the bundle")
        bundle = open_bundle(path, verify)
        check_options(drafter_options or {}, bundle)
        manifest = bundle.manifest
        if device is None and manifest.tensorrt is not None:
            device = "cuda"
        largest = manifest.largest_call
        if largest is not None:
            check_max_num_seqs(largest[0], max_num_seqs)
        report("loading the engine")
        # First, since the engine takes the memory that reading a tokenizer leaves.
        tokenizer = Tokenizer.load(bundle.path, manifest.bos_token_id, next(iter(manifest.eos_token_ids), None))
        opened = open_device(bundle, device, threads) if device else open_host(bundle, threads, max_num_seqs, exact)
        if prefix_slots is None:
            prefix_slots = 0 if opened.step_graphs else max_num_seqs
        verifier = open_verifier(
            bundle, opened, max_num_seqs, largest_tree=largest[1] if largest else sys.maxsize,
            slots=max_num_seqs + prefix_slots,
        )  # fmt: skip
        identity = identity_of(bundle, opened, threads, max_num_seqs)
        exact = exact or opened.own_attention
        if exact and isinstance(opened, HostDevice):
            report("comparing kernels")
            settle_exactness(verifier, identity)
        report("measuring costs")
        costs, rows, eos = load_costs(verifier, identity), manifest.max_model_len, manifest.eos_token_ids
        return cls(
            verifier, tokenizer, costs, rows, eos, drafter_options, bundle, identity, exact, max_waiting,
            max_total_tokens,
        )  # fmt: skip

    @property
    def exact(self) -> bool:
        """True if exact kernels compute the texts. Only the host has such kernels (see `exactness`)."""
        return self._exact and isinstance(self.verifier.device, HostDevice)

    @property
    def fingerprint(self) -> str:
        """Names the build, its precision, its kernels, and a digest of these, the machine and the options.

        Runtimes of equal fingerprints compute equal texts for equal requests, if `exact` holds. Without a bundle, it
        names the device alone.
        """
        if self._bundle is None:
            return f"redraft-{self.verifier.device.name}"
        machine = f"-{identity_key(self._identity)[:12]}"
        return f"redraft-{self.build[:12]}-{self.kernels.removesuffix(machine)}{machine}"

    @property
    def build(self) -> str:
        """The digest of the bundle's build; empty without a bundle."""
        return "" if self._bundle is None else self._bundle.manifest.build_key

    @property
    def kernels(self) -> str:
        """The precision and kernels that compute the texts, and the machine if they round otherwise on others."""
        device = self.verifier.device
        own = isinstance(device, HostDevice) and device.own_attention
        path = device.verifier_graph if isinstance(device, HostDevice) else device.name
        precision = "" if self._bundle is None else f"{self._bundle.manifest.precision}-"
        machine = "" if own else f"-{identity_key(self._identity)[:12]}"
        return f"{precision}{path}{'' if self.exact else '-inexact'}{machine}"

    @property
    def default_method(self) -> str:
        """The default method: n-gram lookup with the bundle's first drafter, else lookup alone."""
        return self._speculation.default_method

    @property
    def methods(self) -> tuple[str, ...]:
        """All values of `method` that this bundle supports."""
        return self._speculation.methods

    def model_sampling(self, **given: Any) -> SamplingParams:
        """Return `SamplingParams(**given)` with the model's own defaults for sampling parameters that are not given.

        They are those of its generation_config.json. Raises UsageError for a bundle that keeps none.
        """
        if self._bundle is None:
            raise UsageError("this runtime has no bundle with a model's sampling defaults")
        return model_sampling(self._bundle.path, given)

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""
        return self.verifier.vocabulary

    @property
    def slots(self) -> int:
        """Requests that may run at once."""
        return self.verifier.max_num_seqs

    @property
    def calls_lost(self) -> None:
        """None: this process works on its requests itself."""

    def replica_of(self, request: Request) -> None:
        """Return None, for the same reason."""

    @property
    def caveats(self) -> tuple[str, ...]:
        """Warnings that every output must show: random weights, or a tokenizer that is not the model's."""
        return self._bundle.manifest.model.caveats if self._bundle is not None else ()

    def close(self) -> None:
        """End running requests, and release the engine and its buffers. Closing again does nothing."""
        self._thread.close()
        self._speculation.close()
        if (verifier := self.__dict__.pop("verifier", None)) is not None:
            try:
                self._save_costs(1)
            finally:
                verifier.close()

    def _save_costs(self, steps: int) -> None:
        """Save the estimated costs for the next opening, if at least `steps` steps have corrected them since."""
        if self._identity and self.costs.steps - self._saved_steps >= steps:
            self._saved_steps = self.costs.steps
            save_costs(self.costs, self._identity)

    def _check_open(self) -> None:
        """Raise UsageError if the runtime is closed."""
        if "verifier" not in self.__dict__:
            raise UsageError("this runtime is closed", "open it again")

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] = GREEDY,
        speculation: str | SpeculationParams | Sequence[str | SpeculationParams] | None = None,
        synthetic_acceptance: Sequence[float] | None = None, record_logit_margins: bool = False,
        trace: IO[str] | None = None,
    ) -> list[Generation]:  # fmt: skip
        """Continue every prompt, at most `max_num_seqs` at a time.

        params:      one for all prompts, or a list with one for each prompt.
        speculation: how to draft, one for all prompts or a list. A string is `SpeculationParams(method=string)`.
                     Requests of several methods share a batch, and each step verifies all their trees in one call.
        trace: the file that receives each step (`redraft.runtime.observe.trace`).
        synthetic_acceptance: forced acceptance by depth; the output is labelled.   record_logit_margins: fill
                              `Generation.logit_margins`.
        Raises UsageError for invalid arguments, before any computation, and RequestError if requests failed while
        they ran, after all others have ended.
        """
        if isinstance(prompts, str | bytes):
            raise UsageError("expected a list of prompts, found one", "put it into a list")
        forced = Acceptance(tuple(synthetic_acceptance)) if synthetic_acceptance is not None else None
        if trace is not None and forced is not None:
            raise UsageError("forced acceptance cannot be traced: its answers are not the verifier's")
        submissions = self._prepared(prompts, params, speculation, forced, record_logit_margins, trace)
        try:
            self._thread.add([one.request for one in submissions])
            generations = [one.ended() for one in submissions]
        except BaseException:
            for one in submissions:
                one.abort()
            raise
        self._save_costs(_SAVE_STEPS)
        if any(generation.error for generation in generations):
            raise RequestError(generations)
        return generations

    def submit(  # noqa: PLR0913 - options of the public interface
        self, prompt: Prompt, params: SamplingParams = GREEDY, speculation: str | SpeculationParams | None = None, *,
        priority: int = 0, timeout: float | None = None, first_token_timeout: float | None = None,
        tenant: str | None = None, cache_salt: str | None = None, on_output: Listener | None = None,
        keep_trees: bool = False, written: Sequence[int] = (), session: str | None = None,
    ) -> Submission:  # fmt: skip
        """Begin to continue `prompt`, beside all other requests. May be called from any thread.

        priority:   requests of smaller numbers come first, and take the slots of others if necessary.
        timeout:    seconds from now after which it ends, with the reason `timeout`.
        first_token_timeout: the same if it has no token yet.
        tenant:     requests of one priority come tenant by tenant, in turns.
        cache_salt: only requests of equal salts share the rows of equal prefixes.
        on_output:  called in the loop's thread with each step's output. It must return soon, and may submit and abort.
        keep_trees: the trees of its steps are read later (`RequestOutput.step`), so those on a device are copied.
        written:    tokens that an equal request had when it was interrupted, here or elsewhere. The text goes on after
                    them as it would have: to the bit if `exact` and accepted by coupling, as is the default.
        session:    has no effect here: a gateway sends the requests of a session to one of its replicas.
        Raises UsageError as `generate` does, and QueueFull if `max_waiting` requests wait already.
        """
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise UsageError(f"priority must be a whole number, not {priority!r}")
        for name, seconds in (("timeout", timeout), ("first_token_timeout", first_token_timeout)):
            if seconds is not None and not (isinstance(seconds, int | float) and seconds > 0):
                raise UsageError(f"{name} must be a positive number of seconds, not {seconds!r}")
        for name, key in (("tenant", tenant), ("cache_salt", cache_salt), ("session", session)):
            if key is not None and not isinstance(key, str):
                raise UsageError(f"{name} must be a text, not {key!r}")
        now = time.monotonic()
        (submission,) = self._prepared([prompt], params, speculation, listener=on_output, written=written)
        request = submission.request
        request.priority, request.salt = priority, cache_salt
        request.turn = tenant if tenant is not None else request.tenant
        request.deadline = None if timeout is None else now + timeout
        request.first_token_deadline = None if first_token_timeout is None else now + first_token_timeout
        request.record = keep_tree if keep_trees else None
        submission.start(limited=True)
        return submission

    def stream(
        self, prompt: Prompt, params: SamplingParams = GREEDY, speculation: str | SpeculationParams | None = None,
        trace: IO[str] | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """Continue `prompt` and yield text as soon as it is final. The joined chunks are `generate`'s text.

        Raises the errors of `generate` at the call, not at the first chunk, with which it begins. A request that fails
        while it runs raises RequestError after its last text.
        """
        (submission,) = self._prepared([prompt], params, speculation, trace=trace)
        return self._chunks(submission)

    def _chunks(self, submission: Submission) -> Iterator[str]:
        yield from submission
        self._save_costs(_SAVE_STEPS)

    def pieces(
        self, prompt: Prompt, params: SamplingParams = GREEDY, speculation: str | SpeculationParams | None = None
    ) -> Submission:
        """Return a submission that begins with its first piece. Errors are those of `stream`."""
        return self._prepared([prompt], params, speculation)[0]

    @property
    def health(self) -> Health:
        """The state of the decode loop: its requests, and the time since a step made progress."""
        self._check_open()
        return self._thread.loop.health

    @property
    def running(self) -> list[Request]:
        """The requests that have not ended, those with a slot first. Other threads change them."""
        self._check_open()
        return self._thread.loop.scheduler.requests

    @property
    def gain(self) -> Gain:
        """Measured time of steps whose drafts adapt, and the time in which plain steps would have brought their tokens.

        Steps with drafts of a fixed budget or a rule do not count, since nothing measures plain steps for them.
        """
        return self._speculation.gain

    def unavailable(self) -> None:
        """Return None: what it needs is in this process."""

    def check_running(self) -> None:
        """Raise UsageError if the runtime is closed, or if its decode loop has died."""
        self._check_open()
        self._thread.check()

    def check_queue(self, count: int) -> None:
        """Raise QueueFull if so many more requests of `submit` find no space to run or wait now.

        Raises UsageError if they never do, or if the runtime is closed.
        """
        self._check_open()
        self._thread.loop.scheduler.check_queue(count)

    def step_within(self, block: AbstractContextManager[object]) -> None:
        """Enter `block` for each step and the deliveries of its outputs, in the loop's thread, from now on.

        For several runtimes of one process that must not step at the same time.
        """
        self._check_open()
        with self._thread.paused():
            self._thread.within = block

    def warm(self, method: str | None = None) -> None:
        """Load everything that `method` needs. On a GPU, also run every shape of its steps once.

        Otherwise, the first request with that method does both. Raises UsageError, BundleError and BackendError, and
        UsageError while requests run.
        """
        self._check_open()
        with self._thread.paused() as idle:
            if not idle:
                raise UsageError("requests are running", "warm the runtime before the first request")
            self._thread.loop.scheduler.slots.clear()
            self.verifier.warm()
            self._speculation.create(SpeculationParams(method), False, pause=lambda: nullcontext(True))

    def forget(self, tenant: str) -> None:
        """Drop the outputs that methods keep for a tenant. Requests that end later are kept again.

        Raises UsageError for a key of another type.
        """
        check_tenant(tenant)
        self._check_open()
        with self._thread.paused():
            self._speculation.forget(tenant)

    def reload_drafters(self) -> tuple[str, ...]:
        """Read the bundle's drafters again from its folder, and return the ids of those that changed.

        Requests go on with the drafters that they have, and new ones get the new drafters. No text changes. The memory
        of an old drafter is given back when its last request has ended, with the next request or reload.
        Raises UsageError without a bundle and on a GPU, and BundleError and BackendError for a bundle that is damaged,
        or differs in more than drafters. Then all drafters stay as they are.
        """
        self._check_open()
        if self._bundle is None:
            raise UsageError("this runtime has no bundle to read drafters from")
        try:
            bundle = open_bundle(self._bundle.path)
            with self._thread.paused():
                changed = self._speculation.replace_drafters(bundle)
        except OSError as error:  # the files are exchanged at this moment
            raise BundleError(f"the bundle's files cannot be read: {error.strerror}") from error
        self._release_drafters()
        return changed

    def _release_drafters(self) -> None:
        """Close the replaced drafters that no request drafts with."""
        with self._thread.paused():
            scheduler = self._thread.loop.scheduler
            for drafter in self._speculation.release(scheduler.requests):
                scheduler.slots.forget_drafter(drafter)

    def forget_prefixes(self) -> None:
        """Drop the rows that are kept of earlier requests, so that the next ones compute all of theirs."""
        self._check_open()
        with self._thread.paused():
            self._thread.loop.scheduler.slots.clear()

    def encode(self, prompt: Prompt) -> list[int]:
        """Return the token ids of a prompt.

        Raises UsageError if the runtime is closed, or if the prompt is neither text nor ids. Raises UsageError for a
        prompt that is empty without a BOS token, fills the context, or has an id past the vocabulary.
        """
        self._check_open()
        return self._requests.encode(prompt)

    def _prepared(  # noqa: PLR0913 - the options of `generate` and `submit`
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams],
        speculation: str | SpeculationParams | Sequence[str | SpeculationParams] | None,
        forced: Acceptance | None = None, record_logit_margins: bool = False, trace: IO[str] | None = None,
        listener: Listener | None = None, written: Sequence[int] = (),
    ) -> list[Submission]:  # fmt: skip
        """Return submissions that have not begun. Raises UsageError, BundleError and BackendError."""
        self._check_open()
        given = parameters_of(params, speculation, len(prompts))
        requests = self.requests(prompts, given, forced, record_logit_margins, written)
        if trace is not None:
            writer = TraceWriter(trace, self.costs.table_ms(1))
            for request in requests:
                request.record = writer
        return [
            Submission(
                request, self.tokenizer,
                reader_of(self.tokenizer, request.tokens[: request.prompt_length], own),
                self._thread, forced is not None, listener,
            )
            for request, (own, _) in zip(requests, given, strict=True)
        ]  # fmt: skip

    def requests(
        self, prompts: Sequence[Prompt], given: Sequence[Parameters], forced: Acceptance | None = None,
        record_logit_margins: bool = False, written: Sequence[int] = (),
    ) -> list[Request]:  # fmt: skip
        """Return requests for a decode loop. Steps pause only while a drafter is opened or measured."""
        if self.verifier.cold and not self._thread.loop.scheduler.slots.used:
            with self._pause():
                pass
        if self._speculation.replaced:
            self._release_drafters()
        requests = self._requests.make(prompts, given, forced, record_logit_margins, self._pause, written)
        for request in requests:
            self._thread.loop.scheduler.check(request)
        return requests

    @contextmanager
    def _pause(self) -> Iterator[bool]:
        """Let no step run in the block, which may overwrite rows. Yields true if no request has a slot."""
        with self._thread.paused() as idle, self._thread.loop.scheduler.slots.preserved():
            if idle:
                self._thread.loop.scheduler.slots.clear()  # measuring overwrites rows of drafters, too
                self.verifier.warm()
            yield idle
