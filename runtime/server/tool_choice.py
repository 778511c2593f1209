"""The tool calls that a request asks for: which functions, whether one must be called, and how many."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from redraft.runtime.server.errors import wrong
from redraft.runtime.server.fields import AllowedToolChoice, ChatRequest, FunctionDefinition, NamedTool


@dataclass(frozen=True)
class CallRules:
    """What the calls of an answer must be like.

    functions: those that may be called.   forced: True if the answer is calls alone, at least one.
    single:    True if there may be one call at most.
    """

    functions: tuple[FunctionDefinition, ...]
    forced: bool
    single: bool


def call_rules(request: ChatRequest) -> CallRules | None:
    """Return the rules that the answer to a request must obey; None if the model is free, or may call nothing.

    Raises ApiError for a choice without tools, for one that names another function, and for two of one name.
    """
    choice = request.tool_choice or "auto"
    if choice == "none" or (choice == "auto" and not request.tools):
        return None
    if not request.tools:
        raise wrong("tool_choice needs tools", "tool_choice")
    all_functions = [tool.function for tool in request.tools]
    functions = {function.name: function for function in all_functions}
    forced, single = choice == "required", request.parallel_tool_calls is False
    if isinstance(choice, NamedTool):
        functions = _chosen(functions, [choice])
        forced = single = True
    elif isinstance(choice, AllowedToolChoice):
        functions = _chosen(functions, choice.allowed_tools.tools)
        forced = choice.allowed_tools.mode == "required"
    elif not forced and not single and not any(function.strict for function in all_functions):
        return None
    if len({function.name for function in all_functions}) < len(all_functions):
        raise wrong("two functions have the same name", "tools")
    return CallRules(tuple(functions.values()), forced, single)


def _chosen(functions: dict[str, FunctionDefinition], tools: Iterable[NamedTool]) -> dict[str, FunctionDefinition]:
    """Return the functions that a choice names."""
    names = [tool.function.name for tool in tools]
    if unknown := [name for name in names if name not in functions]:
        raise wrong(f"tool_choice names the function {unknown[0]!r}, which is not in tools", "tool_choice")
    return {name: functions[name] for name in names}
