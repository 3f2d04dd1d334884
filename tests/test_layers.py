"""One direction of imports: the table of the architecture, checked against every import statement.

`ALLOWED` says, for each module, which other modules of ours it may import: at its top, inside a function, or
for type checking. Whoever adds a file adds its line here, and thereby says where in the order it stands.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# some files are comm's own
GROUND = {
    "largebatch." + name for name in ("config", "affinity", "compression", "parallel.shape", "precision", "comm")
}
PREPARATION = {
    "largebatch.data." + name for name in ("order", "pixels", "reader", "randaugment", "operations", "token_labels")
}
DATA_FILES = "records label_maps index stream dali quarantine real shards archives sources originals"
DATA = {"largebatch.data." + name for name in DATA_FILES.split()} | PREPARATION
OPTIM = {"largebatch.optim" + name for name in ("", ".lamb", ".native", ".lars", ".apex_lamb", ".factory")}
PARALLEL = {"largebatch.parallel." + name for name in ("shape", "mesh", "collectives", "sharding")}
PARTS = {"largebatch." + name for name in ("schedules", "augment", "losses")} | OPTIM | DATA
RUN_FILES = "engine evaluation ema batch_norm hooks checkpoint curves preemption profiling"
RUN = {"largebatch." + name for name in RUN_FILES.split()}
ASSEMBLY = {"largebatch.build", "largebatch.recipes"}
BELOW_PROGRAMS = GROUND | PARTS | RUN | ASSEMBLY | {"zoo"}

ALLOWED: dict[str, set[str]] = {
    # ground
    "largebatch": set(),
    "largebatch.tuning": set(),
    "largebatch.precision": set(),
    "largebatch.config": {"largebatch.tuning", "largebatch.parallel.shape"},
    "largebatch.affinity": set(),
    "largebatch.agreement": {"largebatch.affinity"},
    "largebatch.compression": set(),
    "largebatch.place": set(),
    "largebatch.launcher": {"largebatch.place", "largebatch.binding"},
    "largebatch.watchdog": set(),
    "largebatch.comm": {
        *("largebatch." + name for name in ("affinity", "agreement", "compression", "launcher", "tuning", "watchdog")),
        "largebatch.parallel.shape",
    },
    # parts: they know one process; only the files of one package know each other
    "largebatch.optim": OPTIM,
    "largebatch.optim.lamb": {"largebatch.optim.native"},
    "largebatch.optim.native": {"largebatch.cpp"},
    "largebatch.cpp": set(),
    "largebatch.attention": {"largebatch.cpp", "zoo", "zoo.volo"},
    "largebatch.optim.lars": set(),
    "largebatch.optim.apex_lamb": set(),
    "largebatch.optim.factory": {"largebatch.optim." + name for name in ("lamb", "lars", "apex_lamb")},
    "largebatch.schedules": set(),
    "largebatch.augment": {"largebatch.data.token_labels"},
    "largebatch.losses": set(),
    "largebatch.data": set(),
    "largebatch.data.records": set(),
    "largebatch.data.order": set(),
    "largebatch.data.label_maps": {"largebatch.data.records"},
    "largebatch.data.index": {"largebatch.data.records", "largebatch.data.label_maps"},
    "largebatch.data.real": {"largebatch.data.records", "largebatch.data.index"},
    "largebatch.data.quarantine": {"largebatch.data.records", "largebatch.data.index"},
    "largebatch.data.shards": {"largebatch.data.records"},
    "largebatch.data.archives": {"largebatch.data.records", "largebatch.data.shards"},
    "largebatch.data.sources": {"largebatch.data." + name for name in ("index", "quarantine", "shards", "archives")},
    "largebatch.data.originals": {
        "largebatch.data." + name for name in ("records", "quarantine", "shards", "archives", "sources")
    },
    "largebatch.data.pixels": set(),
    "largebatch.data.reader": {"largebatch.data.index", "largebatch.data.label_maps"},
    "largebatch.data.randaugment": {"largebatch.data.order"},
    "largebatch.data.operations": {"largebatch.data.randaugment"},
    "largebatch.data.token_labels": {"largebatch.data.order"},
    "largebatch.data.stream": {
        "largebatch.data." + name for name in ("index", "label_maps", "order", "reader", "token_labels")
    },
    "largebatch.data.dali": {"largebatch.data.index", "largebatch.data.stream"} | PREPARATION,
    # the add-on: shape is ground, the rest parts
    "largebatch.parallel": set(),
    "largebatch.parallel.shape": set(),
    "largebatch.parallel.mesh": {"largebatch.parallel.shape"},
    "largebatch.parallel.collectives": {"largebatch.parallel.mesh"},
    "largebatch.parallel.sharding": {"largebatch.parallel.mesh", "largebatch.parallel.collectives"},
    "largebatch.parallel.zero": {"largebatch.parallel." + name for name in ("mesh", "collectives", "sharding")},
    "largebatch.parallel.lamb": {
        *("largebatch.parallel.collectives", "largebatch.parallel.zero", "largebatch.optim.lamb"),
    },
    "largebatch.parallel.tensor": PARALLEL,
    "largebatch.parallel.loss": PARALLEL | {"largebatch.losses", "largebatch.parallel.tensor"},
    "largebatch.parallel.volo": PARALLEL
    | {"largebatch.losses", "largebatch.parallel.tensor", "largebatch.parallel.loss", "zoo.volo"},
    "largebatch.parallel.vit": PARALLEL | {"largebatch.parallel.tensor", "zoo.vit"},
    "largebatch.parallel.pipeline": {
        *("largebatch.parallel." + name for name in ("shape", "mesh", "collectives")),
        "zoo.vit",
    },
    "largebatch.parallel.sequence": PARALLEL | {"largebatch.parallel.tensor", "zoo.vit"},
    # the run
    "largebatch.parallel.rendezvous": {"largebatch.comm", "largebatch.place", "largebatch.parallel.mesh"},
    "largebatch.parallel.replica": {
        *(GROUND | PARTS | {"largebatch.engine", "zoo.vit", "zoo.volo"}),
        "largebatch.parallel.*",
    },
    "largebatch.engine": GROUND | PARTS,
    "largebatch.checkpoint": GROUND | PARTS | {"largebatch.engine", "zoo"},
    "largebatch.curves": set(),
    "largebatch.evaluation": {"largebatch.comm"},
    "largebatch.ema": {"largebatch.engine"},
    "largebatch.batch_norm": {"largebatch.engine"},
    "largebatch.preemption": {"largebatch.comm", "largebatch.config", "largebatch.engine"},
    "largebatch.profiling": {"largebatch.data.records", "largebatch.engine"},
    "largebatch.hooks": GROUND | PARTS | RUN,
    # assembly
    "largebatch.recipes": {"largebatch.config", "largebatch.recipes.*"},
    "largebatch.recipes.quickstart": {"largebatch.config"},
    "largebatch.recipes.vit": {"largebatch.config"},
    "largebatch.recipes.volo": {"largebatch.config"},
    "largebatch.recipes.cifar": {"largebatch.config"},
    "largebatch.recipes.hybrid": {"largebatch.config", "largebatch.parallel.shape", "largebatch.recipes.cifar"},
    "largebatch.build": {
        *(GROUND | PARTS | RUN | {"largebatch.attention", "largebatch.recipes", "zoo"}),
        *("largebatch.parallel.rendezvous", "largebatch.parallel.replica"),
    },
    # programs: everything below, but not one another
    "largebatch.train": BELOW_PROGRAMS,
    "largebatch.validate": BELOW_PROGRAMS,
    "largebatch.pack": BELOW_PROGRAMS | {"largebatch.labelling"},
    "largebatch.labelling": DATA | {"zoo.teacher"},
    "largebatch.binding": set(),
    "largebatch.benchmark": set(),
    "largebatch.benchmark.__main__": set(),
    "largebatch.benchmark.measure": {"largebatch.precision"},
    "largebatch.benchmark.optimizer": {"largebatch.benchmark.measure", "largebatch.optim", "zoo"},
    "largebatch.benchmark.model": {
        *("largebatch." + name for name in ("attention", "benchmark.measure", "precision", "recipes")),
        *("zoo", "zoo.vit", "zoo.volo"),
    },
    "largebatch.benchmark.step": BELOW_PROGRAMS | {"largebatch.benchmark.measure", "largebatch.benchmark.model"},
    "largebatch.benchmark.parallel": {
        *(BELOW_PROGRAMS | {"largebatch.benchmark.measure"}),
        *("largebatch.parallel.rendezvous", "largebatch.parallel.replica"),
    },
    "largebatch.benchmark.scaling": set(),
    "largebatch.benchmark.loader": DATA | {"largebatch.benchmark.measure", "zoo._torchvision"},
    # the doctor imports nothing that could be broken
    "largebatch.doctor": set(),
    "largebatch.doctor.result": set(),
    "largebatch.doctor.installation": {"largebatch.doctor.result"},
    "largebatch.doctor.machine": {"largebatch.doctor.result"},
    "largebatch.doctor.launches": {"largebatch.doctor.result"},
    "largebatch.doctor.hosts": {"largebatch.doctor.result"},
    "largebatch.doctor.commands": {"largebatch.doctor.result", "largebatch.doctor.hosts"},
    "largebatch.doctor.network": {"largebatch.doctor." + name for name in ("result", "hosts", "commands", "launches")},
    "largebatch.doctor.exchange": set(),  # run by ranks; nothing imports it
    "largebatch.doctor.__main__": {"largebatch", "largebatch.doctor", "largebatch.doctor.*"},
    # the zoo stands alone
    "zoo": {"zoo._torchvision", "zoo.vit", "zoo.volo", "zoo.weights"},
    "zoo._torchvision": set(),
    "zoo.teacher": {"zoo", "zoo.volo", "zoo.weights"},
    "zoo.vit": set(),
    "zoo.volo": set(),
    "zoo.weights": {"zoo.vit", "zoo.volo"},
}

PEERS = {"largebatch.benchmark." + name for name in ("optimizer", "model", "step", "loader")}

OWNERS = {
    "horovod": {"largebatch.comm", "largebatch.launcher"},  # launcher: its server of addresses, nothing of a run
    "nvidia": {"largebatch.data.stream", "largebatch.data.dali"},
    "tensorboard": {"largebatch.hooks"},
    "torch.utils.tensorboard": {"largebatch.hooks"},
    "mpi4py": {"largebatch.comm", "largebatch.pack", "largebatch.doctor.exchange"},
    "torch.distributed": {  # launcher: the store alone
        *("largebatch.launcher", "largebatch.benchmark.step", "largebatch.benchmark.parallel"),
        *("largebatch.parallel." + name for name in ("mesh", "collectives", "pipeline", "sequence")),
        *("largebatch.parallel." + name for name in ("rendezvous", "replica")),
    },
    "timm": {"zoo.teacher", "zoo.vit", "zoo.volo", "zoo.weights"} | PEERS,
    "torchvision": set(),
    "jsonargparse": {"largebatch.config"},
    "apex": {"largebatch.optim.apex_lamb", "largebatch.benchmark.optimizer"},
}

ZOO_LIBRARIES = {"torch", "timm", "safetensors"}
PARTS_LIBRARIES = {"torch", "numpy"}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = [path for package in ("largebatch", "zoo") for path in (ROOT / package).rglob("*.py")]
FILES = {module_name(path): path for path in PATHS}


def imported_names(tree: ast.AST, *, module: str, is_package: bool) -> Iterator[str]:
    """Every dotted name that a file imports anywhere; `from a import b` gives a.b, which may be a.py's b."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = module.split(".") if is_package else module.split(".")[:-1]
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, node.module] if node.module else above)
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("torch.distributed."):
            yield ast.unparse(node)  # torch has imported it, so it is used without an import statement


def imports(module: str) -> set[str]:
    tree = ast.parse(FILES[module].read_text(), filename=str(FILES[module]))
    return set(imported_names(tree, module=module, is_package=FILES[module].name == "__init__.py"))


def our_module(name: str) -> str | None:
    """The module of ours where an imported name lies: largebatch.config.TrainConfig -> largebatch.config."""
    if name.partition(".")[0] not in ("largebatch", "zoo"):
        return None
    while name not in FILES and name not in ALLOWED and "." in name:
        name = name.rpartition(".")[0]
    return name


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def is_allowed(target: str, allowed: set[str]) -> bool:
    return target in allowed or f"{target.rpartition('.')[0]}.*" in allowed


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_module_imports_only_what_stands_below_it(module):
    assert module in ALLOWED, f"{module} is not in the import table: say in ALLOWED of {__file__} what it may import"
    ours = {our_module(name) for name in imports(module)} - {None, module}
    wrong = sorted(target for target in ours if not is_allowed(target, ALLOWED[module]))
    assert not wrong, f"{module} imports {', '.join(wrong)}, against the import table in {__file__}"


@pytest.mark.parametrize("module", sorted(FILES))
def test_a_library_with_an_owner_is_imported_by_its_owner_alone(module):
    for name in imports(module):
        for library, owners in OWNERS.items():
            owned = not is_within(name, library) or module in owners
            assert owned, f"{module} imports {name}: only {', '.join(sorted(owners)) or 'no module'} may"


@pytest.mark.parametrize("module", sorted(name for name in FILES if is_within(name, "zoo")))
def test_the_zoo_needs_torch_timm_and_safetensors_alone(module):
    tops = {name.partition(".")[0] for name in imports(module)}
    assert tops <= ZOO_LIBRARIES | {"zoo"} | sys.stdlib_module_names


@pytest.mark.parametrize("module", sorted(PARTS - DATA & set(FILES)))
def test_a_part_needs_torch_and_numpy_alone(module):
    tops = {name.partition(".")[0] for name in imports(module) if our_module(name) is None}
    owned = {library for library, owners in OWNERS.items() if module in owners}
    assert tops <= PARTS_LIBRARIES | owned | sys.stdlib_module_names


def test_the_table_has_no_cycle():
    allowed = {module: {t for t in ALLOWED if is_allowed(t, ALLOWED[module])} - {module} for module in ALLOWED}
    while allowed:
        bottom = {module for module, targets in allowed.items() if not targets & set(allowed)}
        assert bottom, f"these import each other in a circle: {', '.join(sorted(allowed))}"
        allowed = {module: targets for module, targets in allowed.items() if module not in bottom}


def test_every_form_of_import_is_seen():
    source = """
import torch.distributed as dist
from . import order
from ..config import TrainConfig
from largebatch import comm
def late():
    import horovod.torch
    return torch.distributed.get_rank()
"""
    found = set(imported_names(ast.parse(source), module="largebatch.data.dali", is_package=False))
    assert found == {
        "torch.distributed",
        "largebatch.data.order",
        "largebatch.config.TrainConfig",
        "largebatch.comm",
        "horovod.torch",
        "torch.distributed.get_rank",
    }
    assert our_module("largebatch.config.TrainConfig") == "largebatch.config"
    assert our_module("torch.nn") is None
    beside = imported_names(ast.parse("from . import vit"), module="largebatch.recipes", is_package=True)
    assert list(beside) == ["largebatch.recipes.vit"]
