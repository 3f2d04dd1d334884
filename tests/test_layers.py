"""The plan of the house, from the ground up: a room (folder or file) imports exactly the rooms and LIBRARIES listed."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PLAN = """
bit_sums:; installer:; imports: installer; precision:; arguments: files; largebatch: imports; config: arguments;
files:; zoo: timm; schedules:; recipes: config; native: files zoo; optim: native timm; data: files native nvidia; comm:
bit_sums config files horovod installer mpi4py native; augment: data native; predict: arguments data files recipes zoo;
evaluation: comm precision; start: comm config precision; batch_norm: comm; __main__: comm config imports largebatch;
doctor: arguments comm files installer mpi4py; pack: arguments comm data files mpi4py rich zoo; losses: augment
precision; trials: augment comm config; graphs: comm config losses precision trials zoo; replica: augment batch_norm
comm graphs losses optim; kept: native; engine: augment comm data evaluation kept losses native optim precision
replica; parallel: augment comm config losses native optim precision replica zoo; checkpoint: bit_sums config engine
zoo; hooks: augment checkpoint comm config engine files optim precision rich; compiling: batch_norm comm config losses
optim precision trials zoo; build: augment batch_norm checkpoint comm compiling config data engine graphs hooks losses
native optim parallel precision replica schedules start trials zoo; report: arguments checkpoint config data files
hooks zoo; export: arguments config files hooks largebatch recipes zoo; find_lr: build comm config engine files hooks;
plan: arguments augment build comm config engine files native optim parallel precision recipes zoo; validate: arguments
build checkpoint comm config data evaluation files precision recipes report start zoo; benchmark: arguments augment
build comm compiling config data engine files graphs hooks losses native optim parallel plan precision recipes start
timm zoo; train: benchmark build checkpoint comm config engine files find_lr hooks plan recipes report start;
reproduce: arguments benchmark build comm config data engine files pack
"""
LIBRARIES = {"horovod", "mpi4py", "nvidia", "rich", "timm"}
ROOT = Path(__file__).resolve().parent.parent


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names | {f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names}


def test_each_room_imports_what_the_plan_says_and_no_file_imports_itself():
    paths = [path for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py")]
    names = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imports(p) for p in paths}
    files = {file: {n if n in names else n.rpartition(".")[0] for n in names[file]} & {*names} for file in names}
    rooms = {file: file.removeprefix("largebatch.").split(".")[0] for file in files}
    found = {name: {rooms[n] for f in files if rooms[f] == name for n in files[f]} - {name} for name in rooms.values()}
    for file, room in rooms.items():
        found[room] |= {library for n in names[file] for library in LIBRARIES & {n.split(".")[0]}}
    assert found == {name.strip(): {*below.split()} for name, below in (room.split(":") for room in PLAN.split(";"))}
    for plan in (found, files):
        TopologicalSorter(plan).prepare()  # CycleError names the circle
