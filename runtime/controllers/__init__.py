"""Controllers by name: `adaptive` weighs costs, the others are rules for the length of drafts."""

from __future__ import annotations

from collections.abc import Mapping

from redraft.errors import UsageError
from redraft.records import from_plain
from redraft.runtime.controllers.rules import Confidence, GammaTune, GammaTunePlus, Heuristic, LengthRule, Svip

ADAPTIVE, FIXED = "adaptive", "fixed"
RULES: Mapping[str, type[LengthRule]] = {
    FIXED: LengthRule,
    "gammatune": GammaTune,
    "gammatune+": GammaTunePlus,
    "heuristic": Heuristic,
    "confidence": Confidence,
    "svip": Svip,
}
CONTROLLERS = (ADAPTIVE, *RULES)
FORM = "NAME[,option=value…], for example gammatune+,eta=0.5,threshold=0.3"


def parse_controller(text: str) -> tuple[str, LengthRule | None]:
    """Return a controller's name and its rule, from text such as `gammatune,delta=1`.

    The rule is None for `adaptive`, and for `fixed` without options, whose size is the request's budget. Raises
    UsageError for an unknown name or option, and for a value that the rule refuses.
    """
    name, *options = (part.strip() for part in text.split(","))
    if name not in CONTROLLERS:
        raise UsageError(f"unknown controller {name!r}", f"choose one of {', '.join(CONTROLLERS)}")
    values = {}
    for option in options:
        key, equals, value = option.partition("=")
        if not (key and equals and value):
            raise UsageError(f"controller {text!r}: expected option=value, not {option!r}", f"the form is {FORM}")
        if key in values:
            raise UsageError(f"controller {text!r}: {key} is given twice", "leave one out")
        values[key] = _number(value, text)
    if name == ADAPTIVE:
        if values:
            raise UsageError(f"controller {text!r}: {ADAPTIVE} has no options", "leave them out")
        return name, None
    if name == FIXED and not values:
        return name, None
    return name, from_plain(RULES[name], values, f"controller {name}")


def split_controllers(text: str) -> list[str]:
    """Return the controllers of a list such as `adaptive,gammatune,delta=1,heuristic`: options follow their name."""
    found: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if "=" in part and found:
            found[-1] += f",{part}"
        else:
            found.append(part)
    return found


def _number(value: str, text: str) -> int | float:
    """Return the number that an option's value is. Raises UsageError for other text."""
    for kind in (int, float):
        try:
            return kind(value)
        except ValueError:
            continue
    raise UsageError(f"controller {text!r}: expected a number, not {value!r}", f"the form is {FORM}")
