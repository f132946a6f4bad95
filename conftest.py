"""Options for every test run in the repository."""

import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parent / "packages"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--installed-only",
        action="store_true",
        help="fail if a package under test was imported from the source tree, not from its wheel",
    )


@pytest.fixture(autouse=True, scope="session")
def installed_only(request: pytest.FixtureRequest) -> None:
    """Refuse to test the source tree where the wheel was meant."""
    if not request.config.getoption("--installed-only"):
        return
    for path in PACKAGES.glob("*/src/*"):
        origin = getattr(sys.modules.get(path.name), "__file__", None)
        if origin is not None and Path(origin).is_relative_to(PACKAGES):
            pytest.fail(f"{path.name} comes from {origin}, not from its wheel", pytrace=False)
