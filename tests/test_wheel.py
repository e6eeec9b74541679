"""The wheel: holds the package and nothing else, and replays a trace where the repository is not."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from .support.places import ROOT


def test_the_wheel_replays_a_trace_elsewhere(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(
        ROOT, tree, ignore=shutil.ignore_patterns(".*", "__pycache__", "build", "*.egg-info", "tests", "*.report")
    )
    (tree / "tests" / "kernels").mkdir(parents=True)
    (tree / "tests" / "kernels" / "test_x.py").write_text("")
    build = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(tree)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode == 0, build.stdout + build.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    folders = {name.split("/")[1] for name in names if name.startswith("kvcanary/") and name.count("/") > 1}
    assert folders == {"analysis", "kernels", "recorder", "replayer"}
    assert "kvcanary/py.typed" in names
    source = {str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py")}
    assert source <= {name.removeprefix("kvcanary/") for name in names}
    trace = tmp_path / "kv_flip.arrow"
    shutil.copy(ROOT / "data" / "kv_flip.arrow", trace)
    code = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})\n"
        "import kvcanary; print(kvcanary.__file__)\n"
        f"from kvcanary.cli import main; main(['replay', '--quiet', {str(trace)!r}])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 1, result.stderr
    assert result.stdout.startswith(str(tmp_path / "site"))
    assert "CORRUPT" in result.stdout
    assert (tmp_path / "kv_flip.report" / "violations.parquet").exists()
    loaded = subprocess.run(
        [
            sys.executable,
            "-c",
            code.replace("main([", "import atexit; atexit.register(lambda: print(*sys.modules)); main(["),
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    modules = set(loaded.stdout.split())
    assert "llvmlite" in modules  # compiled loops, whoever loaded them
    assert not {"torch", "triton", "polars", "duckdb", "transformers"} & modules
