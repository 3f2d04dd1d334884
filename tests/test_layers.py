"""The plan of the house, from the ground up: a room (folder or file) imports exactly the rooms and LIBRARIES listed."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

PLAN = """
precision:; files:; nearest:; schedules:; bit_sums:; arguments: files; devices: nearest; zoo: timm; process: rich;
config: arguments nearest; flops: devices zoo; native: files zoo; imports: process; launch: process; recipes: config
files nearest; optim: native timm; data: files native nvidia; largebatch: config engine imports optim ranks steps train;
doctor: arguments files launch mpi4py process; ranks: bit_sums config files horovod launch mpi4py native process;
augment: data native zoo; predict: arguments data files recipes zoo; pack: arguments config data files launch mpi4py
process zoo; export: arguments config files largebatch recipes zoo; evaluation: precision ranks; start: config precision
process ranks; batch_norm: ranks; __main__: config imports largebatch nearest process ranks; losses: augment precision
zoo; compiling: augment batch_norm config losses optim precision ranks zoo; replica: augment batch_norm losses optim
ranks; engine: augment data evaluation losses native optim precision ranks replica; parallel: augment config launch
losses native optim precision ranks replica zoo; checkpoint: bit_sums config engine files zoo; report: arguments
checkpoint config data engine files flops ranks recipes zoo; steps: augment checkpoint data engine files ranks zoo;
hooks: augment checkpoint config engine files optim precision process ranks report; assembly: augment batch_norm
checkpoint compiling config data engine hooks launch losses native optim parallel precision ranks replica report
schedules start zoo; rate_search: assembly config engine files hooks ranks report; validate: arguments assembly
checkpoint config data evaluation files precision process ranks recipes report start zoo; plan: arguments assembly
augment config data devices engine files flops native optim parallel precision ranks recipes zoo; train: assembly
checkpoint config engine files hooks plan process ranks recipes report start; benchmark: arguments assembly augment
batch_norm compiling config data devices engine files flops hooks losses native optim parallel plan precision process
ranks recipes start timm zoo; find_lr: checkpoint config process ranks rate_search train; find_batch: arguments
batch_search checkpoint config files process ranks train; batch_search: assembly checkpoint config data engine ranks
rate_search report schedules; reproduce: arguments assembly benchmark config data engine files hooks process ranks
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
