"""The programs beside training say a mistake on their command line in one sentence."""

import importlib

import pytest


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("plan --gpus abc", "--gpus is 'abc': expected a whole number."),
        ("plan --epochs many", "--epochs is 'many': expected a number."),
        ("plan validate --steps", "argument --steps: expected at least one argument; --help lists the options."),
        ("reproduce", "the following arguments are required: experiment; --help lists the options."),
        ("reproduce digits --epoch 3", "unrecognized arguments: --epoch 3; --help lists the options."),
        ("benchmark optimizer --threads two", "--threads is 'two': expected a whole number."),
        ("benchmark optimizer --modle vit_b32", "unrecognized arguments: --modle vit_b32; --help lists the options."),
        ("report --out runs", "unrecognized arguments: --out; --help lists the options."),
        ("predict weights image.png --top many", "--top is 'many': expected a whole number."),
        ("export weights", "the following arguments are required: TARGET; --help lists the options."),
        ("doctor --limit-s long", "--limit-s is 'long': expected a number."),
        ("doctor --print", "--print needs hosts; name them, as in --hosts a:2,b:2; --help lists the options."),
        ("pack digits out --shards few", "--shards is 'few': expected a whole number."),
        ("pack check --threads 1", "the following arguments are required: data; --help lists the options."),
    ],
)
def test_a_mistake_is_one_sentence(line, sentence, capsys):
    program, *words = line.split()
    with pytest.raises(SystemExit) as end:
        importlib.import_module(f"largebatch.{program}.__main__").main(words)
    assert end.value.code == 2
    assert capsys.readouterr().err == f"largebatch: {sentence}\n"
