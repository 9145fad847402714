"""Which measurement starts when and on which GPUs. Pure: a list, cards and a time in, starts out.

The list's order counts. A measurement that has to wait for cards gets a reservation at the time when they are expected
to be free; a later one may overtake it only on other cards, or if it is expected to end before (EASY backfilling:
D. Lifka, "The ANL/IBM SP scheduling system", 1995).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: Measurements that give no times (`alone=False`) and share a card with others of their kind: at most so many.
SHARERS = 4


@dataclass(frozen=True)
class Until:
    """A run that may end early: when the last `times` rows with `key` have at least `at_least`."""

    file: str
    key: str
    at_least: float
    times: int = 1


@dataclass(frozen=True)
class Measurement:
    """One command on some GPUs of the host.

    Attributes:
        group: a word by which several are chosen at once.
        expected_s: how long it should take, its start included. It is not started if less time is left.
        limit_s: when it is ended.
        kind: how its results look: `run`, `schedules`, `server`, `splits` or `tests`.
        command: `{python}`, `{model}` and `{work}` are filled in.
        alone: its times count, so nothing else may use its cards.
    """

    name: str
    group: str
    what: str
    gpus: int
    expected_s: float
    limit_s: float
    kind: str
    command: tuple[str, ...]
    alone: bool = True
    until: Until | None = None


@dataclass(frozen=True)
class Running:
    """A measurement that has begun, `start_s` seconds behind the beginning of all."""

    measurement: Measurement
    cards: tuple[str, ...]
    start_s: float

    def end_s(self, now_s: float) -> float:
        """When it is expected to end; one that takes longer than expected may use all of its limit."""
        expected_s = self.start_s + self.measurement.expected_s
        return expected_s if expected_s > now_s else max(now_s, self.start_s + self.measurement.limit_s)


@dataclass(frozen=True)
class _Reservation:
    time_s: float
    cards: frozenset[str]


def starts(
    waiting: Sequence[Measurement], running: Sequence[Running], cards: Sequence[str], now_s: float, end_s: float
) -> list[tuple[Measurement, tuple[str, ...]]]:
    """What to start at `now_s`, with its cards, in the list's order; nothing that should last beyond `end_s`."""
    busy = list(running)
    reserved: _Reservation | None = None
    found = []
    for measurement in waiting:
        if measurement.gpus > len(cards) or now_s + measurement.expected_s > end_s:
            continue
        free_s = {card: _free_from(card, measurement, busy, now_s) for card in cards}
        usable = [card for card in cards if free_s[card] <= now_s]
        if reserved is not None and now_s + measurement.expected_s > reserved.time_s:
            usable = [card for card in usable if card not in reserved.cards]
        if len(usable) >= measurement.gpus:
            # Those that fewest share; the sort keeps their order.
            usable.sort(key=lambda card: sum(card in other.cards for other in busy))
            chosen = tuple(sorted(usable[: measurement.gpus], key=cards.index))
            found.append((measurement, chosen))
            busy.append(Running(measurement, chosen, now_s))
        elif reserved is None:
            time_s = sorted(free_s.values())[measurement.gpus - 1]
            if time_s + measurement.expected_s <= end_s:
                # Of the cards that are free then, those that are free last: others may be used meanwhile.
                by_then = [card for card in cards if free_s[card] <= time_s]
                by_then.sort(key=lambda card: -free_s[card])
                reserved = _Reservation(time_s, frozenset(by_then[: measurement.gpus]))
    return found


def plan(measurements: Sequence[Measurement], cards: Sequence[str], end_s: float) -> list[Running]:
    """When each would start if all took as long as expected; those that do not fit are not in it."""
    waiting, running, planned, now_s = list(measurements), [], [], 0.0
    while True:
        for measurement, chosen in starts(waiting, running, cards, now_s, end_s):
            waiting.remove(measurement)
            running.append(Running(measurement, chosen, now_s))
            planned.append(running[-1])
        if not running:
            return planned
        now_s = min(job.start_s + job.measurement.expected_s for job in running)
        running = [job for job in running if job.start_s + job.measurement.expected_s > now_s]


def chosen(measurements: Sequence[Measurement], only: Sequence[str], skip: Sequence[str]) -> list[Measurement]:
    """Those whose name or group is in `only` (empty: all), in its order, without those in `skip`.

    Raises:
        ValueError: a word is neither a name nor a group.
    """
    known = {word for measurement in measurements for word in (measurement.name, measurement.group)}
    if unknown := [word for word in (*only, *skip) if word not in known]:
        raise ValueError(f"got {', '.join(unknown)}, expected names or groups: {', '.join(sorted(known))}")
    found: list[Measurement] = []
    for word in only or [None]:
        found += [
            measurement
            for measurement in measurements
            if measurement not in found
            and (word is None or word in (measurement.name, measurement.group))
            and not {measurement.name, measurement.group} & set(skip)
        ]
    return found


def _free_from(card: str, measurement: Measurement, busy: Sequence[Running], now_s: float) -> float:
    """From when on a card has room for a measurement."""
    here = [job for job in busy if card in job.cards]
    ends = sorted(job.end_s(now_s) for job in here)
    if not here:
        return now_s
    if measurement.alone or any(job.measurement.alone for job in here):
        return ends[-1]
    return now_s if len(here) < SHARERS else ends[-SHARERS]
