"""A run goes on with the Redis server that holds its records, whichever way that was named."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.config.resources import RedisStreams
from pipelinerl.errors import ConfigError
from pipelinerl.rundir.layout import RunDir
from pipelinerl.streams.redis import RedisBackend
from pipelinerl.streams.redis_server import REDIS_URL_KEY, check_place, remember_place

URL = "redis://:secret@h:6379/0"


def test_the_place_is_kept_without_its_password(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    for url in (None, URL):
        check_place(run_dir, url)
    remember_place(run_dir, URL)
    check_place(run_dir, "redis://:another-secret@h:6379/0")
    assert not [file for file in tmp_path.rglob("*") if file.is_file() and "secret" in file.read_text()]
    with pytest.raises(ConfigError, match=r"the run's own server.*redis://h:6379/0, which.*PIPELINERL_REDIS_URL"):
        check_place(run_dir, None)
    with pytest.raises(ConfigError, match="redis://i:6379/0"):
        check_place(run_dir, "redis://i:6379/0")


def test_another_data_base_of_the_same_server_is_another_place(tmp_path: Path) -> None:
    remember_place(RunDir(tmp_path), "redis://h:6379?db=1&password=secret")
    check_place(RunDir(tmp_path), "redis://h:6379?password=another&db=1")
    for url in ("redis://h:6379?db=2", "redis://h:6379"):
        with pytest.raises(ConfigError, match="db=1, which holds the records"):
            check_place(RunDir(tmp_path), url)


def test_a_run_with_a_server_of_its_own_keeps_it(tmp_path: Path) -> None:
    remember_place(RunDir(tmp_path), None)
    check_place(RunDir(tmp_path), None)
    with pytest.raises(ConfigError, match="Unset PIPELINERL_REDIS_URL"):
        check_place(RunDir(tmp_path), URL)


def test_a_start_uses_the_named_server_and_refuses_another_one_later(tmp_path: Path) -> None:
    config, run_dir = RedisStreams(backend="redis"), RunDir(tmp_path)
    with RedisBackend.serve(config, run_dir, {REDIS_URL_KEY: URL}) as environ:
        assert environ == {REDIS_URL_KEY: URL}
    with pytest.raises(ConfigError, match="holds the records"):
        RedisBackend.serve(config, run_dir, {})
