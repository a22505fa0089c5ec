"""Every error a user of expunge can meet: one sentence that says what is wrong and what to do."""


class ExpungeError(Exception):
    """Base of all errors that expunge raises on purpose; the command line prints its one line."""


class RequestError(ExpungeError):
    """The request cannot be met as asked: an unknown client, foreign samples, a bad option."""


class DataError(ExpungeError):
    """A dataset is missing, corrupt or not usable (a NaN, no samples, the wrong shape)."""


class ModelError(ExpungeError):
    """A model or checkpoint does not fit: another architecture, a NaN in its weights."""


class NumericalError(ExpungeError):
    """A computation met numbers it cannot go on with, such as negative curvature at the first step."""


class SiteError(ExpungeError):
    """A site of a federation did not answer in time, speaks another version, or failed at its task."""
