"""One shape of error for people: what is wrong, where, what was expected, what to do.

Errors of these classes are what a user did or has; the command line prints them without a traceback.
They travel between Ray processes, so they pickle with all their parts. They reach terminals, logs and files
that others read, so passwords in addresses are hidden.
"""

from raytrec.redact import hide


class RaytrecError(Exception):
    """What went wrong, in parts that can be shown one under the other.

    Args:
        what: one sentence that says what is wrong, with the value received.
        where: the file, row group, column, table, rank or config key.
        expected: what would have been right.
        do: what the user can do about it.
    """

    def __init__(
        self, what: str, *, where: str | None = None, expected: str | None = None, do: str | None = None
    ):
        self.what = hide(str(what))
        self.where, self.expected, self.do = (part and hide(str(part)) for part in (where, expected, do))
        super().__init__(str(self))

    def __str__(self) -> str:
        parts = [self.what]
        for label in ("where", "expected", "do"):
            if value := getattr(self, label):
                parts.append(f"  {label + ':':<10}{value}")
        return "\n".join(parts)

    @property
    def parts(self) -> dict[str, str | None]:
        """All parts by name: the arguments of an equal error."""
        return {name: getattr(self, name) for name in ("what", "where", "expected", "do")}

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows of it: as on the command line, no traceback."""
        return [f"error: {self}"]

    def __reduce__(self):
        return _rebuild, (type(self), self.what, self.where, self.expected, self.do)


def _rebuild(cls, what, where, expected, do):
    return cls(what, where=where, expected=expected, do=do)


class ConfigError(RaytrecError):
    """A configuration file, an override or a combination of keys is wrong."""


class SchemaError(RaytrecError):
    """schema.yaml is wrong in itself."""


class DataError(RaytrecError):
    """Data does not hold what the schema says, or cannot be read."""


class RunError(RaytrecError):
    """A run could not start, went wrong, or cannot be loaded."""


def did_you_mean(word: str, known: list[str]) -> str | None:
    """The known word nearest to a misspelt one, or None when nothing is near."""
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return near[0] if near else None


def root_cause(error: BaseException) -> BaseException:
    """The RaytrecError inside wrappers (Ray's task and training errors), or the error itself.

    Ray wraps what a worker raised in several layers: `cause` (RayTaskError), `worker_failures`
    (TrainingFailedError), `__cause__` and `__context__`.
    """
    seen: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop(0)
        if id(current) in seen:
            continue
        seen.add(id(current))
        # Ray's wrapper is of the wrapped error's class, too, and says where in Ray it has been.
        wrapped = isinstance(getattr(current, "cause", None), BaseException)
        if isinstance(current, RaytrecError) and not wrapped:
            return current
        inner = [getattr(current, name, None) for name in ("cause", "__cause__", "__context__")]
        for name in ("worker_failures", "failures"):  # Ray's training errors, torch's CheckpointException
            if isinstance(failures := getattr(current, name, None), dict):
                inner += [f[0] if isinstance(f, tuple) else f for f in failures.values()]
        queue += [e for e in inner if isinstance(e, BaseException)]
    return error
