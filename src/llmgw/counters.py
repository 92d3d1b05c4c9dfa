"""Named numbers with bounded labels that any room may bump; what serves metrics renders them."""

from __future__ import annotations

# A label value that a client chooses (a path, a model that does not exist) must not grow memory: past this many
# combinations one more is counted under "other".
MAX_SERIES = 1_000


class Counter:
    """A number that only grows, one per combination of label values."""

    __slots__ = ("help", "labels", "name", "values")

    def __init__(self, name: str, help: str, labels: tuple[str, ...] = ()) -> None:
        self.name = name
        self.help = help
        self.labels = labels
        self.values: dict[tuple[str, ...], float] = {}

    def bump(self, *values: str, by: float = 1.0) -> None:
        """Add ``by`` under these label values, in the order of ``labels``."""
        self.add(values, by)

    def add(self, values: tuple[str, ...], by: float) -> None:
        """``bump`` for who has the values in a tuple."""
        known = self.values
        if values in known:
            known[values] += by
        elif len(known) < MAX_SERIES:
            known[values] = by
        else:
            other = ("other",) * len(self.labels)
            known[other] = known.get(other, 0.0) + by


class Counters:
    """All counters of one program, by name; declared once where they are bumped."""

    __slots__ = ("by_name",)

    def __init__(self) -> None:
        self.by_name: dict[str, Counter] = {}

    def counter(self, name: str, help: str, labels: tuple[str, ...] = ()) -> Counter:
        """The counter of that name, made at the first call."""
        found = self.by_name.get(name)
        if found is None:
            found = self.by_name[name] = Counter(name, help, labels)
        return found
