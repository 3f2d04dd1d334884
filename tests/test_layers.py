"""The plan of the house, from the ground up: a room (folder or file) imports exactly the rooms and LIBRARIES listed."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PLAN = """
nearest:; devices: nearest; zoo: timm; flops: devices zoo; bit_sums:; schedules:; files:; native: files zoo; data:
files native nvidia; augment: data native zoo; optim: native timm; arguments: files; config: arguments nearest;
recipes: config nearest; predict: arguments data files recipes zoo; process: rich; launch: horovod process; pack:
arguments data files launch mpi4py process zoo; ranks: bit_sums config files horovod launch mpi4py native process;
batch_norm: ranks; doctor: arguments files launch mpi4py process; imports: process; largebatch: imports; __main__:
config imports largebatch nearest process ranks; precision:; losses: augment precision zoo; replica: augment batch_norm
losses optim ranks; parallel: augment config launch losses native optim precision ranks replica zoo; compiling: augment
batch_norm config losses optim precision ranks zoo; start: config precision process ranks; evaluation: precision ranks;
engine: augment data evaluation losses native optim precision ranks replica; checkpoint: bit_sums config engine zoo;
hooks: augment checkpoint config engine files optim precision process ranks; export: arguments config files hooks
largebatch recipes zoo; assembly: augment batch_norm checkpoint compiling config data engine hooks launch losses native
optim parallel precision ranks replica schedules start zoo; plan: arguments assembly augment config devices engine
files native optim parallel precision ranks recipes zoo; benchmark: arguments assembly augment compiling config data
devices engine files flops hooks launch losses native optim parallel plan precision process ranks recipes start timm
zoo; reproduce: arguments assembly benchmark config data engine files process ranks; find_lr: assembly config engine
files hooks ranks; report: arguments checkpoint config data engine files flops hooks zoo; train: assembly checkpoint
config engine files find_lr hooks plan process ranks recipes report start; validate: arguments assembly checkpoint
config data evaluation files precision process ranks recipes report start zoo
"""
LIBRARIES = {"horovod", "mpi4py", "nvidia", "rich", "timm"}
INSTRUMENTS = ("largebatch.benchmark", "largebatch.doctor", "largebatch.reproduce", "largebatch.plan.__main__")
INSTRUMENTS += tuple(f"largebatch.plan.{name}" for name in ("calibrate", "picture", "search", "text", "validation"))
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
    below, new = set[str](), {"largebatch.train", "largebatch.ranks", "largebatch.engine", "largebatch.assembly"}
    while new:
        below |= new
        new = set[str]().union(*(files[file] for file in new)) - below
    assert not [file for file in below if file.startswith(INSTRUMENTS)]
