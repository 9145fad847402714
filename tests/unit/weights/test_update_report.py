"""Seconds of an update: the phases of the slowest server, and how long one was paused."""

import pytest

from pipelinerl.weights.report import ServerUpdate, UpdateReport


def report(
    *servers: dict[str, float], failed: dict[str, str] | None = None, recovered: str | None = None
) -> UpdateReport:
    updates = [ServerUpdate(f"s{number}", seconds, recovered) for number, seconds in enumerate(servers)]
    return UpdateReport(1, updates, failed or {}, total_s=0.5)


def test_a_server_is_paused_in_its_own_phases() -> None:
    seconds = report({"pause": 0.01, "transfer": 0.2, "resume": 0.01}, {"pause": 0.1, "transfer": 0.05}).seconds
    # 0.22 and 0.15: not 0.1 + 0.2 + 0.01, which no server was paused.
    assert seconds["paused"] == pytest.approx(0.22)
    assert (seconds["pause"], seconds["transfer"], seconds["total"]) == (0.1, 0.2, 0.5)


@pytest.mark.parametrize("how", ["recovered", "failed"])
def test_after_a_failed_attempt_the_whole_call_counts(how: str) -> None:
    phases = {"pause": 0.01, "transfer": 0.2}
    found = report(phases, recovered="first error") if how == "recovered" else report(phases, failed={"s1": "gone"})
    assert found.seconds["paused"] == 0.5


def test_no_server_was_paused_where_there_is_none() -> None:
    assert report().seconds["paused"] == 0.0
