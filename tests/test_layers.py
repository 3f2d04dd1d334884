"""The plan of the house: a room is a folder or file of `largebatch`, or zoo. Each imports exactly what stands here."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PLAN = {
    "bind config files largebatch precision schedules zoo": "",
    "comm": "config",
    "recipes": "config",
    "data": "files",
    "native": "files zoo",
    "evaluation": "comm precision",
    "doctor": "comm",
    "batch_norm": "comm",
    "augment": "data",
    "pack": "comm data files zoo",
    "optim": "native",
    "losses": "augment precision",
    "replica": "augment batch_norm comm losses optim",
    "parallel": "augment comm config losses optim precision replica zoo",
    "engine": "augment comm data evaluation losses optim precision replica",
    "checkpoint": "config engine zoo",
    "hooks": "checkpoint comm config engine files optim",
    "start": "comm config precision",
    "build": "augment checkpoint comm config data engine hooks losses native optim parallel replica schedules zoo",
    "train": "build comm config hooks recipes start",
    "validate": "build comm config data evaluation files recipes start zoo",
    "benchmark": "augment build comm config data engine files losses native optim parallel precision recipes start zoo",
}
OWNERS = {"horovod": "comm", "jsonargparse": "config", "mpi4py": "comm doctor pack", "nvidia": "data"}


def imports(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    return names.union(f"{n.module}.{alias.name}" for n in nodes if isinstance(n, ast.ImportFrom) for alias in n.names)


def room(name: str) -> str:
    return name.removeprefix("largebatch.").split(".")[0]


PATHS = [path for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py")]
FILES = {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): imports(p) for p in PATHS}


def test_each_room_imports_what_the_plan_says_and_nothing_imports_itself():
    plan = {name: set(below.split()) for names, below in PLAN.items() for name in names.split()}
    files = {f: {n if n in FILES else n.rpartition(".")[0] for n in FILES[f]} & FILES.keys() for f in FILES}
    assert {name: {room(n) for f in files if room(f) == name for n in files[f]} - {name} for name in plan} == plan
    assert {room(file) for file in files} == plan.keys()
    TopologicalSorter(plan).prepare()  # CycleError names the circle
    TopologicalSorter(files).prepare()


def test_a_library_stays_in_its_room():
    users = {lib: {room(f) for f in FILES for n in FILES[f] if f"{n}.".startswith(f"{lib}.")} for lib in OWNERS}
    assert users == {library: set(rooms.split()) for library, rooms in OWNERS.items()}
    tops = {name.split(".")[0] for file in FILES for name in FILES[file] if room(file) == "zoo"}
    assert tops <= {"torch", "timm", "safetensors", "zoo", *sys.stdlib_module_names}
