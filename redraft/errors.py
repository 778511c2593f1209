"""Errors that a user can fix: one line with what was expected, what was found, and a hint how to fix it."""

from __future__ import annotations


class RedraftError(Exception):
    """Base of every error that the command line prints as one line.

    `hint` is a command or an instruction; `exit_status` is 1 (it failed) or 2 (bad usage).
    """

    exit_status = 1

    def __init__(self, message: str, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}; {hint}")
        self.message = message
        self.hint = hint


class UsageError(RedraftError):
    """The request itself is wrong: an option, a path or a prompt."""

    exit_status = 2


class CheckpointError(RedraftError):
    """A Hugging Face checkpoint is missing, damaged or inconsistent."""


class DownloadError(CheckpointError):
    """A model cannot be downloaded from here; a model that is on the disk can still be used."""


class UnsupportedModelError(RedraftError):
    """An export would change the model; the message names the part that cannot be exported."""


class BackendError(RedraftError):
    """The library that runs engines is not installed, or cannot run the request."""


class BundleError(RedraftError):
    """An engine bundle is missing, damaged, of another version, or being built by another process."""


class DataError(RedraftError):
    """A corpus or a prompt file is empty, unreadable or of the wrong form."""


class TrainingError(RedraftError):
    """Training cannot continue: a NaN loss, a checkpoint of another configuration."""


class KernelError(RedraftError):
    """A library of GPU kernels is missing, of another version, or refused its arguments."""
