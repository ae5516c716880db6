"""A headless Chromium, driven by Playwright: PATH's, or the one that HETERO_CHROMIUM names."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.async_api import Browser

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str:
    """Return the path of a Chromium; skip the test, and say why, where there is none."""
    named = os.environ.get("HETERO_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, PROGRAMS)), None)
    if found is None:
        pytest.skip("no Chromium: install Debian's chromium, or name one in HETERO_CHROMIUM")
    return found


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    """A browser while entered. Its sandbox needs rights that containers lack."""
    program = find_chromium()
    playwright = pytest.importorskip("playwright.async_api", reason="no Playwright: pip install playwright")
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()
