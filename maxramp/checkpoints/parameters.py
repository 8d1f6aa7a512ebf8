"""First weights: of a checkpoint, or of a Hugging Face folder."""

from collections.abc import Callable, Mapping
from typing import Any

from maxramp.checkpoints import arrays
from maxramp.checkpoints import folder as checkpoints
from maxramp.checkpoints.fingerprint import fingerprint_of_weights
from maxramp.commandline import print_note
from maxramp.errors import ConfigError
from maxramp.files.place import Place, place, write_whole
from maxramp.huggingface import folder as released
from maxramp.huggingface import reading
from maxramp.keys.section import refuse
from maxramp.model.adapters import attach_adapters, has_adapters, stored_part, without_adapters
from maxramp.model.decoder import Decoder
from maxramp.model.keys import MODEL_KEYS
from maxramp.model.order import order_by_layer


def check_parameters(
    path: str,
    model: Decoder,
    values: Mapping[str, Any],
    note: Callable[[str], None] = print_note,
    base: str = "",
) -> Callable[[], Decoder]:
    """Makes sure that the weights at a path are those of an abstract model.

    Args:
      path: a checkpoint; a folder of them or of a run, whose newest counts; a Hugging Face folder,
        of a model or of adapters, or the name of one there.
      model: the shapes, dtypes and shardings of its weights.
      values: of all keys, resolved.
      note: takes a line about tensors that no weight takes.
      base: of a checkpoint of adapters, where the weights below them are now; "" = where they were.

    Returns:
      What reads them, with the shardings of `model`; it raises a ConfigError too. Where `model`
      has adapters and the path has none, what it returns has none.

    Raises:
      ConfigError: there are no weights, or others.
    """
    family, of_hub = values["decoder_block"], find_released(path)
    if of_hub:
        there = of_hub.keys
        refuse(
            (
                values[name] != there[name] and not (grows and values[name] > there[name]),
                f"{name}={values[name]}: {of_hub.path}/config.json makes it {there[name]}; "
                "model_name=hf takes it from there",
            )
            for name in MODEL_KEYS
            if name in there
            for grows in [name == "vocab_size"]
        )
        rows = there["vocab_size"]
        _check_adapters(path, of_hub.adapter.keys if of_hub.adapter else {}, model, values)
        load_base = reading.prepare_load(
            of_hub.path, of_hub.tensors, rows, without_adapters(model), family, note
        )
        if not of_hub.adapter:
            return load_base
        try:
            files = of_hub.adapter.path, of_hub.adapter.tensors
            of_adapter = reading.prepare_load(
                *(*files, rows, stored_part(model), family, note), of_hub.adapter.layers
            )
        except ConfigError as error:
            raise ConfigError(f"{path} adapts another model than this: {error}") from None
        return lambda: attach_adapters(of_adapter(), load_base())
    checkpoint = checkpoints.read(checkpoints.find(place(path)))
    _check_adapters(path, checkpoint.config, model, values)
    if not checkpoint.config.get("lora_rank"):
        model = without_adapters(model)
        arrays.compare(checkpoint, {"model": model}, values)
        return lambda: arrays.load(checkpoint.path, {"model": model})["model"]
    arrays.compare(checkpoint, {"model": stored_part(model)}, values)
    below = base or checkpoint.config["load_parameters_path"]
    load_base = check_parameters(below, model, values, note)

    def load() -> Decoder:
        weights = without_adapters(load_base())
        if (found := fingerprint_of_weights(order_by_layer(weights))) != checkpoint.reference:
            raise ConfigError(
                f"{below}: not the weights that {checkpoint.path} adapts (hash {found}, was "
                f"{checkpoint.reference}); give load_parameters_path=PATH of those"
            )
        return attach_adapters(
            arrays.load(checkpoint.path, {"model": stored_part(model)})["model"], weights
        )

    return load


def _check_adapters(
    path: str, there: Mapping[str, Any], model: Decoder, values: Mapping[str, Any]
) -> None:
    """Refuses adapters, of these keys, that `model` has no place for or would count otherwise."""
    if not (rank := there.get("lora_rank")):
        return
    if not has_adapters(model):
        raise ConfigError(
            f"{path}: holds adapters and no model; merge them first (maxramp.convert {path} "
            f"--merge --to FOLDER), or train them on with maxramp.train and lora_rank={rank}"
        )
    for name in ("lora_rank", "lora_alpha", "use_rslora", "trainable_layers"):
        if there[name] != values[name]:
            raise ConfigError(
                f"{name}={values[name]}: the adapters of {path} were trained with "
                f"{name}={there[name]}; give that"
            )


def load_parameters(
    path: str, model: Decoder, values: Mapping[str, Any], base: str = ""
) -> Decoder:
    """The weights at a path (`check_parameters`)."""
    return check_parameters(path, model, values, lambda line: None, base)()


def find_released(path: str, key: str = "load_parameters_path") -> released.ModelFolder | None:
    """The Hugging Face folder that the value of a key means; None if it means none."""
    return released.find(key, path)


def released_origin(path: str) -> released.ModelFolder | None:
    """What a Hugging Face folder says about the weights at a path, where they came from one.

    A run that begins with such weights keeps a copy of it.
    """
    if found := find_released(path):
        return found
    run = checkpoints.find(place(path)).parent.parent
    return released.find("load_parameters_path", f"{run}/{released.KEPT_IN}")


def keep_beside(path: str, run: Place) -> None:
    """Keeps in a run's folder what the folder of its first weights says about them.

    What an earlier start kept of others is gone then. config.json is removed first and written
    last: without it nothing is kept.

    Args:
      path: of the weights; "" = new ones.
      run: the folder of a run that begins.

    Raises:
      ConfigError: it cannot be read or written.
    """
    own, found = run / released.KEPT_IN, released_origin(path) if path else None
    files = found.side_files if found else {}
    try:
        for name in released.BESIDE if own.is_dir() else ():
            (own / name).unlink(missing_ok=True)
        for name, data in reversed(files.items()):
            own.mkdir(parents=True, exist_ok=True)
            write_whole(own / name, data)
    except OSError as error:
        raise ConfigError(f"{own}: cannot be written: {error.strerror}") from None
