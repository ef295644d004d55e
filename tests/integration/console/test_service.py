"""The console on the real service: a page of metrics served by hand, and what an operator then sees."""

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from tests.integration.service_process import Service

pytestmark = pytest.mark.integration


def metrics(*, throttled: bool) -> str:
    """Two GPUs of one node; the second may be held at half its clock by heat."""
    lines = []
    for gpu, hot in ((0, False), (1, throttled)):
        labels = f'gpu="{gpu}",UUID="GPU-{gpu}",modelName="NVIDIA H100 80GB HBM3",Hostname="hand07"'
        values = {
            "DCGM_FI_DEV_SM_CLOCK": 990 if hot else 1980,
            "DCGM_FI_DEV_GPU_TEMP": 89 if hot else 60,
            "DCGM_FI_DEV_POWER_USAGE": 420 if hot else 640,
            "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": 64 + 8 if hot else 0,
            "DCGM_FI_PROF_SM_ACTIVE": 0.8,
        }
        lines += [f"{name}{{{labels}}} {value}" for name, value in values.items()]
    return "\n".join(lines) + "\n"


def test_a_node_that_throttles_is_seen_red_with_its_sentence(
    browser: Browser, start_service: Callable[..., Service], folder_server: tuple[Path, str]
) -> None:
    folder, url = folder_server
    (folder / "metrics").write_text(metrics(throttled=False))
    service = start_service(scrape={"targets": [url]})
    service.until("the board", lambda: service.get("/v1/fleet"))
    page = browser.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(f"http://127.0.0.1:{service.port}/")
    cell = page.locator(".node", has_text="hand07")
    expect(cell).to_be_visible()
    expect(page.get_by_role("group", name="no rack")).to_be_visible()
    expect(page.locator("#notice")).to_contain_text("Warming")
    (folder / "metrics").write_text(metrics(throttled=True))
    expect(page.locator("#risk li").first).to_contain_text("990 MHz")
    expect(cell).to_have_attribute("data-state", "degraded")
    cell.click()
    expect(page.locator("#drawer .reasons")).to_contain_text("sm_clock_mhz of hand07/1")
    signals = service.get("/v1/nodes/hand07/timeline")["signals"]
    [clock] = [row for row in signals if row["feature"] == "sm_clock_mhz"]
    page.locator(".axis summary").click()
    expect(page.locator(".axis details")).to_contain_text(clock["sentence"].split(" (")[0])
    expect(page.locator(".drain .sentence")).to_have_text(service.get("/v1/nodes/hand07/drain")["sentence"])
    assert errors == []
    page.close()
