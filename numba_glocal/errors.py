"""One exception tree. Everything a user can cause is a `GlocalError`: one line, exit code 2, no traceback."""

from __future__ import annotations


class GlocalError(Exception):
    """A problem the user can act on; its text is one line that names the file, what was expected and what was found."""


def plural(count: int, word: str) -> str:
    """``1 particle``, ``2 particles``, ``2 boxes``."""
    ending = "" if count == 1 else "es" if word.endswith("x") else "s"
    return f"{count:,} {word}{ending}"


class InputError(GlocalError):
    """A file that is missing, unreadable, inconsistent or not understood."""


class ListError(InputError):
    """A particle list that cannot be read; the text names file and line."""


class VolumeError(InputError):
    """A volume that cannot be read or does not fit; the text names the file."""


class SettingsError(GlocalError):
    """An option, or a combination of options, that cannot be honoured."""


class DeviceError(GlocalError):
    """A GPU that was asked for and is missing, busy or not usable."""


class WorkerError(GlocalError):
    """A task that failed in a worker, or a chunk that has killed three workers; carries the worker's traceback.

    Parameters
    ----------
    message : str
        One line.
    traceback_text : str
        The traceback of the worker, for the log.
    """

    def __init__(self, message: str, traceback_text: str = "") -> None:
        super().__init__(message)
        self.traceback_text = traceback_text

    def __reduce__(self) -> tuple[type[WorkerError], tuple[str, str]]:
        return type(self), (str(self), self.traceback_text)


class BadParticleError(GlocalError):
    """One particle that is unreadable, constant or not finite; it is skipped, counted and listed.

    Parameters
    ----------
    name : str
        The particle as its list names it.
    reason : str
        What is wrong with it.
    """

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name = name
        self.reason = reason

    def __reduce__(self) -> tuple[type[BadParticleError], tuple[str, str]]:
        return type(self), (self.name, self.reason)


class WeightsLeftOutWarning(UserWarning):
    """A list that is written cannot hold the wedges or CTF of its particles."""


class NoAnglesWarning(UserWarning):
    """A list has no orientations; of no interest to a search that needs none."""
