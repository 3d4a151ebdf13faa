"""The one import rule: dspark_cli -> converters -> runtime -> kernels, never upward; and what each layer may load at all."""

import subprocess
import sys
from itertools import chain

import pytest
from source_tree import PACKAGE_FOLDERS, Import, imports_of, module_name, package_sources

LAYERS = ("dspark_cli", "dspark.converters", "dspark.runtime", "dspark.kernels")
DOORS = (
    "dspark.runtime.spec",
    "dspark.runtime.models",
    "dspark.runtime.layers",
    "dspark.runtime.engine",
    "dspark.runtime.jobs.prompts",
    "dspark.runtime.jobs.lines",
    "dspark.runtime.jobs.tokenizer",
    "dspark.runtime.execution.layer_walk",
    "dspark.runtime.execution.loader",
    "dspark.runtime.execution.logits",
    "dspark.runtime.execution.memory",
    "dspark.runtime.speculation",
)
"""Where converters may enter the runtime: what is served is what they calibrate and audit, the job's own lines among it."""

SOURCES = {module_name(path): path for path in package_sources()}


def within(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int | None:
    return next((index for index, package in enumerate(LAYERS) if within(module, package)), None)


def imports(package: str) -> list[Import]:
    return list(chain.from_iterable(imports_of(path, name) for name, path in SOURCES.items() if within(name, package)))


def test_the_walk_sees_every_layer() -> None:
    """Guards the other tests: an empty walk would pass them all."""
    for package in LAYERS:
        assert sum(within(name, package) for name in SOURCES) > 5
    assert any(entry.module == "dspark.runtime.spec.errors.UsageError" for entry in imports("dspark_cli"))


def test_no_layer_imports_one_above_it() -> None:
    upward = [
        str(entry)
        for name in SOURCES
        if (own := layer(name)) is not None
        for entry in imports_of(SOURCES[name], name)
        if (other := layer(entry.module)) is not None and other < own
    ]
    assert not upward


def test_converters_enter_the_runtime_by_its_doors() -> None:
    inside = [entry for entry in imports("dspark.converters") if within(entry.module, "dspark.runtime")]
    assert inside
    assert not [str(entry) for entry in inside if not any(within(entry.module, door) for door in DOORS)]


def test_nobody_imports_the_folders_by_their_bare_names() -> None:
    """A bare `kernels` is another distribution's package, and `runtime` anybody's."""
    bare = set(PACKAGE_FOLDERS) - {"dspark", "dspark_cli"}
    assert not [str(entry) for package in ("dspark", "dspark_cli") for entry in imports(package) if entry.module.split(".")[0] in bare]


def test_specs_import_the_standard_library_only() -> None:
    """Flags and --help are made from them and must not wait for anything."""
    foreign = [
        str(entry)
        for entry in imports("dspark.runtime.spec")
        if entry.module.split(".")[0] not in sys.stdlib_module_names and not within(entry.module, "dspark.runtime.spec")
    ]
    assert not foreign


def test_the_job_layer_never_names_torch() -> None:
    assert not [str(entry) for entry in imports("dspark.runtime.jobs") if entry.module.split(".")[0] in ("torch", "numba", "triton")]


@pytest.mark.parametrize("package", ["dspark.runtime.jobs", "dspark.runtime.spec", "dspark_cli"])
def test_torch_is_not_loaded_by(package: str) -> None:
    """By anything below either: a finished job, and a job's whole book-keeping, run without torch and transformers."""
    names = [name for name in SOURCES if within(name, package)]
    heavy = ("torch", "transformers", "numba", "triton")
    code = f"import sys, importlib\nfor name in {names!r}: importlib.import_module(name)\nprint([m for m in {heavy!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_the_public_names_exist_and_importing_dspark_loads_none_of_them() -> None:
    code = (
        "import sys, dspark\n"
        "assert not [m for m in sys.modules if m.startswith('dspark.')]\n"
        "print(*[getattr(dspark, n) for n in dspark.__all__])"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
