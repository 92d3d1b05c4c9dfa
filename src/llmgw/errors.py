"""The whole family of errors, by what happens next.

Expected outcomes are values (a rejection, a refusal, a loading state); these exceptions are for leaving.
The text of each says three things: what happened, where, and what to do about it.
"""

from __future__ import annotations

from dataclasses import dataclass


class LlmgwError(Exception):
    """The root: everything that llmgw itself raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class UsageError(LlmgwError):
    """The operator fixes a command: exit status 2."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One thing that is wrong in what an operator wrote: a dotted ``key``, and ``where``, as ``file:line:column``."""

    key: str
    message: str
    where: str = ""

    def __str__(self) -> str:
        place = f"{self.where} " if self.where else ""
        return f"{place}{self.key}: {self.message}" if self.key else f"{place}{self.message}"


class ConfigError(LlmgwError):
    """A configuration or definition can't be used; all its problems at once: exit status 2."""

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


class EngineFailed(LlmgwError):  # noqa: N818 - named by what happens next, like all of them
    """An engine process ended or never became ready; carries its cause, what to do about it, and its last lines."""

    def __init__(self, message: str, lines: tuple[str, ...] = (), *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.lines = lines
        self.remedy = remedy


class LinkLost(LlmgwError):  # noqa: N818
    """The other half of the program can't be reached any more."""


def only_ours(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error of ours inside, which is what a person is to read; else the group as it is."""
    found: list[BaseException] = []
    left: list[BaseException] = [group]
    while left:
        error = left.pop()
        if isinstance(error, BaseExceptionGroup):
            left.extend(error.exceptions)
        else:
            found.append(error)
    ours = [error for error in found if isinstance(error, LlmgwError)]
    return ours[0] if len(ours) == len(found) else group
