"""The sentences about ranks that run different programs; tests/mpi/test_odd_rank.py tests that real ranks stop."""

import shutil
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from largebatch.config import TrainConfig, options
from largebatch.ranks import preflight
from largebatch.ranks.preflight import RankReport, disagreement, name_ranks, report_rank
from largebatch.ranks.stopped import Stopped

ROOT = Path(__file__).parents[1]


def reports(*traits: dict[str, str]) -> list[RankReport]:
    """Return reports of two ranks per host: node0, node0, node1, ..."""
    return [RankReport(f"node{rank // 2}", one) for rank, one in enumerate(traits)]


def versions(*timm: str) -> list[RankReport]:
    return reports(*({"torch": "2.13.0", "timm": version} for version in timm))


def test_equal_ranks_agree():
    assert disagreement(versions("1", "1", "1")) == ""
    assert disagreement(versions("1")) == ""


@pytest.mark.parametrize(
    "timm, clause",
    [
        (("2", "2", "1", "2"), "rank 2 on node1 has timm 1, the other 3 ranks 2"),
        (("1", "2", "2"), "rank 0 on node0 has timm 1, the other 2 ranks 2"),
        (("1", "2"), "rank 1 on node0 has timm 2, the other rank 1"),
        (("2", "2", "2", "1", "1"), "ranks 3 on node1, 4 on node2 have timm 1, the other 3 ranks 2"),
        (("2", "1", "3", "2"), "rank 1 on node0 has timm 1, rank 2 on node1 has timm 3, the other 2 ranks 2"),
    ],
)
def test_the_minority_is_the_odd_one(timm, clause):
    assert disagreement(versions(*timm)) == f"{clause}: set up all hosts alike with mpi_scripts/install.sh."


def test_options_are_named_with_both_values():
    same = {"torch": "2", "--optim.lr": "0.1", "--run.seed": "0"}
    sentence = disagreement(reports(same, same | {"--optim.lr": "0.2", "--run.seed": "3"}, same))
    assert sentence == (
        "rank 1 on node0 has --optim.lr 0.2, the other 2 ranks 0.1; rank 1 on node0 has --run.seed 3, the other 2 "
        "ranks 0: start every rank with the same options."
    )


def test_variables_are_compared(monkeypatch):
    """Ranks that fuse up to different thresholds wait for each other for ever; their places and logs differ."""
    own = ["HOROVOD_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_GLOO_IFACE", "HOROVOD_TIMELINE", "HOROVOD_CUDA_HOME"]
    for name in ("HOROVOD_FUSION_THRESHOLD", "NCCL_ALGO", "NCCL_DEBUG", *own):
        monkeypatch.setenv(name, "7")
    mine = report_rank({})
    assert mine.traits["HOROVOD_FUSION_THRESHOLD"] == "7" and mine.nccl["NCCL_ALGO"] == "7"
    assert not {*own, "NCCL_ALGO", "NCCL_DEBUG"} & {*mine.traits} and "NCCL_DEBUG" not in mine.nccl
    assert "THRESHOLD" not in preflight.versions(mine)


def test_a_variable_that_one_rank_lacks():
    with_it, without = {"torch": "2", "HOROVOD_CYCLE_TIME": "3"}, {"torch": "2"}
    assert disagreement(reports(with_it, without, with_it)) == (
        "rank 1 on node0 has HOROVOD_CYCLE_TIME not set, the other 2 ranks 3: give every rank the same variables "
        "(mpirun -x NAME hands one on)."
    )
    sentence = disagreement(reports(with_it | {"--run.seed": "1"}, without | {"--run.seed": "0"}))
    assert sentence.endswith("start every rank with the same options.")


def beside(other: RankReport) -> SimpleNamespace:
    """A communicator of two ranks, of which the second has this report."""
    return SimpleNamespace(
        rank=0, together=lambda phase: nullcontext(), allgather_object=lambda mine, name: [mine, other]
    )


def test_ranks_with_other_variables_stop_or_are_told(caplog):
    here = replace(report_rank({}), host="n1")
    with pytest.raises(Stopped, match="^rank 1 on n1 has HOROVOD_X 1, the other rank not set: give every rank the"):
        preflight.agree(beside(replace(here, traits=here.traits | {"HOROVOD_X": "1"})), {})
    assert "torch" in preflight.agree(beside(replace(here, nccl=here.nccl | {"NCCL_X": "1"})), {})
    assert [text[:53] for text in caplog.messages] == ["rank 1 on n1 has NCCL_X 1, the other rank not set: gi"]


def test_a_long_list_of_differences_is_cut():
    one, other = ({f"--o{k}": value for k in range(30)} for value in "ab")
    assert "; and 26 more differ: start every rank" in disagreement(reports(one, one, other))


def test_a_trait_that_one_rank_does_not_know():
    """Ranks of different versions of largebatch may report different names."""
    sentence = disagreement(reports({"a": "1", preflight.SOURCES: "x"}, {preflight.SOURCES: "x"}, {"a": "1"}))
    assert "rank 1 on node0 has a unknown, the other 2 ranks 1" in sentence
    assert "rank 2 on node1 has the sources of largebatch unknown, the other 2 ranks x" in sentence


def test_many_ranks_are_named_shortly():
    hosts = [f"n{rank // 10}" for rank in range(200)]
    assert name_ranks([3], hosts) == "rank 3 on n0"
    text = name_ranks(range(100, 200), hosts)
    assert text.startswith("ranks 100, 101, 102, 103, 104, 105, 106, 107, ... on n10, 110") and len(text) < 250
    assert text.endswith("and 6 more hosts")


def test_a_report_holds_versions_and_every_option():
    traits = report_rank(options(TrainConfig())).traits
    assert traits["--optim.lr"] == "0.001" and traits["--recipe"] == "" and "missing" not in traits.values()
    line = preflight.versions(RankReport("n", traits))
    assert "torch 2." in line and "--" not in line


def test_a_package_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(preflight, "PACKAGES", ("no-such-package",))
    assert report_rank({}).traits["no-such-package"] == "missing"


@pytest.mark.parametrize("change", ["largebatch/optim.py", "zoo/vit.py", "largebatch/recipes/new.py"])
def test_the_digest_is_of_all_our_sources(tmp_path, change):
    """It covers the files that are imported, wherever they lie, and changes with an old or an additional file."""

    def digest(root: Path) -> str:
        program = "from largebatch.ranks.preflight import sources_digest; print(sources_digest())"
        return subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True).stdout

    for package in ("largebatch", "zoo"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    assert digest(tmp_path) == digest(ROOT) != ""
    with open(tmp_path / change, "a") as file:
        file.write("\n")
    assert digest(tmp_path) != digest(ROOT)
