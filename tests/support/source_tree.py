"""The repository's own files and what they import: shared by the tests about the tree itself."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE_FOLDERS = {
    "dspark": "dspark",
    "dspark_cli": "dspark_cli",
    "converters": "dspark.converters",
    "runtime": "dspark.runtime",
    "kernels": "dspark.kernels",
}
"""Folder -> the name that it is imported by."""

IGNORED = {".venv", ".typecheck", ".envs", "build", "dist", "demo", "results", "__pycache__", ".git", ".hypothesis"}


@dataclass(frozen=True)
class Import:
    """One name that a module imports. line: where, for the message."""

    module: str
    path: Path
    line: int

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line} imports {self.module}"


def module_name(path: Path) -> str:
    """The name that a source file of a package is imported by."""
    relative = path.relative_to(ROOT).with_suffix("")
    parts = [PACKAGE_FOLDERS[relative.parts[0]], *relative.parts[1:]]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def package_sources() -> list[Path]:
    """Every source file that is installed."""
    return sorted(path for folder in PACKAGE_FOLDERS for path in (ROOT / folder).rglob("*.py"))


def imports_of(path: Path, name: str) -> Iterator[Import]:
    """Every import of a file, those inside functions and for type checkers too; `from a import b` counts as a.b, relative ones resolved."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, path, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            yield from (Import(f"{base}.{alias.name}", path, node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            literals = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(literal, path, node.lineno) for literal in literals if isinstance(literal, str))


def repository_files() -> list[Path]:
    """The files that git tracks or would, else (an unpacked archive) what is not built or fetched."""
    command = ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    try:
        listed = subprocess.run(command, capture_output=True, check=True).stdout.decode().split("\0")
        paths = [ROOT / name for name in listed if name]
    except (OSError, subprocess.CalledProcessError):
        paths = [path for path in ROOT.rglob("*") if not IGNORED & set(path.relative_to(ROOT).parts)]
    return sorted(path for path in paths if path.is_file() and not path.is_symlink())
