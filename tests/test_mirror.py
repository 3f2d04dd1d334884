"""The mirror of a run's checkpoints: whole or absent, never behind a kill, and a machine with nothing goes on from it.

The store is a folder, and moto's S3 server in a process of its own.
"""

import itertools
import logging
import os
import re
import shutil
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import s3
from fsspec.implementations.local import LocalFileSystem
from launch import launch
from runs import SMALL, different, rows, weights
from test_checkpoint import save, state, valid_steps

from largebatch import checkpoint
from largebatch.checkpoint import Mirror, store
from largebatch.engine import TrainState
from largebatch.files.run_folder import RunFolder
from largebatch.hooks import Mirroring, mirroring
from largebatch.report import history

FILES = ("config.json", "model.safetensors", "state.pt")
RUN = [*SMALL, "--img-size", "32", "--data.global_batch_size", "16", "--data.micro_batch_size", "16"]
RUN += ["--checkpoint.every", "2 steps", "--run.eval_every", "4 steps", "--data.eval_batch_size", "90"]
TRAIN = ["-m", "largebatch.train", *RUN]


@pytest.fixture(scope="module")
def port(tmp_path_factory) -> Iterator[int]:
    with s3.server(tmp_path_factory.mktemp("s3") / "log", "bucket") as port:
        yield port


def for_s3(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    for name in s3.environment(port):
        monkeypatch.setenv(name, "")  # for the time after the test
    s3.use(port)


@pytest.fixture(params=["folder", "s3"])
def address(request, tmp_path, monkeypatch) -> str:
    """A place of its own for each test."""
    if request.param == "folder":
        return str(tmp_path / "mirror")
    for_s3(monkeypatch, request.getfixturevalue("port"))
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def tell(num_bytes: int) -> None:
    """Nobody listens."""


def fetched(address: str, folder: Path) -> Path:
    """A run folder on an empty machine, from a mirror of the run `folder`."""
    place = folder.parent / "elsewhere" / folder.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    Mirror(address, place).restore(tell)
    return place


def contents(folder: Path) -> dict[str, bytes]:
    """Every file by its name; of a link, its target."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {str(p.relative_to(folder)): os.readlink(p).encode() if p.is_symlink() else p.read_bytes() for p in paths}


# -- what goes in comes out --------------------------------------------------------------------------------------


def test_an_empty_machine_gets_all_that_the_run_keeps(address, folder):
    """The newest two checkpoints, the best one with its link, and the records; of older ones nothing is left."""
    mirror = Mirror(address, folder)
    mirror.check()
    run = RunFolder(folder)
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2)):
        run.steps.write_text("step\n" + "".join(f"{row}\n" for row in range(1, step + 1)))
        run.tensorboard.mkdir(exist_ok=True)
        (run.tensorboard / f"events.{step}").write_bytes(bytes([step]))
        save(folder, step, state=state(step, best))
        mirror.update(tell)
    copy = fetched(address, folder)
    assert valid_steps(copy) == [5, 4, 2] and os.readlink(copy / "checkpoints" / "best") == "00000002"
    assert contents(copy) == contents(folder)
    assert sorted(mirror._checkpoints()) == [2, 4, 5]


def test_only_a_newer_checkpoint_is_fetched(address, folder, caplog):
    """A newer one of the run folder, or a valid one of the same step, stays; a damaged one is replaced."""
    for step in (1, 2):
        save(folder, step)
    Mirror(address, folder).update(tell)
    copy = fetched(address, folder)
    before = contents(copy)
    Mirror(address, copy).restore(tell)
    assert contents(copy) == before
    (copy / "checkpoints" / "00000002" / "state.pt").write_bytes(b"")
    Mirror(address, copy).restore(tell)
    assert contents(copy) == before
    save(copy, 3)
    before = contents(copy)
    Mirror(address, copy).restore(tell)
    assert contents(copy) == before
    save(folder, 4)
    Mirror(address, folder).update(tell)
    Mirror(address, copy).restore(tell)
    assert max(valid_steps(copy)) == 4


@pytest.mark.parametrize("file", [*FILES, "manifest.json"])
def test_a_damaged_one_is_passed_over_for_the_one_before(address, folder, caplog, file):
    for step in (1, 2):
        save(folder, step)
    mirror = Mirror(address, folder)
    mirror.update(tell)
    content = bytearray(mirror.files.cat_file(mirror.place("00000002", file)))
    content[len(content) // 2] ^= 1
    mirror.files.pipe_file(mirror.place("00000002", file), bytes(content))
    assert valid_steps(fetched(address, folder)) == [1]
    assert f"checkpoint 00000002 in the mirror {address} is refused: {file} " in caplog.text
    mirror = Mirror(address, folder)  # which trains step 2 anew, with the same bits
    mirror.update(tell)
    assert valid_steps(fetched(address, folder)) == [2, 1]


def test_a_mirror_without_a_sound_checkpoint_is_refused(address, folder):
    """A new run would take the place of what may be restored."""
    mirror = Mirror(address, folder)
    mirror.restore(tell)
    save(folder, 1)
    mirror.update(tell)
    mirror.files.pipe_file(mirror.place("00000001", "state.pt"), b"")
    with pytest.raises(ValueError, match="cannot be fetched .none of the 1 checkpoints there is sound.: .*command"):
        fetched(address, folder)
    assert mirror._checkpoints() == {1: True}


def test_a_step_whose_evaluation_was_still_to_be_made_is_copied_again(address, folder):
    mirror = Mirror(address, folder)
    for train_loss in (0.5, None):
        save(folder, 3, state=TrainState(step=3, train_loss=train_loss))
        mirror.update(tell)
        copy = fetched(address, folder)
        assert checkpoint.read_state(copy / "checkpoints" / "00000003")["state"]["train_loss"] == train_loss


# -- whole or absent ---------------------------------------------------------------------------------------------


class Died(BaseException):
    """In place of a kill."""


class Dying:
    """A file system whose process is killed at one of its changes: before it, or in the middle of a file."""

    CHANGES = ("put_file", "pipe_file", "rm_file", "rm")

    def __init__(self, *, inside: bool) -> None:
        self.files, self.inside, self.left = LocalFileSystem(), inside, 0

    def __getattr__(self, name: str) -> Any:
        call = getattr(self.files, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                if self.inside and name == "put_file":
                    self.files.pipe_file(arguments[1], Path(arguments[0]).read_bytes()[:100])
                raise Died
            return call(*arguments, **options)

        return counted if name in self.CHANGES else call


@pytest.mark.parametrize("inside", [False, True])
def test_a_kill_at_any_change_leaves_the_newest_whole_one(tmp_path, folder, monkeypatch, inside):
    """Four checkpoints are saved and copied, of which two are kept; the process dies at each change in turn."""
    machines = []
    for step in (1, 2, 3, 4):
        save(folder, step)
        machines.append(shutil.copytree(folder, tmp_path / str(step) / "run"))
    dying = Dying(inside=inside)
    for number in itertools.count(1):
        address, whole, dying.left = str(tmp_path / f"mirror {number}"), -1, number
        with monkeypatch.context() as patched, suppress(Died):
            patched.setattr(Mirror, "files", dying)
            for machine in machines:
                Mirror(address, machine).update(tell)
                whole = max(valid_steps(machine))
        assert max(valid_steps(fetched(address, machine)), default=-1) in (whole, max(valid_steps(machine))), number
        Mirror(address, machine).update(tell)
        assert contents(fetched(address, machine)) == contents(machine), number
        if dying.left > 0:
            break
    assert number == 1 + 4 * 4 + 2 * 2  # four checkpoints of four files, two of them removed, manifests first


def test_a_kill_while_it_is_fetched_is_made_good_by_the_next_start(folder, tmp_path, monkeypatch):
    """At each file that is fetched, and each checkpoint that gets its name."""
    for step, best in ((1, 1), (2, 1), (3, 1)):
        save(folder, step, state=state(step, best))
    history.write_saved(folder, step=3)
    address, elsewhere = str(tmp_path / "mirror"), tmp_path / "elsewhere" / "run"
    Mirror(address, folder).update(tell)
    for number in itertools.count(1):
        shutil.rmtree(elsewhere, ignore_errors=True)
        elsewhere.mkdir(parents=True)
        calls = itertools.count(1)

        def dies(call: Any) -> Any:
            def counted(*arguments: Any, **options: Any) -> Any:
                if next(calls) == number:
                    raise Died
                return call(*arguments, **options)

            return counted

        with monkeypatch.context() as patched:
            for owner, name in ((LocalFileSystem, "get_file"), (LocalFileSystem, "cat_file"), (Path, "rename")):
                patched.setattr(owner, name, dies(getattr(owner, name)))
            patched.setattr(shutil, "rmtree", lambda *arguments, **options: None)  # a kill tidies nothing up
            with suppress(Died):
                Mirror(address, elsewhere).restore(tell)
        Mirror(address, elsewhere).restore(tell)
        assert contents(elsewhere) == contents(folder), number
        if next(calls) <= number:
            break
    assert number > 14


def test_a_checkpoint_that_is_no_longer_kept_is_copied_to_its_end(folder, tmp_path, monkeypatch):
    """The run saves faster than the store takes: while step 2 is copied, steps 3 and 4 take its place."""
    for step in (1, 2):
        save(folder, step)
    mirror, put = Mirror(str(tmp_path / "mirror"), folder), LocalFileSystem.put_file
    copied = []

    def slowly(files: Any, source: str, target: str, **options: Any) -> None:
        if not copied:
            save(folder, 3)
            save(folder, 4)
        put(files, source, target, **options)
        copied.append(target.rpartition("checkpoints/")[2])

    monkeypatch.setattr(LocalFileSystem, "put_file", slowly)
    monkeypatch.setattr(mirror, "_remove", lambda doomed: None)
    mirror.update(tell)
    assert copied == [f"0000000{step}/{file}" for step in (2, 4, 3) for file in sorted(FILES, key=store.PARTS.index)]
    monkeypatch.undo()
    assert mirror._checkpoints() == {2: True, 3: True, 4: True}
    mirror.update(tell)
    assert contents(fetched(mirror.address, folder)) == contents(folder)


def test_the_newest_whole_one_stays_while_the_run_saves_newer_ones(folder, tmp_path, monkeypatch):
    """The run keeps two; when the records are copied, it has saved two more, which the mirror does not have."""
    for step in (1, 2):
        save(folder, step)
    mirror, put = Mirror(str(tmp_path / "mirror"), folder), Mirror._put_records
    mirror.update(tell)

    def meanwhile(mirror: Mirror) -> None:
        put(mirror)
        for step in (3, 4):
            save(folder, step)

    monkeypatch.setattr(Mirror, "_put_records", meanwhile)
    mirror.update(tell)
    assert valid_steps(folder) == [4, 3] and mirror._checkpoints() == {1: True, 2: True}


@pytest.mark.parametrize("gone", ["run", "run/checkpoints", "run/checkpoints/00000002"])
def test_what_somebody_removes_from_the_run_folder_stays_in_the_mirror(folder, tmp_path, gone):
    for step in (1, 2):
        save(folder, step)
    mirror = Mirror(str(tmp_path / "mirror"), folder)
    mirror.update(tell)
    shutil.rmtree(tmp_path / gone)
    mirror.update(tell)
    assert mirror._checkpoints() == {1: True, 2: True}


# -- a run that goes back ----------------------------------------------------------------------------------------


def discard(folder: Path, step: int) -> None:
    checkpoint.discard_after(folder, step, None)


@pytest.mark.parametrize("owner, name", [(LocalFileSystem, "put_file"), (Mirror, "_put_records")])
def test_no_copy_under_way_brings_back_what_the_run_has_discarded(folder, tmp_path, monkeypatch, owner, name):
    """The run goes back to step 1 while a file of step 2 is copied, or before the manifest."""
    save(folder, 1)
    mirror = Mirror(str(tmp_path / "mirror"), folder)
    mirror.update(tell)
    save(folder, 2)

    def meanwhile(*arguments: Any, **options: Any) -> None:
        before(*arguments, **options)
        mirror.discard_after(1, lambda: discard(folder, 1))
        monkeypatch.setattr(mirror, "_remove", lambda doomed: None)  # as if a kill came next

    before = getattr(owner, name)
    monkeypatch.setattr(owner, name, meanwhile)
    mirror.update(tell)
    assert mirror._checkpoints() == {1: True}


@pytest.mark.parametrize("killed", [True, False])
def test_discarded_checkpoints_do_not_come_back_from_a_mirror_that_did_not_answer(folder, tmp_path, killed):
    """Step 2 stays in the mirror. The run is at half the learning rate since, and goes on from its own step 1."""
    for step in (1, 2):
        save(folder, step)
    mirror = Mirror(str(tmp_path / "mirror"), folder)
    mirror.update(tell)
    (tmp_path / "mirror").rename(tmp_path / "away")
    (tmp_path / "mirror").touch()
    mirror.discard_after(1, lambda: discard(folder, 1))
    (tmp_path / "mirror").unlink()
    (tmp_path / "away").rename(tmp_path / "mirror")
    save(folder, 1, state=TrainState(step=1, halvings=1))
    if killed:
        mirror = Mirror(mirror.address, folder)
        mirror.restore(tell)
    mirror.update(tell)
    assert valid_steps(folder) == [1] and mirror._checkpoints() == {1: True}
    assert contents(fetched(mirror.address, folder)) == contents(folder)


# -- a store that fails ------------------------------------------------------------------------------------------


def test_a_store_that_fails_is_told_once_and_the_mirror_catches_up(port, folder, monkeypatch, caplog):
    """Training goes on meanwhile: two of the three checkpoints saved in that time are there at the end."""
    monkeypatch.setattr(mirroring, "LONGEST_PAUSE_S", 0.1)
    with s3.Cable.laid(port) as cable:
        for_s3(monkeypatch, cable.port)
        mirror = Mirror(f"s3://bucket/{folder.parent.name}", folder)
        hook = Mirroring(mirror)
        save(folder, 1)
        hook.start()
        s3.wait_until(lambda: hook._work is None, "the first copy")
        cable.whole = False
        attempts, update = [], mirror.update
        monkeypatch.setattr(mirror, "update", lambda tell: attempts.append(1) or update(tell))
        for step in (2, 3, 4):
            save(folder, step)
            hook.start()
        with caplog.at_level(logging.INFO):
            s3.wait_until(lambda: len(attempts) > 3, "attempts")
            assert hook.failure and hook._work is not None
            cable.whole = True
            s3.wait_until(lambda: hook._work is None, "the copies")
        told = [record.getMessage() for record in caplog.records if record.name == mirroring.__name__]
        assert len(told) == 2 and told[1] == f"the mirror {mirror.address} has caught up"
        assert told[0].startswith(f"the mirror {mirror.address} cannot be written (")
        assert told[0].endswith("): training goes on, and the copy is tried again")
        assert sorted(mirror._checkpoints().items()) == [(3, True), (4, True)] and not hook.failure


def run(port: int, *options: str, **changes: str) -> tuple[int, str]:
    """A run of one rank."""
    return launch([*TRAIN, *options], ranks=1, launcher="python", environment=s3.environment(port) | changes)


def said(output: str) -> str:
    """The one sentence with which the program ends."""
    (line,) = [line for line in output.splitlines() if line.startswith("largebatch: ")]
    assert "Traceback" not in output and output.endswith(line + "\n"), output
    return line.removeprefix("largebatch: --checkpoint.mirror ")


def test_a_mirror_that_cannot_be_used_is_told_before_the_first_step(port, tmp_path):
    options = ["--run.folder", str(tmp_path / "run"), "--checkpoint.mirror"]
    expected = {
        "s3://nothing/runs": r"is s3://nothing/runs, which cannot be used \(The specified bucket does not exist\): ",
        "gs://bucket/runs": r"is gs://bucket/runs, which needs a package that is not installed \(.*gcsfs",
        "foo://bucket/runs": r"is foo://bucket/runs, which cannot be used \(Protocol not known: foo\): give a place",
        "/proc/runs": r"is /proc/runs, which cannot be used \(No such file or directory\): give a place that exists",
        str(tmp_path): r"is .*, which cannot be used \(.*/run is the run folder itself, and a copy must be elsewhere\)",
        "s3://NAME:WORD@bucket": "largebatch: --checkpoint.mirror: An address of s3:// was given with a user, a ",
        "s3://[x/runs": r"largebatch: --checkpoint.mirror: s3://\[x/runs is no address \(Invalid IPv6 URL\): one ",
    }
    for address, sentence in expected.items():
        code, output = run(port, *options, address)
        assert code == 2 and re.match(sentence, said(output)) and "WORD" not in output, output
        assert not (tmp_path / "run").exists()


@pytest.fixture
def strict(port) -> Iterator[None]:
    """The server looks at credentials."""
    place = f"http://127.0.0.1:{port}/moto-api/reset-auth"
    for count in (b"0", b"inf"):
        with urllib.request.urlopen(urllib.request.Request(place, count, {"Content-Type": "text/plain"})):
            if count == b"0":
                yield


@pytest.mark.parametrize(
    "changes, why",
    [
        ({}, "The AWS Access Key Id you provided does not exist in our records"),
        ({"AWS_ACCESS_KEY_ID": "", "AWS_EC2_METADATA_DISABLED": "true"}, "Unable to locate credentials"),
        ({"AWS_ENDPOINT_URL": "http://127.0.0.1:9"}, "Could not connect to the endpoint URL: .*"),
    ],
    ids=["no permission", "no credentials", "no server"],
)
def test_a_store_that_refuses_is_told_before_the_first_step(port, strict, tmp_path, changes, why):
    options = ["--run.folder", str(tmp_path / "run"), "--checkpoint.mirror", "s3://bucket/runs"]
    code, output = run(port, *options, **changes)
    assert code == 2, output
    assert re.match(rf"is s3://bucket/runs, which cannot be used \({why}\): give a ", said(output)), output
    assert not (tmp_path / "run").exists()


# -- whole runs --------------------------------------------------------------------------------------------------


def test_a_run_without_its_machine_equals_the_uninterrupted_one(port, tmp_path):
    """Machine after machine, each with two more steps; no file of the run, and no object, has the secret."""
    address = f"s3://bucket/{tmp_path.name}"
    place = ["--run.folder", str(tmp_path / "run"), "--run.duration", "8 steps", "--log.to", "tensorboard"]
    for steps in ("2", "4", "6", "0", "0"):
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        code, output = run(port, *place, "--checkpoint.mirror", address, "--run.max_steps", steps)
        assert code == 0, output
    assert "This run is complete" in output
    code, output = run(port, *place[2:], "--run.folder", str(tmp_path / "undisturbed"))
    assert code == 0, output
    ours, theirs = ((tmp_path / name) for name in ("run", "undisturbed"))
    assert different(weights(ours), weights(theirs)) == []
    for table in ("steps.csv", "epochs.csv"):
        read = rows(ours, table), rows(theirs, table)
        same = [[(row["step"], row.get("loss"), row.get("eval_loss")) for row in one] for one in read]
        assert same[0] == same[1] != [], table
    text = (ours / "log.txt").read_text()
    assert [f"step {step} was fetched from the mirror" in text for step in (2, 4, 6, 8)] == 4 * [True]
    assert len(list((ours / "tensorboard").iterdir())) == 4
    assert not [name for name, content in contents(ours).items() if s3.SECRET.encode() in content]


def test_the_copies_of_another_run_of_the_same_name_stay(port, tmp_path):
    """Their machine may be lost. The other run has its own checkpoints, and begins to use the mirror later."""
    place = ["--run.duration", "2 steps", "--run.folder", str(tmp_path / "lost" / "run")]
    assert run(port, *place, "--checkpoint.mirror", str(tmp_path / "mirror"))[0] == 0
    before = contents(tmp_path / "mirror")
    place = ["--run.duration", "4 steps", "--run.folder", str(tmp_path / "run")]
    assert run(port, *place)[0] == 0
    code, output = run(port, *place, "--checkpoint.mirror", str(tmp_path / "mirror"))
    other = r"is .*, where .*/mirror/run is of a run with --run.duration '2 steps', now '4 steps': give another place"
    assert code == 2 and re.match(other, said(output)), output
    assert contents(tmp_path / "mirror") == before


def test_a_newer_run_of_the_same_name_is_not_brought_into_a_run(port, tmp_path):
    place = ["--run.duration", "4 steps", "--run.folder", str(tmp_path / "other" / "run")]
    assert run(port, *place, "--checkpoint.mirror", str(tmp_path / "mirror"))[0] == 0
    place = ["--run.duration", "2 steps", "--run.folder", str(tmp_path / "run")]
    assert run(port, *place)[0] == 0
    before = [{k: v for k, v in contents(tmp_path / name).items() if k != "log.txt"} for name in ("mirror", "run")]
    code, output = run(port, *place, "--checkpoint.mirror", str(tmp_path / "mirror"))
    other = r"is .*, where .*/mirror/run is of a run with --run.duration '4 steps', now '2 steps': give another place"
    assert code == 2 and re.search(other, said(output)), output
    after = [{k: v for k, v in contents(tmp_path / name).items() if k != "log.txt"} for name in ("mirror", "run")]
    assert after == before


def test_a_name_with_brackets_is_no_pattern(folder, address):
    """Removing step 1 of run[1] must not remove that of run1."""
    runs = [folder.parent / name for name in ("run[1]", "run1")]
    for one in runs:
        one.mkdir()
        for step in (1, 2):
            save(one, step)
        Mirror(address, one).update(tell)
    Mirror(address, runs[0])._remove(lambda step: step == 1)
    assert [sorted(Mirror(address, one)._checkpoints()) for one in runs] == [[2], [1, 2]]


def test_a_run_whose_last_copy_fails_says_so_and_the_same_command_makes_it(port, tmp_path):
    """The cable is cut at the first byte of the last steps' copies; the checkpoint of the last step is there."""
    place = ["--run.folder", str(tmp_path / "run"), "--run.duration", "4 steps"]
    place += ["--checkpoint.mirror", f"s3://bucket/{tmp_path.name}"]
    with s3.Cable.laid(port) as cable:
        assert run(cable.port, *place, "--run.max_steps", "2")[0] == 0
        cable.length, cable.cut = 100_000, lambda: setattr(cable, "whole", False)
        code, output = run(cable.port, *place, "--horovod.hang_limit_s", "3")
        assert code == 2, output
        assert re.match(r"s3://bucket/.* lacks the last checkpoint \(.*\); it is in .*/run/checkpoints, ", said(output))
        assert max(valid_steps(tmp_path / "run")) == 4
        cable.whole = True
        code, output = run(cable.port, *place)
        assert code == 0 and "This run is complete" in output, output
    shutil.rmtree(tmp_path / "run")
    code, output = run(port, *place)
    assert code == 0 and "This run is complete" in output and max(valid_steps(tmp_path / "run")) == 4, output
