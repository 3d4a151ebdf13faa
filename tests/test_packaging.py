"""What is installed: every package of the folders, under names that collide with nobody's."""

import subprocess
import sys
import tomllib
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest
from source_tree import PACKAGE_FOLDERS, ROOT, module_name, package_sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]


def test_the_list_of_packages_is_the_folders() -> None:
    """A package that is not listed is in a checkout, passes its tests there, and is missing from the wheel."""
    folders = {module_name(path) for path in package_sources() if path.name == "__init__.py"}
    assert sorted(SETUPTOOLS["packages"]) == sorted(folders)
    without_init = {path.parent for path in package_sources()} - {path.parent for path in package_sources() if path.name == "__init__.py"}
    assert not without_init


def test_the_folders_map_to_their_names() -> None:
    assert SETUPTOOLS["package-dir"] == {name: folder for folder, name in PACKAGE_FOLDERS.items()}


def test_constraints_lie_within_the_ranges() -> None:
    packaging = pytest.importorskip("packaging.requirements")
    lines = [line for line in (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    pins = {entry.name: str(entry.specifier).removeprefix("==") for entry in map(packaging.Requirement, lines)}
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [packaging.Requirement(text) for text in [*PROJECT["project"]["dependencies"], *(text for extra in extras for text in extra)]]
    assert not [f"{entry} has no pin" for entry in wanted if entry.name not in pins]
    assert not [f"{entry}: {pins[entry.name]}" for entry in wanted if not entry.specifier.contains(pins[entry.name])]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the sources, offline."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    for path in [*package_sources(), *(ROOT / name for name in ("pyproject.toml", "README.md", "LICENSE", "dspark/py.typed"))]:
        target = source / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    command = [
        sys.executable,
        "-P",
        "-m",
        "pip",
        "wheel",
        "--no-index",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(folder),
        str(source),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = folder.glob("dspark-*.whl")
    return built


def test_the_wheel_holds_every_module_and_no_bare_name(wheel: Path) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    expected = {str(Path(*module_name(path.parent / "__init__.py").split("."), path.name)) for path in package_sources()} | {
        "dspark/py.typed"
    }
    assert set(names) == expected
    assert {name.split("/")[0] for name in names} == {"dspark", "dspark_cli"}


def test_the_wheel_installs_the_command_and_imports_beside_transformers(wheel: Path, tmp_path: Path) -> None:
    """Installed for real, away from the checkout. The fault: a top-level `kernels` of ours made transformers fail to import."""
    place = tmp_path / "site"
    command = [sys.executable, "-P", "-m", "pip", "install", "--no-index", "--no-deps", "--target", str(place), str(wheel)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in place.iterdir() if not path.name.endswith(".dist-info")} <= {"dspark", "dspark_cli", "bin"}
    assert "dspark = dspark_cli.app:main" in next(place.glob("*.dist-info/entry_points.txt")).read_text(encoding="utf-8")
    code = f"""
import sys
sys.path.insert(0, {str(place)!r})
sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
import dspark.kernels.ops, dspark.runtime.engine, dspark.converters.pipeline, dspark_cli.app
assert dspark.kernels.ops.__file__.startswith({str(place)!r}), dspark.kernels.ops.__file__
import transformers
from transformers import LlamaForCausalLM
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["kernels", "runtime", "converters"])
def test_this_environment_has_no_bare_name_of_ours(name: str) -> None:
    spec = find_spec(name)
    assert spec is None or spec.origin is None or not Path(spec.origin).resolve().is_relative_to(ROOT / name)
