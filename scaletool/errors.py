"""Errors a user can act on. Each knows the exit status of DESIGN: 2 input, 3 run, 4 environment."""

from __future__ import annotations


class ScaletoolError(Exception):
    """Root of all expected errors; printed as message, place and hint, never as a traceback.

    `where` is the origin of the value ("run.yaml:12", "--set train.mode"), `hint` the way out.
    """

    exit_status = 1

    def __init__(self, message: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint

    def __str__(self) -> str:
        lines = [self.message]
        if self.where:
            lines.append(f"  at {self.where}")
        if self.hint:
            lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


class ConfigError(ScaletoolError):
    """The user's input or config is wrong; nothing was started."""

    exit_status = 2


class RunError(ScaletoolError):
    """A run failed or its measurement is not valid. `outcome` is the word kept in its record."""

    exit_status = 3

    def __init__(
        self, message: str, *, outcome: str = "crashed", where: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, where=where, hint=hint)
        self.outcome = outcome


class EnvironmentFault(ScaletoolError):
    """The machine lacks something that no config can give: a package, a GPU kernel, a port."""

    exit_status = 4
