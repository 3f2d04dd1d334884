"""Lists the images that cannot be decoded, and says if shards are missing, empty or doubled, or have lost records.

    python -m largebatch.pack check shards/

Pillow and DALI decode all images, and quarantine.csv in the folder lists the bad ones: training, validation and packing
leave them out. An entry may be a record with a wrong CRC, or a gap up to the next record. If the folder cannot be
written, or is at an address, give `--out FILE` here and `--data.quarantine FILE` to the training.

The exit status is 1 if an image is bad or the data are not complete. If all images of a split are bad, none is listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from largebatch.arguments import Parser, local
from largebatch.data import quarantine, remote, shard_check, sources
from largebatch.files.names import printable
from largebatch.pack.processes import cores_per_process
from largebatch.process.progress import show_progress


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        "pack check",
        description="Decodes all images, lists the bad ones, and says if shards are missing or have lost records.",
    )
    parser.add_argument("data", help='folder of TFRecords or images, or "digits"')
    in_data = f"{quarantine.NAME} in the folder"
    parser.add_argument("--out", type=local, default="", help=f"file for the list (default: {in_data})")
    parser.add_argument(
        "--threads",
        type=int,
        default=cores_per_process(),
        help="number of files that are decoded at once (default: one per core)",
    )
    args = parser.parse_args(argv)
    if remote.is_address(args.data) and not args.out:
        raise ValueError(f"No list stays at {args.data}: give --out FILE, and train with --data.quarantine FILE.")
    lists: dict[Path, list[quarantine.Entry]] = {}
    lines = []
    for split in sources.available_splits(args.data) or ["train"]:
        folder, bad, incomplete = _check_split(args.data, split, num_threads=args.threads)
        lines += [incomplete] * bool(incomplete) + [_line(folder, entry) for entry in bad]
        file = Path(args.out).expanduser() if args.out else folder / quarantine.NAME
        lists[file] = lists.get(file, []) + bad
    for line in lines:
        print(printable(line))
    for file, entries in lists.items():
        _keep_list(file, entries, option=f" with --data.quarantine {quote(args.out)}" * bool(args.out))
    return 1 if lines else 0


def _check_split(data: str, split: str, *, num_threads: int) -> tuple[Path, list[quarantine.Entry], str]:
    """Decode a split; return the data's folder, the sorted bad images, and the fault of the whole."""
    folder, index = sources.open_everything(data, split=split)
    found = []
    with show_progress(f"checking {split}", len(index)) as show:
        for done, bad in quarantine.find_bad(index, folder=folder, split=split, num_threads=num_threads):
            found += bad
            show(done)
    print(f"{split}: {len(index)} images, {len(found)} bad")
    found.sort(key=dataclasses.astuple)
    if len(found) == len(index):  # a list of them would leave nothing
        return folder, [], f"None of the {split} images can be decoded, so none is listed. {_line(folder, found[0])}"
    incomplete = shard_check.why_incomplete(index, folder=folder, split=split)
    return folder, found, incomplete and f"{incomplete}."


def _line(folder: Path, entry: quarantine.Entry) -> str:
    return f"{folder / entry.file}, record {entry.record} (at byte {entry.offset}): {entry.reason}"


def _keep_list(file: Path, bad: Sequence[quarantine.Entry], option: str) -> None:
    try:
        if bad:
            quarantine.save(file, bad)
            print(f"listed in {file}: training{option} leaves them out")
        else:
            file.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"{file} cannot be written ({error.strerror}): give --out FILE, and train with --data.quarantine FILE."
        ) from error
