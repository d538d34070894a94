"""The floors of the package: a module knows only what lies below it."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "moecache"

# From the ground up. A row may import from the rows above it in this list (the floors below it); rows of one floor
# are in order too. Modules of one sub-package may import each other. A module of a sub-package that knows more than the
# others has a row of its own, by its dotted name.
FLOORS: list[tuple[int, set[str]]] = [
    (0, {"kernel"}),
    (1, {"policy", "trace", "hardware"}),
    (1, {"steps", "ties", "calibrate"}),
    (1, {"cache"}),
    (1, {"one_token"}),
    (1, {"wait_values"}),
    (2, {"provenance", "metrics", "substituted_calls", "cost_loop", "pareto", "sweep_store"}),
    (2, {"quality"}),
    (2, {"run", "hardware_probe", "token_groups"}),
    (2, {"cost", "quality_rows"}),
    (3, {"simulate", "synthetic", "hf_internals"}),
    (3, {"low_bit", "hf_checkpoints"}),
    (3, {"packed_products"}),
    (3, {"expert_sum"}),
    (3, {"stores"}),
    (3, {"sweep", "trace_report", "families", "score"}),
    (3, {"experts", "foresight", "shared_start", "contribution"}),
    (3, {"low_bit_calls", "one_token.routing"}),
    (4, {"live"}),
    (3, {"stand_ins"}),
    (3, {"designs"}),
    (4, {"observe"}),
    (4, {"interventions"}),
    (4, {"widen"}),
    (4, {"record", "emulate", "generate", "intervene", "runtime"}),
    (5, {"frame_file", "stats", "figures", "reference", "export_gguf"}),
    (5, {"results"}),
    (5, {"claims"}),
    (5, {"experiments"}),
    (6, {"chapters"}),
    (6, {"cli"}),
    (6, {"api_pages"}),
]
ROW_OF = {name: row for row, (_, names) in enumerate(FLOORS) for name in names}
WITHOUT_TORCH = {name for floor, names in FLOORS for name in names if floor <= 2} | {
    "simulate",
    "sweep",
    "synthetic",
    "trace_report",
    "stand_ins",
    "designs",
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def _place(dotted: str) -> str:
    """The name in `FLOORS` that a dotted name within the package belongs to: its module's, or else its sub-package's."""
    first, *rest = dotted.split(".")
    module = ".".join([first, *rest[:1]])
    return module if module in ROW_OF else first


def _own_name(path: Path) -> str:
    return _place(".".join(path.relative_to(PACKAGE).with_suffix("").parts))


def _imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of every import, those inside functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def _imported_parts(path: Path) -> set[str]:
    names = {_place(name.removeprefix("moecache.")) for name in _imports(path) if name.startswith("moecache.")}
    return names - {"__version__", _own_name(path)}


def test_every_module_has_its_place():
    unplaced = {_own_name(path) for path in MODULES} - set(ROW_OF)
    assert not unplaced, f"give {sorted(unplaced)} a row in FLOORS"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_come_from_lower_floors(path):
    own = ROW_OF.get(_own_name(path), len(FLOORS))
    too_high = {name for name in _imported_parts(path) if ROW_OF.get(name, len(FLOORS)) >= own}
    assert not too_high


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_floors_do_without_torch(path):
    if _own_name(path) in WITHOUT_TORCH:
        assert not {name.split(".")[0] for name in _imports(path)} & {"torch", "transformers"}


def test_a_light_import_loads_neither_torch_nor_transformers():
    program = (
        "import sys, moecache, moecache.simulate, moecache.one_token, moecache.results, moecache.cli\n"
        "print(sorted({'torch', 'transformers', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_import_from_a_higher_floor_would_be_seen(tmp_path):
    (tmp_path / "policy.py").write_text("def late():\n    from moecache import simulate\n    return simulate\n")
    assert {name.split(".")[1] for name in _imports(tmp_path / "policy.py")} == {"simulate"}
    assert ROW_OF["simulate"] > ROW_OF["policy"]


def test_a_module_with_a_row_of_its_own_is_higher_than_its_package():
    assert _place("one_token.routing.OneRow") == "one_token.routing"
    assert _place("one_token.OneToken") == "one_token"
    assert [_own_name(PACKAGE / "one_token" / f"{name}.py") for name in ("routing", "parts")] == ["one_token.routing", "one_token"]
    assert ROW_OF["one_token.routing"] > ROW_OF["one_token"]
