"""Keys that are given although the choice that reads them is not made, or its family has none."""

import pytest
from conftest import BASE, make_config, refused, table

from maxramp.config.choices import CHOICES
from maxramp.config.keys import Config
from maxramp.config.load import dump_config, load
from maxramp.errors import ConfigError
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


MIXTRAL = "decoder_block=mixtral num_experts=8 num_experts_per_tok=2"
DOTS = "decoder_block=dots1 use_qk_norm=True routed_score_func=sigmoid routed_bias=True "
DOTS += "num_experts=8 num_experts_per_tok=2"
GPT_OSS = "decoder_block=gpt_oss attention_bias=true routed_bias=true num_experts=8 "
GPT_OSS += "num_experts_per_tok=2 sliding_window_size=128"
DELTA = "decoder_block=qwen3_5 use_qk_norm=true gdn_num_key_heads=2 gdn_num_value_heads=4"

LATENT = "decoder_block=deepseek_v3 routed_score_func=sigmoid routed_bias=True num_experts=4 "
LATENT += "base_num_kv_heads=8 head_dim=32"


# The keys, and what the line must hold, a regular expression.
CASES = table("""
sliding_window_size=5 | sliding_window_size=5 .* give decoder_block=mistral
use_qk_norm=true | use_qk_norm=True .* give decoder_block=qwen3
decoder_block=qwen2 | attention_bias=False: .*=qwen2 needs attention_bias=True
decoder_block=gemma3 | use_qk_norm=False, sliding_window_size=0: .* needs use_qk_norm=True sliding_w
decoder_block=qwen3 use_qk_norm=true attention_bias=true | attention_bias=True is read only with \
    decoder_block=qwen2
decoder_block=dots1 num_experts=4 | use_qk_norm=False, .*=dots1 needs use_qk_norm=True
decoder_block=mixtral num_experts=4 lora_rank=4 | lora_targets=\\['matrix'\\]: experts have no \
    adapters; use lora_targets=\\[q_proj,
num_experts=8 | decoder_block=llama2 here; give decoder_block
MIXTRAL norm_topk_prob=True | norm_topk_prob=True is read only with decoder_block=.* leave
decoder_block=mixtral | num_experts=1: .* has experts; give 2 or more
MIXTRAL num_experts_per_tok=9 | num_experts_per_tok=9 of num_experts=8: .* give 8 or fewer
MIXTRAL num_experts=6 ici_expert_parallelism=4 | num_experts=6 does not divide over the expert \
    axis of 4 dev.*ici_expert_parallelism
ici_expert_parallelism=2 | ici_expert_parallelism=2 .*=llama2 has no experts .*ici_fsdp_parallelism
MIXTRAL phases_unit=samples phases.80.ici_expert_parallelism=16 | phases.80: \
    .*ici_expert_parallelism=16
DOTS n_routing_groups=3 topk_routing_group=1 | n_routing_groups=3 topk_routing_group=1: give both \
    or neither
decoder_block=olmoe use_qk_norm=True num_experts=8 head_dim=6 | base_num_query_heads x head_dim = \
    .*=olmoe has base_emb_dim=.*change one
DOTS first_num_dense_layers=2 | first_num_dense_layers=2 of .*fewer
DOTS first_num_dense_layers=1 ici_pipeline_parallelism=2 base_num_decoder_layers=4 | \
    first_num_dense_layers=1: the 2 stages of a pipeline .* use 0, or no pipeline
DOTS routed_bias_update_rate=0.001 lora_rank=4 lora_targets=[q_proj] | \
    routed_bias_update_rate=0.001 moves .* frozen under lora_rank=4; use 0
GPT_OSS attention_sink=true mlp_bias=true mlp_activations_limit=7.0 rope_attention_scaling=true \
    rope_interleave=false max_position_embeddings=131072 inhomogeneous_layer_cycle_interval=2 \
    mlp_activations=[gelu,linear] | ^mlp_activations=.* is not read with decoder_block=gpt_oss
GPT_OSS attention_sink=false | attention_sink=False .*: decoder_block=gpt_oss means True
DELTA gdn_num_key_heads=3 | gdn_num_value_heads=4 is not a multiple of gdn_num_key_heads=3
DELTA head_dim=12 | head_dim=12 is not a multiple of 8
DELTA mlp_activations=[gelu,linear] | mlp_activations=.*=qwen3_5 needs \\[silu, linear\\]
DELTA ici_tensor_parallelism=4 | gdn_num_key_heads=2 does not divide over the tensor axis
LATENT base_num_kv_heads=2 | base_num_kv_heads=2: .* every query head; give base_num_kv_heads=8
LATENT head_dim=16 | ^head_dim=16 is not read with decoder_block=deepseek_v3; leave one
LATENT kv_lora_rank=6 | kv_lora_rank=6 does not divide over the fsdp axis
LATENT lora_rank=2 lora_targets=[q_a_proj] | with q_lora_rank=0 there is no q_a_proj; leave it out
LATENT lora_rank=2 | experts have no adapters; use lora_targets=\\[q_proj,kv_a_proj_with_mqa,
LATENT mscale=0.7 | mscale=0.7 is read only with rope_type=yarn
LATENT decoder_block=glm4_moe base_num_kv_heads=2 head_dim=6 | head_dim=6 is not a multiple of 4
LATENT qk_rope_head_dim=5 | qk_rope_head_dim=5 must be even
kv_lora_rank=8 | kv_lora_rank=8 is read only with decoder_block=deepseek_v3
DELTA lora_rank=2 lora_targets=[in_proj_qkvz] | in_proj_qkvz
DOTS routed_bias_update_rate=0.001 trainable_parameters_mask=[matrix] | \
    routed_bias_update_rate=0.001 moves .* frozen under .*mask=\\['matrix'\\]; use 0
""")


@pytest.mark.parametrize(("keys", "error"), CASES)
def test_one_line(keys, error):
    with pytest.raises(ConfigError, match=f"^.*{error}.*$"):  # `.` is no newline
        for word in ("MIXTRAL", "DOTS", "DELTA", "LATENT", "GPT_OSS"):
            keys = keys.replace(word, globals()[word])
        make_config(*keys.split())
