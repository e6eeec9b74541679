"""How many cases the GPU tests try."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-cases", type=int, default=20, help="random cases for each kernel and layout (default 20)")


@pytest.fixture(scope="session")
def gpu_cases(pytestconfig: pytest.Config) -> int:
    count: int = pytestconfig.getoption("--gpu-cases")
    return count
