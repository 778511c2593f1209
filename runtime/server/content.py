"""The content of an answer, without the white space around it that is the chat template's."""

from __future__ import annotations

from collections.abc import Callable


class ContentWriter:
    """Passes content on, without the white space around it that belongs to a template.

    It holds white space back until other text follows, and one newline in case a call follows.
    """

    def __init__(self, write: Callable[[str], None], newline: bool) -> None:
        """write: takes text that is final.   newline: True if the template puts a newline before a call."""
        self._write = write
        self._newline = newline
        self._held = ""
        self._begun = False  # there is other text than white space, after the last call
        self._strip = False  # a section or a call came before

    def write(self, text: str) -> None:
        """Add text."""
        text = self._held + text
        if not self._begun:
            self._begun = bool(text.strip())
            if not self._begun:
                self._held = text
                return
            if self._strip:
                text = text.lstrip("\n")
        self._held = "\n" if self._newline and text.endswith("\n") else ""
        if text := text.removesuffix(self._held):
            self._write(text)

    def after_section(self) -> None:
        """Leave out newlines that follow."""
        self._strip = True

    def before_call(self) -> None:
        """Leave out what is held back."""
        self._held, self._begun, self._strip = "", False, True

    def finish(self) -> None:
        """Add what is held back, unless it is white space after a section or a call."""
        if self._held and (self._begun or not self._strip):
            self._write(self._held)
