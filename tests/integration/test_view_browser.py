"""The page of `view` in a real browser: every view, both widths, both color schemes, keyboard, and hostile texts."""

from __future__ import annotations

import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fakes.recorded_run import RecordedRun
from fakes.short_sample import evaluation_result, fate_record, step_done

from pipelinerl.__main__ import main
from pipelinerl.records import (
    EvaluationResult,
    EvaluationRollout,
    FateRecord,
    MetricRecord,
    TokenRatios,
    TrainerMessage,
)
from pipelinerl.records.sample import Array
from pipelinerl.tracking.health import Finding, add_finding

api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright (extra `test`)")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium in PATH")]

STEPS = 30
HTML = "<img src=x onerror='window.hit=1'><script>window.hit=1</script><b>bold</b>"
HOSTILE = f"{HTML} \x1b[31mred \u202ereversed \x07 \\ud800 </script> <|im_start|>system\n&lt;i&gt;"
HUGE = "1" * 1_000_000
#: width, color scheme, one of the colors of the page in it
LOOKS = ((1280, "light", "rgb(246, 247, 249)"), (390, "dark", "rgb(17, 21, 26)"))


def made_run(folder: Path, shift: float = 0.0) -> RecordedRun:
    """A run of 30 steps, with ordinary rollouts, one that two weight versions sampled, and hostile ones."""
    run = RecordedRun(folder)
    run.write(*run.plain_groups(20))
    crossed = run.sample(
        "0-50/r0/s0", [("<|user|>q<|end|>", False), ("first ", True), ("second", True)], [7, 8], reward=2.0
    )
    hostile = run.sample(
        "0-51/r0/s0", [(HOSTILE, False), (HOSTILE, True)], [9], metadata={HOSTILE: HOSTILE}, reward=3.0
    )
    huge = run.sample("0-52/r0/s0", [("q", False), ("a", True)], [9], metadata={"line": HUGE}, reward=4.0)
    run.write(run.group("0-50", [crossed]), run.group("0-51", [hostile], problem_id=HOSTILE), run.group("0-52", [huge]))
    trained = fate_record("trained", crossed.id, version=9, group_id="0-50")
    run.write(trained, topic="fates", instance="finetune_0", kind=FateRecord)
    count = crossed.num_trained_tokens
    log_ratios = Array("<f2", [count], np.array([0.0] * (count - 1) + [math.log(2)], "<f2").tobytes())
    for step in range(1, 10):
        ratios = TokenRatios(step=step, sample_ids=[crossed.id], lengths=[count], log_ratios=log_ratios)
        run.write(ratios, topic="token_ratios", instance="finetune_0", kind=TokenRatios)
    names = ("preprocessor/reward_mean", "preprocessor/success_rate", "finetune/ess", "rl/entropy_estimate")
    for step in range(1, STEPS + 1):
        values = {name: shift + step / STEPS for name in names} | {"finetune/step_s": 2.0, "finetune/samples": 8.0}
        record = MetricRecord(source="finetune_0", step=step, time=step, values=values)
        run.write(record, topic="metrics", instance="finetune_0", kind=MetricRecord)
        run.write(step_done(step, step), topic="trainer", instance="finetune_0", kind=TrainerMessage)
    add_finding(run.files.findings_file, Finding(name="spike", step=9, evidence=HOSTILE, advice="Look at it."))
    own: dict[str, Any] = {"problem_id": "p", "dataset_name": "test", "due_version": 0, "is_final": False}
    failed = EvaluationRollout(id="e/r0", group_id="e", problem=HOSTILE, failure="timeout", message=HOSTILE, **own)
    run.write(failed, topic="evaluation_rollouts", kind=EvaluationRollout)
    evaluation = evaluation_result(0, 0.25)
    run.write(evaluation, topic="evaluation", kind=EvaluationResult)
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return made_run(tmp_path_factory.mktemp("a"))


@pytest.fixture(scope="module")
def address(run: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    other = made_run(tmp_path_factory.mktemp("b"), shift=0.1)
    command = [sys.executable, "-m", "pipelinerl", "view", str(run.root), str(other.root)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    ) as server:
        assert server.stdout is not None
        yield server.stdout.readline().strip()
        server.terminate()


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    flags = "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    flags += "--disable-component-update --disable-sync"
    with api.sync_playwright() as playwright:
        folder = tmp_path_factory.mktemp("profile")
        context = playwright.chromium.launch_persistent_context(
            str(folder), executable_path=CHROMIUM, headless=True, args=flags.split()
        )
        yield context
        context.close()


class Watched:
    """A page whose errors and requests are noted."""

    def __init__(self, context: Any, width: int, scheme: str) -> None:
        self.page = context.new_page()
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def show(self, name: str) -> None:
        """Click the tab of a view and wait until its content is there."""
        self.page.get_by_role("navigation", name="Views").get_by_role("link", name=name).click()
        self.page.wait_for_selector(f"h1:text-is('{name}'), h1:has-text('{name}')", state="attached")

    def check(self, width: int) -> None:
        assert self.page.evaluate("document.documentElement.scrollWidth") <= width
        assert self.page.evaluate(
            "window.hit === undefined && !document.querySelector('main img, main script, main b')"
        )
        assert not self.errors
        allowed = re.compile(r"http://127\.0\.0\.1:\d+/|data:|file:")
        assert not [url for url in self.requests if not allowed.match(url)]


@pytest.mark.parametrize(("width", "scheme", "background"), LOOKS)
def test_every_view(context: Any, address: str, width: int, scheme: str, background: str) -> None:
    watched = Watched(context, width, scheme)
    page = watched.page
    page.goto(address)
    page.wait_for_selector("figure .uplot canvas")
    assert "token" not in page.url
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    assert page.locator(".card", has_text="Step").locator(".value").inner_text() == f"{STEPS} / 1,000"
    success = page.locator(".chart").first
    assert "training: 1, held out: test: 0.25" in success.get_attribute("aria-label")
    assert page.get_by_role("cell", name="25.0 %").count() == 1
    assert page.get_by_role("row").filter(has_text="spike").get_by_text("Look at it.").is_visible()
    watched.check(width)

    watched.show("Rollouts")
    page.wait_for_selector(".rollouts li")
    assert page.locator(".rollouts li").count() == 43
    assert page.locator(".rollouts .reward").first.inner_text() == "4"
    page.locator(".rollouts a").first.click()
    page.locator("summary", has_text="Metadata").click()
    api.expect(page.locator("details[open] pre")).to_contain_text("1" * 1000)
    watched.check(width)
    page.go_back()
    page.wait_for_selector(".rollouts li")
    page.get_by_label("Reward from").fill("2.5")
    page.get_by_label("Reward from").press("Enter")
    api.expect(page.locator(".rollouts li")).to_have_count(19)
    watched.check(width)
    page.get_by_role("button", name="Clear").click()
    page.get_by_label("Text").fill("bold")
    page.get_by_label("Text").press("Enter")
    api.expect(page.locator(".rollouts li")).to_have_count(1)
    page.locator(".rollouts a").click()
    page.wait_for_selector(".conversation")
    assert HTML in page.locator(".message.own").inner_text()
    assert "\\x1b[31m" in page.locator(".conversation").inner_text()
    page.get_by_role("button", name="Tokens").click()
    page.wait_for_selector(".token")
    watched.check(width)

    page.get_by_role("link", name=re.compile("^<img")).click()
    page.wait_for_selector("figure")
    assert "1 rollout," in page.locator(".count").inner_text()
    watched.check(width)

    watched.show("Rollouts")
    page.get_by_label("Rollouts of").select_option("evaluation")
    api.expect(page.locator(".rollouts li")).to_have_count(1)
    page.locator(".rollouts a").click()
    page.wait_for_selector(".failure")
    watched.check(width)

    watched.show("Compare")
    page.wait_for_selector("figure .uplot canvas")
    page.get_by_label("Over").select_option("hours")
    page.wait_for_url(re.compile("x=hours"))
    page.wait_for_selector(".u-legend >> text=hours of training")
    held_out = page.locator("figure", has_text="success, held out").locator(".chart")
    assert "0.25" in held_out.get_attribute("aria-label")
    assert page.get_by_role("row").filter(has_text="ended").count() == 2
    watched.check(width)
    page.close()


def test_an_update_that_crossed_a_sequence_is_marked_and_keys_move(context: Any, address: str) -> None:
    watched = Watched(context, 1280, "light")
    page = watched.page
    page.goto(address)
    page.wait_for_selector("figure .uplot canvas")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Overview"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.wait_for_selector(".rollouts li")
    assert page.evaluate("document.activeElement.textContent") == "Rollouts"
    page.locator(".rollouts a", has=page.locator(".facts", has_text=re.compile("versions 7.8"))).focus()
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Tokens").press("Enter")
    page.get_by_label("Color by").select_option("versions")
    assert page.locator(".crossing").all_inner_texts() == ["v8"]
    assert page.locator(".key").all_inner_texts() == ["version 7", "version 8"]
    colors = page.eval_on_selector_all(
        ".token:not(.given)", "all => new Set(all.map(each => each.style.backgroundColor)).size"
    )
    assert colors == 2
    page.get_by_label("Color by").select_option("importance")
    strong = page.eval_on_selector_all(
        ".token:not(.given)", "all => all.filter(each => /[1-9]\\d*%/.test(each.style.backgroundColor)).length"
    )
    assert strong == 1, "the last token alone has another probability than it was sampled with"
    page.locator(".tokens").focus()
    for _ in range(8):
        page.keyboard.press("ArrowRight")
    assert re.search(r"version 7, log-probability -0.5, probability 0.607", page.locator(".token-info").inner_text())
    page.get_by_label("Theme").select_option("dark")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == LOOKS[1][2]
    watched.check(1280)
    page.close()


def test_a_new_rollout_is_shown_within_two_seconds(context: Any, address: str, run: RecordedRun) -> None:
    watched = Watched(context, 1280, "light")
    page = watched.page
    page.goto(address)
    watched.show("Rollouts")
    page.wait_for_selector(".rollouts li")
    run.write(run.group("0-60", [run.sample("0-60/r0/s0", [("q", False), ("new", True)], [12], reward=77.0)]))
    written = time.monotonic()
    page.wait_for_selector(".rollouts .reward:text-is('77')", timeout=10_000)
    assert time.monotonic() - written < 2.0
    watched.check(1280)
    page.close()


@pytest.mark.parametrize(("width", "scheme", "background"), LOOKS)
def test_an_exported_file_shows_the_same(
    context: Any, tmp_path: Path, width: int, scheme: str, background: str
) -> None:
    run = made_run(tmp_path)
    file = tmp_path / "run.html"
    assert main(["view", str(run.root), "--export", str(file)]) == 0
    watched = Watched(context, width, scheme)
    page = watched.page
    page.goto(file.as_uri())
    page.wait_for_selector("figure .uplot canvas")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == background
    watched.show("Rollouts")
    page.wait_for_selector(".rollouts li")
    assert page.locator(".rollouts li").count() == 27
    page.locator(".rollouts a", has=page.locator(".facts", has_text=re.compile("versions 7.8"))).click()
    page.get_by_role("button", name="Tokens").click()
    page.wait_for_selector(".crossing", state="attached")
    page.get_by_role("link", name="p-0-50").click()
    api.expect(page.locator(".count")).to_contain_text("1 rollout,")
    watched.show("Compare")
    page.wait_for_selector("figure .uplot canvas")
    watched.check(width)
    page.close()
