"""What the GPU tests share with those in Triton's interpreter: their cases."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu-cases", type=int, default=20, help="random cases for each kernel and layout (default 20)")


@pytest.fixture(scope="session")
def gpu_cases(pytestconfig: pytest.Config) -> int:
    count: int = pytestconfig.getoption("--gpu-cases")
    return count


@pytest.fixture(scope="session")
def device_cases() -> Any:
    return load("device_cases")


@pytest.fixture(scope="session")
def token_row_cases(device_cases: Any) -> Any:
    del device_cases  # loaded first
    return load("token_row_cases")


def load(name: str) -> Any:
    path = Path(__file__).parents[1] / f"{name}.py"
    spec = importlib.util.spec_from_file_location(f"kvcanary_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
