from tests.integration.console.page import browser, open_console

__all__ = ["browser", "open_console"]
