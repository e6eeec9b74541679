"""`from kvcanary import ...`: every name is there, and none is loaded before it is asked for."""

import subprocess
import sys

import kvcanary
import pytest


@pytest.mark.parametrize("name", kvcanary.__all__)
def test_every_exported_name_can_be_imported(name):
    assert getattr(kvcanary, name) is not None


def test_the_list_is_what_can_be_asked_for():
    assert set(kvcanary.__all__) == {*kvcanary.EXPORTS, "__version__"}
    assert dir(kvcanary) == sorted(kvcanary.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing_here'"):
        kvcanary.nothing_here  # noqa: B018


def test_importing_the_package_loads_nothing_else():
    script = "import sys, kvcanary; print([n for n in sys.modules if n.startswith('kvcanary.') or n in ('numpy', 'pyarrow')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
