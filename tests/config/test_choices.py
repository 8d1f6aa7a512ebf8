"""Keys that are given although the choice that reads them is not made."""

import pytest
from conftest import BASE, refused, table

from maxramp.config.choices import CHOICES
from maxramp.config.keys import Config
from maxramp.config.load import dump_config, load
from maxramp.keys.base import base, unset
from maxramp.keys.choices import find_unmade, is_made, refuse_unread

ROWS = [(condition, name) for condition, names in CHOICES.items() for name in names]


def parts(condition):
    return [part.partition("=")[::2] for part in condition.removeprefix("without ").split(" or ")]


def with_choice(condition, is_to_hold):
    """The values of all keys, with the condition made so."""
    values = dict(base())
    for key, wanted in parts(condition):
        kind = type(values[key])
        holds = wanted.split("|")[0] if wanted else "set"
        if is_to_hold != condition.startswith("without "):
            values[key] = holds if kind not in (bool, int) else holds != "False"
        elif wanted:
            values[key] = "another" if kind is not bool else wanted == "False"
        else:
            values[key] = unset(key)
    assert is_made(condition, values) == is_to_hold
    return values


@pytest.mark.parametrize(("condition", "name"), ROWS)
def test_a_key_without_its_choice_is_refused(condition, name):
    """If it is given and has another value than base.yml's; with the choice it is not."""
    other = {name: ("another", base()[name])}
    table = {condition: (name,)}
    values = with_choice(condition, False) | other
    with refused(f"{name}={other[name]} is ", parts(condition)[0][0]):
        refuse_unread(table, {name}, [values])
    refuse_unread(table, {name}, [values | {name: base()[name]}])
    refuse_unread(table, set(), [values])
    refuse_unread(table, {name}, [with_choice(condition, True) | other])
    refuse_unread(table, {name}, [values, with_choice(condition, True)])  # a later phase makes it


@pytest.mark.parametrize("condition", CHOICES)
def test_keys_of_a_choice_that_is_unmade_go_back(condition):
    values = with_choice(condition, False)
    key, _ = parts(condition)[0]
    table = {condition: CHOICES[condition]}
    assert find_unmade(table, {key}, values).keys() == set(CHOICES[condition])
    assert find_unmade(table, set(), values) == {}


def test_the_table_names_keys_and_values_that_exist():
    bounds = {
        field.name: field.metadata
        for section in Config.sections().values()
        for field in section.__dataclass_fields__.values()
        if field.metadata
    }
    for condition, names in CHOICES.items():
        for key, wanted in parts(condition):
            assert {key, *names} <= base().keys()
            for value in wanted.split("|") if key in bounds and wanted else ():
                assert bounds[key]["holds"](value), condition


ERRORS = table("""
opt_type=sgd adam_b1=0.8 | adam_b1=0.8 is read only with opt_type=adamw or muon, and opt_type=sgd \
    here; give opt_type=adamw or muon, or leave adam_b1 out
lora_alpha=32 | lora_alpha=32.0 is read only with lora_rank, and lora_rank=0 here; give lora_rank \
    above 0, or leave lora_alpha out
gradient_accumulation_steps=2 global_batch_size=8 | gradient_accumulation_steps=2 is not read with \
    global_batch_size=8; leave one of them out
phases.1M.rope_factor=4 | phases.1M: rope_factor=4.0 is read only with rope_type=
""")


@pytest.mark.parametrize(("arguments", "line"), ERRORS)
def test_the_error_names_the_choice(arguments, line):
    with refused(line):
        load([BASE, *arguments.split()])


def test_files_and_what_they_are_copied_from(tmp_path):
    """Later layers drop earlier choices, a model file's keys are not given, a phase may choose."""
    copy, own = tmp_path / "copy.yml", tmp_path / "own.yml"
    with open(BASE) as file:
        copy.write_text(file.read().replace("opt_type: adamw ", "opt_type: sgd "))
    assert load([str(copy)]).optimizer.opt_type == "sgd"
    own.write_text(f"base_config: {BASE}\nopt_type: muon\nmuon_beta: 0.8\nadam_b2: 0.9\n")
    assert load([str(own)]).optimizer.muon_beta == 0.8
    optimizer = load([str(own), "opt_type=adamw"]).optimizer
    assert optimizer.muon_beta == 0.95 and optimizer.adam_b2 == 0.9
    model = ("model_name=llama3.1-8b", "rope_type=default")
    assert load([BASE, *model]).model.rope_type == "default"
    later = ("phases.1M.rope_type=llama3.1", "rope_factor=4")
    assert load([BASE, *later]).model.rope_factor == 4


def test_what_another_trainers_file_lists_in_vain_goes_back(tmp_path):
    """So the configuration that a run writes down, where all keys are given, can be read again."""
    theirs, written = tmp_path / "theirs.yml", tmp_path / "written.yml"
    theirs.write_text("rope_factor: 40\nlora_alpha: 8\ngcs_metrics: false\n")
    config = load([str(theirs)], note=lambda line: None)
    assert config.model.rope_factor == base()["rope_factor"] and config.model.lora_alpha == 16
    written.write_text(dump_config(config))
    assert load([str(written)]).values == config.values
    theirs.write_text("rope_factor: 40\nrope_type: llama3.1\ngcs_metrics: false\n")
    assert load([str(theirs)], note=lambda line: None).model.rope_factor == 40
