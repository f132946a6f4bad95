import pytest


def pytest_configure(config: pytest.Config) -> None:
    # Also declared by the workspace; here for a package's tests run by themselves.
    config.addinivalue_line("markers", "distributed: starts ranks of its own")
