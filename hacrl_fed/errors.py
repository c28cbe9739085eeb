"""The errors that end a command, each with its exit code."""


class HacrlFedError(Exception):
    """An error whose message is one sentence for the user: what is wrong and how to mend it."""

    exit_code = 1


class UserError(HacrlFedError):
    """The user's mistake, found on this side."""

    exit_code = 2


class RefusedError(HacrlFedError):
    """The other side refused, and trying again would not help."""

    exit_code = 3


class UnreachableError(HacrlFedError):
    """The other side could not be reached within the stated time."""

    exit_code = 1


class InterruptedRunError(HacrlFedError):
    """The user interrupted a run (Ctrl-C); the same command resumes it."""

    exit_code = 130
