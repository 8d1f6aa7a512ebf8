"""Tasks that the tests make: of every kind of request, on a few sentences of their own."""

import json
import pathlib

import yaml
from small_models import write_folder

from maxramp.data import tokenizers

TEXT = "the cat sat on a mat and saw two red birds fly over three old green hills at noon"
WORDS = tuple(TEXT.split())
LINES = [" ".join(WORDS[(i * 7 + j * 5) % len(WORDS)] for j in range(4 + i % 9)) for i in range(12)]

# The kind of request, its text and its target, and the metrics.
_TASKS = {
    "choices": ("multiple_choice", "{{question}}", "label", ("acc", "acc_norm")),
    "open": ("loglikelihood", "", "{{text}}", ("acc", "perplexity")),
    "rolling": ("loglikelihood_rolling", "", "{{long}}", ("word_perplexity", "bits_per_byte")),
    "writing": ("generate_until", "{{question}}", "{{text}}", ("exact_match",)),
}
_MORE = {"choices": {"doc_to_choice": "{{choices}}"}}
_MORE["writing"] = {"generation_kwargs": {"until": [" a", "red"], "max_gen_toks": 12}}
_COMMON = {"validation_split": "validation", "fewshot_split": "validation", "target_delimiter": " "}


def write_tasks(folder: pathlib.Path) -> pathlib.Path:
    """A folder of the tasks made_choices, made_open, made_rolling and made_writing."""
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lines.jsonl", "w") as file:
        for i, line in enumerate(LINES):
            choices = [line.split()[-1], WORDS[i % 3], f"{WORDS[i]} {WORDS[i + 1]}"]
            question = " ".join([*line.split()[:-1], *[" "] * (i % 2)])  # some end with a space
            record = {"question": question, "choices": choices, "label": 0}
            long = line * (1 + 5 * (i % 3))
            file.write(json.dumps({**record, "text": line, "long": long}) + "\n")
    files = {"data_files": {"validation": str(folder / "lines.jsonl")}}
    for name, (kind, asked, target, metrics) in _TASKS.items():
        task = {"task": f"made_{name}", "dataset_path": "json", "dataset_kwargs": files} | _COMMON
        task |= {"output_type": kind, "doc_to_text": asked, "doc_to_target": target}
        task |= {"metric_list": [{"metric": metric} for metric in metrics]} | _MORE.get(name, {})
        text = yaml.safe_dump(task, width=1000)
        (folder / f"made_{name}.yaml").write_text(text)
    return folder


def write_model(folder: pathlib.Path, kind: str = "llama3.1", begins: bool = False) -> pathlib.Path:
    """Writes a small random model of `small_models.CONFIGS`; a mark `begins` its texts or not."""
    tokenizer = json.loads(tokenizers.train_bpe(iter(LINES), 288))
    size = len(tokenizer["model"]["vocab"])
    write_folder(folder, kind, vocab_size=size, bos_token_id=0, eos_token_id=1)
    if begins:
        one = {"Sequence": {"id": "A", "type_id": 0}}
        mark = {"SpecialToken": {"id": "<s>", "type_id": 0}}
        special_tokens = {"<s>": {"id": "<s>", "ids": [0], "tokens": ["<s>"]}}
        template = {"single": [mark, one], "pair": [mark, one, one]}
        template |= {"type": "TemplateProcessing", "special_tokens": special_tokens}
        tokenizer["post_processor"] = template
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    config["chat_template"] = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}</s>\\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant: {% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
