"""The factory of speculations: it gives each request its drafter and controller, and opens drafters on first use."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

from redraft import names
from redraft.engines import Bundle, check_tree
from redraft.engines.host_device import HostDevice
from redraft.engines.rebuilds import changed_drafters
from redraft.errors import UsageError
from redraft.lru import LruCache
from redraft.methods import LOOKUPS, NONE, UNBUILT, find_method
from redraft.runtime.controllers.adaptive import Adaptive
from redraft.runtime.controllers.base import Controller, FixedBudget
from redraft.runtime.controllers.cost import VerifyCosts
from redraft.runtime.controllers.experience import Gain
from redraft.runtime.controllers.length import LengthController
from redraft.runtime.controllers.rules import LengthRule
from redraft.runtime.drafters import Drafter, default_word, load_drafter, method_words, pair, split_pair
from redraft.runtime.drafters.base import Pair
from redraft.runtime.drafters.chain_lookups import ForcedDrafter, PredictionDrafter
from redraft.runtime.drafters.engine import EngineDrafter
from redraft.runtime.drafters.none import NoDrafter
from redraft.runtime.drafters.synthetic import Acceptance, SyntheticDrafter
from redraft.runtime.params import SpeculationParams
from redraft.runtime.requests.request import Request, as_redraft_error
from redraft.runtime.steps.exactness import settle_exactness
from redraft.runtime.steps.measurements import Identity, cached_costs
from redraft.runtime.steps.verifier import Verifier
from redraft.runtime.trees.offers import Speculation
from redraft.types import NO_SPECULATION, Budget

Pause = Callable[[], AbstractContextManager[bool]]
"""Returns a block in which no step runs, and rows may be overwritten. Its value is true if no request has a slot."""
_MOST_CONTROLLERS = 256
_ANY = Budget(nodes=sys.maxsize, depth=sys.maxsize, width=sys.maxsize)


def check_options(options: Mapping[str, Mapping[str, Any]], bundle: Bundle) -> None:
    """Raise UsageError for options that a drafter refuses, or of a drafter that the bundle lacks."""
    known = {name: name for name in (NONE, *UNBUILT)}
    known |= {name: drafter.method for name, drafter in bundle.manifest.drafters.items()}
    for name, values in options.items():
        if name not in known:
            raise UsageError(
                f"this bundle has no drafter {name!r} to give options", f"choose one of {', '.join(known)}"
            )
        find_method(known[name]).parse_options(values)


class SpeculationFactory:
    """Creates the speculation of requests, and holds the drafters and controllers that they share."""

    def __init__(
        self, verifier: Verifier, costs: VerifyCosts, options: Mapping[str, Mapping[str, Any]], bundle: Bundle | None,
        identity: Identity, exact: bool,
    ) -> None:  # fmt: skip
        """options: of drafters, by id.   exact: whether texts must be the same to the bit in every batch."""
        self._verifier = verifier
        self._costs = costs
        self._options = options
        self._bundle = bundle
        self._identity = identity
        self._exact = exact
        self._drafters: dict[str, Drafter] = {}
        self._adaptive = Adaptive(costs)
        self._expected: set[str] = set()
        self._controllers: LruCache[LengthRule | Budget, Controller] = LruCache(_MOST_CONTROLLERS)
        self._lock = threading.RLock()
        self.replaced: list[Drafter] = []
        """Drafters that requests may still use, although new ones do not get them."""
        self.plain = Speculation(NoDrafter(verifier), FixedBudget(NO_SPECULATION), NONE)
        """How a request decodes without drafts."""

    @property
    def default_method(self) -> str:
        """The default method: n-gram lookup with the bundle's first drafter, else lookup alone."""
        return default_word(self._built)

    @property
    def methods(self) -> tuple[str, ...]:
        """All values of `method` that the bundle supports."""
        return method_words(self._built)

    @property
    def _built(self) -> tuple[str, ...]:
        return tuple(self._bundle.manifest.drafters) if self._bundle is not None else ()

    @property
    def gain(self) -> Gain:
        """The measured gain of the requests whose controller adapts."""
        return self._adaptive.gain

    def close(self) -> None:
        """Release the drafters. Closing again does nothing."""
        self._drafters.clear()
        self.replaced.clear()
        for name in ("predicted", "forced", "plain", "_verifier"):
            self.__dict__.pop(name, None)

    def forget(self, tenant: str) -> None:
        """Drop the outputs that methods keep for a tenant."""
        with self._lock:
            for drafter in self._drafters.values():
                drafter.forget(tenant)

    def replace_drafters(self, bundle: Bundle) -> tuple[str, ...]:
        """Use the drafters of another build of the bundle, and return the ids of those that changed. No step may run.

        Requests go on with the drafters that they have, which `release` closes. Raises BundleError, BackendError and
        UsageError, and then changes nothing.
        """
        with self._lock:
            opened, device = self._bundle, self._verifier.device
            if opened is None or not isinstance(device, HostDevice) or device.step_graphs:
                raise UsageError("only drafters of a bundle on the host can be replaced", "open the bundle again")
            changed = changed_drafters(opened, bundle)
            check_options({name: self._options[name] for name in changed if name in self._options}, bundle)
            open_now = [name for name in changed if name in self._drafters and name in bundle.manifest.drafters]
            device.bundle = bundle
            new: dict[str, Drafter] = {}
            try:
                for name in open_now:
                    new[name] = load_drafter(name, self._verifier, self._options.get(name), bundle)
            except Exception as error:  # engines and damaged files raise anything
                device.bundle = opened
                for drafter in new.values():
                    drafter.close()
                raise as_redraft_error(error, "the new drafters do not open") from error
            self._bundle = bundle
            for name in changed:
                self._forget(name)
            self._drafters |= new
            return changed

    def _forget(self, name: str) -> None:
        """Let no new request draft with a drafter, nor with what its name has taught."""
        self.replaced += [self._drafters.pop(name)] if name in self._drafters else []
        for lookup in LOOKUPS:
            self._drafters.pop(pair(name, lookup), None)
        self._expected.discard(name)
        self._adaptive.forget(name)

    def release(self, requests: Iterable[Request]) -> list[Drafter]:
        """Close the replaced drafters that none of these requests drafts with, and return them. No step may run."""
        with self._lock:
            used = {part for request in requests for part in request.speculation.drafter.parts}
            unused = [drafter for drafter in self.replaced if drafter not in used]
            for drafter in unused:
                self.replaced.remove(drafter)
                drafter.close()
            return unused

    def create(
        self, asked: SpeculationParams, constrained: bool, forced: Acceptance | None = None,
        pause: Pause = lambda: nullcontext(False),
    ) -> Speculation:  # fmt: skip
        """Return how requests with these parameters speculate. Raises UsageError, BundleError and BackendError.

        constrained: whether their texts must match a grammar, whose forced tokens are then drafted.
        pause: the block in which an engine is opened, and calls of a drafter are timed for the first time. If a request
            has a slot, they are not timed: costs that no file has are then learned from the requests' calls alone.
        """
        with self._lock, suppress(_PauseNeeded):
            return self._created(asked, constrained, forced, None)
        with pause() as idle, self._lock:  # in this order: a callback of the loop creates too, and nothing steps then
            return self._created(asked, constrained, forced, idle)

    def _created(  # noqa: C901, PLR0912 - one branch for each kind of method and controller
        self, asked: SpeculationParams, constrained: bool, forced: Acceptance | None, idle: bool | None
    ) -> Speculation:
        """Return what `create` does.   idle: as `Pause` yields; None if steps run. Raises _PauseNeeded in that case."""
        word, budget = asked.method or self.default_method, asked.budget
        self._check_budget(budget)
        name, lookup = split_pair(word)
        if idle is None and name in self._built and name not in self._drafters:
            raise _PauseNeeded
        drafter = self.drafter(name)
        if lookup and not drafter.has_engines:
            raise UsageError(f"this bundle has no method {word!r}", f"choose one of {', '.join(self.methods)}")
        if word == NONE:
            for given, what in ((asked.prediction, "prediction"), (asked.tenant, "tenant")):
                if given is not None:
                    raise UsageError(f"plain decoding takes no {what}", f"choose a method, or leave the {what} out")
            return Speculation(drafter, FixedBudget(NO_SPECULATION), word)
        wide = drafter.has_engines or (drafter.branches if budget is None else budget.width > 1)
        if wide and not self._verifier.branches:
            if idle is None:
                raise _PauseNeeded
            self._verifier.take_branches()
            if self._exact:
                settle_exactness(self._verifier, self._identity)
        most = budget or _ANY
        if self._verifier.steps.prefers_chains and not wide:
            most = replace(most, width=1)
        if forced is not None:
            drafter = SyntheticDrafter(self._verifier, forced)
        elif lookup and asked.adapts:
            drafter = self._paired(lookup, drafter)
        if asked.tenant is not None:
            drafter.check_tenant()
            word = f"{word} with earlier outputs"
        if asked.prediction is not None:
            drafter = Pair(self.predicted, drafter)
            word = f"{word}+prediction"
        if constrained:
            drafter = Pair(self.forced, drafter)
            word = f"{word}+constraint"
        if not asked.adapts:
            return Speculation(drafter, self._controller(asked), word, most)
        if budget is not None:
            word = f"{word} {budget.nodes},{budget.depth},{budget.width}"
        if forced is not None:
            return Speculation(drafter, Adaptive(self._costs), word, most)
        self._expect_costs(name, idle)
        return Speculation(drafter, self._adaptive, word, most)

    def drafter(self, name: str) -> Drafter:
        """Return the drafter with this id, or of this method. Raises UsageError, BundleError and BackendError."""
        if name not in self._drafters:
            options = self._options.get(name)
            self._drafters[name] = load_drafter(name, self._verifier, options, self._bundle)
        return self._drafters[name]

    @cached_property
    def predicted(self) -> PredictionDrafter:
        """The drafter of predicted outputs."""
        return PredictionDrafter(self._verifier)

    @cached_property
    def forced(self) -> ForcedDrafter:
        """The drafter of tokens that constraints force."""
        return ForcedDrafter(self._verifier)

    def _controller(self, asked: SpeculationParams) -> Controller:
        """Return the controller that does not weigh costs. Requests with equal settings share it in a batch."""
        size = asked.rule or asked.budget
        assert size is not None
        return self._controllers.get(
            size, lambda: FixedBudget(size) if isinstance(size, Budget) else LengthController(size)
        )

    def _check_budget(self, budget: Budget | None) -> None:
        """Raise UsageError for trees that the device cannot verify."""
        check_tree(self._verifier.largest_tree, 1 + (budget.nodes if budget else 0))
        if budget and self._verifier.device.step_graphs and min(budget.depth, budget.nodes) > names.MOST_DEPTH:
            raise UsageError(
                f"trees of depth {min(budget.depth, budget.nodes)} cannot be verified on a device, at most "
                f"{names.MOST_DEPTH} can",
                "lower the budget's depth",
            )

    def _paired(self, lookup: str, drafter: Drafter) -> Drafter:
        """Return a lookup and a drafter as one drafter."""
        word = pair(drafter.name, lookup)
        if word not in self._drafters:
            self._drafters[word] = Pair(self.drafter(lookup), drafter)
        return self._drafters[word]

    def _expect_costs(self, name: str, idle: bool | None) -> None:
        """Give the controller the costs of a drafter's calls when they are first needed."""
        drafter = self._drafters[name]
        if name in self._expected or not isinstance(drafter, EngineDrafter):
            return
        if idle is None:
            raise _PauseNeeded
        self._expected.add(name)
        assert self._bundle is not None
        identity = {**self._identity, "build": self._bundle.manifest.build_key, "method": name}
        costs = cached_costs(self._verifier, drafter, identity, idle)
        if costs is not None:
            self._adaptive.expect(name, costs)


class _PauseNeeded(Exception):
    """Something has to be opened or measured, while steps may run."""
